"""Vision-language modules over packed rows with and without images, against `transformers` row by row."""

import pytest

from tests.fsdp.vision_rows import in_plain_torch, on_ranks, plain, rows_of
from tests.helpers.tiny_models import nightly, vision_model
from verl_mg.layout import Layout
from verl_mg.sharding.boxes import slices

CASES = [
    ("qwen2_5_vl", "dp2", False),
    ("qwen3_vl", "cp2", False),
    ("qwen3_vl", "dp2", True),
    ("gemma3", "dp2", False),
    # Each row by itself, with its images: layers with a state.
    *nightly(("qwen3_5", "dp2", False), ("qwen3_5_moe", "tp2", True)),
    *nightly(("qwen2_5_vl", "cp2", True), ("qwen3_vl_moe", "dp2", False), ("qwen3_vl_moe", "tp2", False)),
    *nightly(("qwen2_5_vl", "tp2", False), ("gemma3", "tp2", False), ("qwen3_vl", "dp2-cp2", False)),
]


@pytest.mark.parametrize(("architecture", "layout", "frozen"), CASES)
def test_rows_with_images_packed_equal_transformers(ranks, architecture, layout, frozen):
    rows = rows_of(architecture)
    expected, gradients = in_plain_torch(architecture, frozen)
    count = Layout.parse(layout).ranks
    results = ranks.run(count, on_ranks, vision_model(architecture), layout, rows, frozen)
    assert {row for found, _ in results for row in found} == set(range(len(rows)))
    gradients = {plain(name): gradient for name, gradient in gradients.items()}
    for found, parts in results:
        for row, logprobs in found.items():
            assert logprobs.allclose(expected[row], atol=2e-5)
        named = {name: values for name, _, values in parts}
        assert any("vis" in name for name in named) != frozen
        for name, box, values in parts:
            wanted = gradients[plain(name)]
            error = (values.reshape(wanted[slices(box)].shape) - wanted[slices(box)]).abs().max()
            assert error <= 2e-5 * wanted.abs().max().clamp(min=1e-3), name
    assert any(gradient.any() for name, gradient in gradients.items() if "vis" in name) != frozen
