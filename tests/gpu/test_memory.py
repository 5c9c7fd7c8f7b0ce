"""Memory of a device: what a role takes, and that its offload returns it."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.machine import Machine
from tests.megatron.training import token_loss
from tests.rank_pool import RankPool
from tests.tiny_models import CHARACTERS, random_rows
from verl_mg import device
from verl_mg.config import OptimizerConfig
from verl_mg.layout import Layout, Placement
from verl_mg.megatron.model_runner import ModelRunner
from verl_mg.megatron.process_groups import ParallelGroups
from verl_mg.megatron.trainer import Trainer
from verl_mg.models.hf_config import read_config
from verl_mg.models.tiny_model import make_tiny_model
from verl_mg.training.offload import CpuOffload

SIZES = {"gpu": {"hidden": 1024, "layers": 4, "ffn": 4096, "heads": 8}, "cpu": {"hidden": 64, "layers": 2}}
ALLOWED = 2**28
"""Bytes that kernels keep for themselves: workspaces, compiled code."""


@dataclass
class Offloaded:
    """Results on the rank.

    held: bytes of weights, optimizer state and gradients; free: bytes of the device that nobody has, before the role,
    with it, while it is on the host, and with it again; 0 on the CPU.
    """

    held: int
    free: list[int]
    same_weights: bool
    losses: list[float]


def offloaded(model: Path) -> Offloaded:
    """An update, the role to the host and back, another update."""
    free = [_free()]
    groups = ParallelGroups(Placement.on(Layout(), 1))
    runner = ModelRunner(model, groups, torch.bfloat16)
    trainer = Trainer(runner, OptimizerConfig(lr=1e-3))
    rows = random_rows(6, read_config(model).vocab)
    scored = int((rows["loss_mask"] & (rows.positions > 0)).sum())

    def update() -> float:
        return trainer.update([rows], 1.0, token_loss, "token-mean", scored, scored)["loss"]

    losses = [update()]
    offload = CpuOffload(runner, trainer)
    held = [*runner.weight_storages(), *trainer.state_storages()]
    held += trainer.gradient_storages()
    size = sum(storage.nbytes() for storage in held)
    weights = {name: weight.detach().cpu().clone() for name, weight in runner.parameters().items()}
    free.append(_free())
    offload.to_host()
    assert not any(storage.nbytes() for storage in held)
    free.append(_free())
    offload.to_device()
    free.append(_free())
    same = all(torch.equal(weight.cpu(), weights[name]) for name, weight in runner.parameters().items())
    return Offloaded(size, free, same, [*losses, update()])


def _free() -> int:
    device.release_unused_memory()
    return device.free_memory() or 0


def test_offload_of_role_returns_its_memory_to_the_device(ranks: RankPool, machine: Machine, tmp_path: Path) -> None:
    sizes = SIZES["gpu" if machine.gpus else "cpu"]
    model = make_tiny_model(tmp_path / "model", "qwen3", characters=CHARACTERS, **sizes)
    ((found),) = ranks.run(1, offloaded, model)
    assert found.same_weights and found.losses[0] != found.losses[1]
    if machine.gpus:
        before, loaded, left, back = found.free
        assert found.held > 4 * ALLOWED
        assert before - loaded == pytest.approx(found.held, abs=ALLOWED)
        assert left - loaded == pytest.approx(found.held, abs=ALLOWED)
        assert left - back == pytest.approx(found.held, abs=ALLOWED)
