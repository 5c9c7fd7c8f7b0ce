"""Shared prefixes that are computed once on the devices, against the same rows computed whole."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.rank_pool import RankPool
from tests.megatron.layout_models import HALF_HEAD_DIM, make_model
from tests.megatron.shared_rows import sharing_rows
from tests.megatron.training import assembled, assert_logprobs_near
from tests.roles.updates import assert_same, passes
from verl_mg.models.hf_config import read_config
from verl_mg.roles.models import Actor

BUDGET = 4096


def shared_and_whole(ranks: RankPool, model: Path, layout: str, count: int, **options: Any) -> list[list[Any]]:
    """Results of each rank with prefixes that are computed once, and with whole rows."""
    arguments = (model, layout, BUDGET, sharing_rows(read_config(model).vocab))
    shared, whole = (ranks.run(count, passes, *arguments, on, Actor, options) for on in (True, False))
    assert sum(result[4] for result in shared) < sum(result[4] for result in whole), "tokens that are computed"
    return [shared, whole]


@pytest.mark.parametrize(("name", "layout", "count"), [("dense", "tp1", 1), ("latent", "cp2", 2), ("capped", "tp2", 2)])
def test_shared_prefixes_in_float32_on_devices_equal_whole_rows(ranks, tmp_path, name, layout, count):
    shared, whole = shared_and_whole(ranks, make_model(tmp_path, name), layout, count)
    assert_same(shared, whole, 1e-4)


@pytest.mark.parametrize("kernels", ["torch", pytest.param("transformer_engine", marks=pytest.mark.needs(te=True))])
@pytest.mark.parametrize("name", ["dense", "latent", "capped"])
def test_shared_prefixes_in_bfloat16_on_devices_are_near_whole_rows(ranks, tmp_path, name, kernels):
    model = make_model(tmp_path, name, head_dim=HALF_HEAD_DIM)
    (shared,), (whole,) = shared_and_whole(ranks, model, "tp1", 1, dtype=torch.bfloat16, kernels=kernels)
    outputs, expected = (torch.cat(result[1]) for result in (shared, whole))
    assert_logprobs_near((outputs - expected).abs()[expected != 0])
    gradients, wanted = (assembled(result[3]) for result in (shared, whole))
    ours, theirs = (torch.cat([side[name].flatten() for name in wanted]) for side in (gradients, wanted))
    assert torch.cosine_similarity(ours, theirs, dim=0) > 0.97
