"""Waits of the host for the GPU in one micro-batch, as CUDA itself reports them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.helpers.tiny_models import random_rows
from tests.megatron.layout_models import HALF_HEAD_DIM, make_model
from tools.bench.bench_gpu import policy_loss
from tools.bench.update_profile import host_waits
from verl_mg.config import OptimizerConfig
from verl_mg.layout import Layout, Placement
from verl_mg.megatron.model_runner import MegatronRunner
from verl_mg.megatron.process_groups import ParallelGroups
from verl_mg.megatron.trainer import MegatronTrainer
from verl_mg.models.hf_config import read_config
from verl_mg.training.model_spec import ModelSpec
from verl_mg.training.trainer import MiniBatch, Objective


def waits_for_a_micro_batch(model: Path) -> int:
    """More waits of an update with two micro-batches than of one with one."""
    runner = MegatronRunner(ModelSpec(model, torch.bfloat16), ParallelGroups(Placement.on(Layout(), 1)))
    trainer = MegatronTrainer(runner, OptimizerConfig())
    rows = random_rows(6, read_config(model).vocab)
    rows["old_logprobs"] = rows["noise"]

    def update(count: int) -> Callable[[], object]:
        return lambda: trainer.update(
            MiniBatch([rows] * count, None, 50, 6), Objective(policy_loss, "seq-mean-token-mean", 1.0)
        )

    update(2)()  # what is compiled and allocated at the first use
    one, two = (host_waits(update(count)) for count in (1, 2))
    assert one > 0, "the copy of the metrics is not reported"
    return two - one


@pytest.mark.needs(gpu=True)
@pytest.mark.parametrize("name", ["dense", "mixture"])
def test_update_waits_for_no_micro_batch(ranks, tmp_path, name):
    assert ranks.run(1, waits_for_a_micro_batch, make_model(tmp_path / "m", name, head_dim=HALF_HEAD_DIM)) == [0]
