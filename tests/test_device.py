"""Settings of torch: its allocator's while memory is shared with other processes, and the precision of float32."""

import pytest
import torch

from verl_mg.device import allocator_settings, compute_in_float32, without_expandable_segments


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


def allow_tf32(names: str) -> None:
    """TF32 as a library or a container may have allowed it: by one of torch's sets of names for it."""
    if names == "former names":
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    elif names == "precision":
        torch.set_float32_matmul_precision("medium")
    elif names == "new names":
        torch.backends.fp32_precision = "tf32"


def precisions(names: str) -> list[str | bool]:
    """What torch says about products, convolutions and FlexAttention's kernel on a rank, by all of its names."""
    from torch._inductor.kernel.flex.flex_attention import get_float32_precision

    if names:
        allow_tf32(names)
        compute_in_float32()
    kernels = (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn)
    return [
        *(of_kernels.fp32_precision for of_kernels in kernels),
        get_float32_precision(),
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
    ]


@pytest.mark.parametrize("names", ["", "former names", "precision", "new names"])
def test_rank_computes_float32_with_all_of_its_bits(ranks, names):
    """From its start on; and whatever was allowed before: products and convolutions are IEEE's, not TF32's."""
    assert ranks.run(1, precisions, names) == [["ieee"] * 3 + ["'ieee'", "highest", False, False]]
