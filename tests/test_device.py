"""Settings of torch: its allocator's while memory is shared with other processes, and the precision of float32."""

from pathlib import Path

import pytest
import torch

from verl_mg.device import allocator_settings, without_expandable_segments
from verl_mg.fsdp.mesh import MeshGroups
from verl_mg.fsdp.model_runner import FsdpRunner
from verl_mg.layout import Layout, Placement
from verl_mg.megatron.model_runner import MegatronRunner
from verl_mg.megatron.process_groups import ParallelGroups
from verl_mg.models.tiny_model import make_tiny_model
from verl_mg.training.model_spec import ModelSpec


@pytest.fixture
def allocator():
    """Writes the allocator's settings; restores those of before."""
    before = allocator_settings()
    yield torch._C
    torch._C._accelerator_setAllocatorSettings(before)


@pytest.mark.parametrize(
    ("given", "inside"),
    [
        ("expandable_segments:True", "expandable_segments:False"),
        ("max_split_size_mb:64,expandable_segments: True", "max_split_size_mb:64,expandable_segments:False"),
        ("max_split_size_mb:64", "max_split_size_mb:64"),
        ("", ""),
    ],
)
def test_without_expandable_segments_keeps_other_settings_and_restores_all(allocator, given, inside):
    allocator._accelerator_setAllocatorSettings(given)
    with pytest.raises(ZeroDivisionError), without_expandable_segments():
        assert allocator_settings() == inside
        raise ZeroDivisionError
    assert allocator_settings() == given


def test_allocator_settings_are_those_of_a_torch_that_cannot_be_asked_for_them(allocator, monkeypatch):
    allocator._accelerator_setAllocatorSettings("expandable_segments:True,max_split_size_mb:64")
    newer = allocator_settings()
    monkeypatch.delattr(allocator, "_accelerator_getAllocatorSettings", raising=False)
    assert allocator_settings() == newer == "expandable_segments:True,max_split_size_mb:64"


def tf32_allowed(model: Path, backend: str, dtype: torch.dtype) -> bool:
    """Whether a rank's convolutions or products of float32 are TF32 after a model has been built."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    placement = Placement.on(Layout(), 1)
    if backend == "megatron":
        MegatronRunner(ModelSpec(model, dtype), ParallelGroups(placement))
    else:
        FsdpRunner(ModelSpec(model, dtype), MeshGroups(placement))
    return torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_model_in_float32_leaves_no_tf32(ranks, tmp_path, backend, dtype):
    model = make_tiny_model(tmp_path / "model", "qwen3", characters="abcd")
    assert ranks.run(1, tf32_allowed, model, backend, dtype) == [dtype != torch.float32]
