"""Weights written by real ranks into a Hugging Face directory."""

import os

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.helpers.tiny_models import SPARSE, nightly, published_mixture, tiny_model
from verl_mg.checkpoint.hf_safetensors import CheckpointWriter
from verl_mg.fsdp.mesh import MeshGroups
from verl_mg.fsdp.model_runner import FsdpRunner
from verl_mg.layout import Layout, Placement
from verl_mg.megatron.model_runner import MegatronRunner
from verl_mg.megatron.process_groups import ParallelGroups
from verl_mg.models.hf_config import SINGLE
from verl_mg.training import weights
from verl_mg.training.model_spec import ModelSpec


def write_counting(model, target, layout, chunk_bytes, backend="megatron"):
    """Writes the model; returns the number of runs that this rank wrote."""
    placement = Placement.on(Layout.parse(layout), dist.get_world_size())
    if backend == "fsdp":
        runner = FsdpRunner(ModelSpec(model, torch.float32), MeshGroups(placement))
    else:
        runner = MegatronRunner(ModelSpec(model, torch.float32), ParallelGroups(placement))
    table = runner.table
    writer = CheckpointWriter(target, table.huggingface(), torch.float32, stacked=table.tensor_index.stacked)
    if dist.get_rank() == 0:
        writer.create()
    dist.barrier()
    runs, write, limit = [], os.pwrite, weights.CHUNK_BYTES

    def counting(descriptor, content, offset):
        runs.append(len(content))
        return write(descriptor, content, offset)

    os.pwrite, weights.CHUNK_BYTES = counting, chunk_bytes
    try:
        weights.write_weights(runner, writer)
    finally:
        os.pwrite, weights.CHUNK_BYTES = write, limit
    dist.barrier()
    return len(runs)


@pytest.mark.parametrize(
    ("name", "layout", "count"),
    [
        ("qwen3", "tp2", 4),
        *nightly(*((name, "tp2-pp2", 4) for name in SPARSE), ("qwen3_moe", "tp2-pp2-etp2", 4)),
    ],
)
def test_write_weights_writes_each_box_in_one_run(ranks, tmp_path, name, layout, count):
    model = tiny_model(tmp_path / "model", name)
    runs = ranks.run(count, write_counting, model, tmp_path / "written", layout, 4096)
    expected, written = load_file(model / SINGLE), load_file(tmp_path / "written" / SINGLE)
    assert all(torch.equal(written[tensor], expected[tensor].float()) for tensor in written)
    assert sum(runs) <= 2 * len(written)  # tensor parallelism of 2: at most two runs for each tensor


@pytest.mark.parametrize(
    ("layout", "count", "backend"),
    [
        ("tp2-pp2", 4, "megatron"),
        ("dp2", 2, "fsdp"),
        *nightly(("tp1", 1, "megatron"), ("tp2-ep2-etp1", 2, "megatron"), ("ep2", 2, "megatron")),
    ],
)
def test_write_weights_of_stacked_experts_restores_the_directory(ranks, tmp_path, layout, count, backend):
    assert_restored(ranks, tiny_model(tmp_path / "model", "gpt_oss"), tmp_path, layout, count, backend)


def assert_restored(ranks, model, tmp_path, layout, count, backend):
    ranks.run(count, write_counting, model, tmp_path / "written", layout, 4096, backend)
    expected, written = load_file(model / SINGLE), load_file(tmp_path / "written" / SINGLE)
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[tensor], expected[tensor]) for tensor in written)


@pytest.mark.nightly
def test_write_weights_of_a_published_vision_mixture_restores_the_directory(ranks, tmp_path):
    assert_restored(ranks, published_mixture(tmp_path / "model"), tmp_path, "dp2", 2, "fsdp")
