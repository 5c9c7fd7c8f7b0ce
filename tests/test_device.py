"""torch's allocator: its settings while memory is shared with other processes."""

import pytest
import torch

from verl_mg.device import without_expandable_segments


@pytest.fixture
def allocator():
    """Reads and writes the allocator's settings; restores those of before."""
    before = torch._C._accelerator_getAllocatorSettings()
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
        assert allocator._accelerator_getAllocatorSettings() == inside
        raise ZeroDivisionError
    assert allocator._accelerator_getAllocatorSettings() == given
