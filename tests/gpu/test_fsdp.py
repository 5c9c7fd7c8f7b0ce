"""The FSDP backend on the devices: two updates, attention by ragged kernels, images, against `transformers`."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.fsdp.training import train
from tests.fsdp.vision_rows import in_plain_torch, on_ranks, rows_of
from tests.helpers.rank_pool import RankPool
from tests.helpers.tiny_models import random_rows, vision_model
from tests.megatron.training import Trained, assert_equal, assert_near
from verl_mg import device
from verl_mg.config import FsdpConfig
from verl_mg.fsdp.packed_rows import PackedRows, packed_attention
from verl_mg.models.hf_config import read_config

NAMES = ("dense", "mixture", "capped", "latent")
HOST = FsdpConfig(cpu_offload=True)
# (model, layout, ranks, options, recomputation)
CASES = [
    ("dense", "tp1", 1, FsdpConfig(), False),
    ("mixture", "tp1", 1, FsdpConfig(), True),
    ("mixture", "tp1", 1, HOST, False),
    ("dense", "dp4", 4, FsdpConfig(replicas=2), False),
    ("dense", "tp2-dp2", 4, HOST, False),
    ("dense", "cp2", 2, FsdpConfig(), True),
]
HALF_CASES = [
    *((name, "tp1", 1, FsdpConfig()) for name in NAMES),
    ("dense", "tp1", 1, HOST),
    ("mixture", "tp2-dp2", 4, FsdpConfig()),
    ("dense", "cp2-dp2", 4, FsdpConfig()),
]
LENGTHS = (5, 1, 64, 64, 30)


def trained(
    ranks: RankPool, model: Path, layout: str, count: int, options: FsdpConfig, *others: object
) -> list[Trained]:
    """Two updates on so many ranks."""
    rows = random_rows(12, read_config(model).vocab)
    results: list[Trained] = ranks.run(
        count, train, model, layout, options.replicas, rows, *others[:1], options, *others[1:]
    )
    return results


@pytest.mark.parametrize(("name", "layout", "count", "options", "recompute"), CASES)
def test_updates_in_float32_on_devices_equal_transformers(
    ranks, models, expected, name, layout, count, options, recompute
):
    assert_equal(trained(ranks, models[name], layout, count, options, recompute), expected(models[name]), 1e-4)


@pytest.mark.parametrize(("name", "layout", "count", "options"), HALF_CASES)
def test_updates_in_bfloat16_on_devices_are_near_transformers(ranks, models, expected, name, layout, count, options):
    model = models[f"half {name}"]
    assert_near(trained(ranks, model, layout, count, options, False, torch.bfloat16), expected(model))


def attention_errors(window: int | None, softcap: float | None) -> list[float]:
    """Largest differences of output and gradients from float32 attention over each sequence, in bfloat16."""
    here, lengths = device.current_device(), torch.tensor(LENGTHS)
    ends, generator = F.pad(lengths.cumsum(0), (1, 0)), torch.Generator().manual_seed(0)
    packed = PackedRows(lengths, torch.zeros(1, 1), ends.int().to(here), None)
    shapes = [(1, 8, sum(LENGTHS), 64), *[(1, 2, sum(LENGTHS), 64)] * 2]
    values = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    weight = torch.randn(1, sum(LENGTHS), 8, 64, generator=generator)

    def attended(inputs: list[torch.Tensor], rows: PackedRows) -> list[torch.Tensor]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        output, _ = packed_attention(
            torch.nn.Identity(), *leaves, None, sliding_window=window, softcap=softcap, packed=rows
        )
        (output.float() * weight.to(output.device)).sum().backward()
        return [output.detach(), *(x.grad for x in leaves if x.grad is not None)]

    ours = attended([x.to(here) for x in values], packed)
    theirs = attended([x.float() for x in values], PackedRows(lengths, packed.position_ids, ends.int(), None))
    assert len(ours) == 4 and all(x.abs().max() > 0 for x in theirs)
    return [float((a.cpu().float() - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs, strict=True)]


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (16, None), (None, 20.0), (16, 20.0)])
def test_attention_of_packed_rows_in_bfloat16_equals_sdpa_of_each_row(ranks, window, softcap):
    ((errors),) = ranks.run(1, attention_errors, window, softcap)
    assert max(errors) < 0.02


@pytest.mark.parametrize("architecture", ["qwen2_5_vl", "qwen3_vl", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_rows_with_images_on_devices_have_log_probs_of_transformers(ranks, architecture, dtype):
    wanted, _ = in_plain_torch(architecture, frozen=False)
    rows, folder = rows_of(architecture), vision_model(architecture)
    ((found, gradients),) = ranks.run(1, on_ranks, folder, "tp1", rows, False, dtype)
    errors = torch.cat([(found[row] - logprobs).abs() for row, logprobs in enumerate(wanted)])
    # `transformers` in bfloat16 differs by up to 0.07 from itself in float32, in the mean of a row.
    assert errors.mean() < 0.1 if dtype is torch.bfloat16 else errors.max() < 1e-4
    assert any("vis" in name and values.any() for name, _, values in gradients)
