"""Weights handed over to another process as one memory handle."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.launched import ROOT
from tests.helpers.random_models import checkpoint, config
from verl_mg import device
from verl_mg.engines.payloads import Staging
from verl_mg.engines.sglang.arguments import ON_CPU
from verl_mg.sharding.weight_table import weight_table

READER_S = 60


def handed_over(folder: Path, expandable: bool) -> tuple[bool, bool]:
    """Whether another process read all values, and whether what it wrote is here."""
    c, here = config("deepseek_v3"), device.current_device()
    shards, values = weight_table(c).huggingface(), checkpoint(c, torch.float32)
    before = device.allocator_settings()
    if expandable:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    try:
        other = torch.ones(2**22, device=here)  # memory of the same allocator, with its setting
        staging = Staging(shards, dict.fromkeys(shards, torch.float32), here)
        for name, tensor in staging.tensors.items():
            tensor.copy_(values[name])
        read_by_another(staging.payload(), folder / "read.safetensors", here)
        read = load_file(folder / "read.safetensors")
        same = read.keys() == values.keys() and all(torch.equal(read[name], values[name]) for name in values)
        written = all(torch.equal(tensor.cpu(), values[name] + 1) for name, tensor in staging.tensors.items())
        return same, written and bool(other.all())
    finally:
        torch._C._accelerator_setAllocatorSettings(before or "expandable_segments:False")


def read_by_another(payload: str, file: Path, here: torch.device) -> None:
    if here.type == "cuda":
        torch.cuda.synchronize()
    environment = os.environ | ({} if here.type == "cuda" else ON_CPU)
    command = [sys.executable, "-m", "tests.gpu.payload_reader", str(file)]
    subprocess.run(command, input=payload, text=True, cwd=ROOT, env=environment, timeout=READER_S, check=True)


# Expandable segments are of the allocator for GPUs.
@pytest.mark.parametrize("expandable", [False, pytest.param(True, marks=pytest.mark.needs(gpu=True))])
def test_payload_opened_by_another_process_is_the_same_memory(ranks, tmp_path, expandable):
    assert ranks.run(1, handed_over, tmp_path, expandable) == [(True, True)]
