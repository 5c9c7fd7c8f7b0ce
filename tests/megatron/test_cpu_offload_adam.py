"""Adam on the host takes the steps of Adam on the device."""

import pytest
import torch
import torch.distributed as dist

from tests.tiny_models import random_rows, tiny_model
from verl_mg.config import GuardConfig, OptimizerConfig
from verl_mg.layout import Layout, Placement
from verl_mg.megatron.cpu_offload_adam import CpuOffloadAdamW
from verl_mg.megatron.model_runner import ModelRunner
from verl_mg.megatron.process_groups import ParallelGroups
from verl_mg.megatron.storages import inner_optimizers
from verl_mg.megatron.trainer import Trainer

OPTIMIZER = OptimizerConfig(lr=0.01, eps=1e-3, betas=(0.9, 0.99), weight_decay=0.1, warmup_steps=2)


def loss(tokens):
    return -tokens["advantages"] * tokens.logprobs, {"approx_kl": tokens["noise"]}


def trained(model, layout, dtype, cpu_offload, guard=None):
    """The weights after three steps, and how far they went."""
    groups = ParallelGroups(Placement.on(Layout.parse(layout), dist.get_world_size()))
    runner = ModelRunner(model, groups, dtype)
    trainer = Trainer(runner, OPTIMIZER.model_copy(update={"cpu_offload": cpu_offload}), guard)
    inner = inner_optimizers(trainer.optimizer)
    assert inner and all(isinstance(one, CpuOffloadAdamW) == cpu_offload for one in inner)
    before = {name: weight.detach().clone() for name, weight in runner.parameters().items()}
    rows = random_rows(6, 24, seed=groups.coordinates.dp)
    scored = int(rows["loss_mask"].sum())
    for _ in range(3):
        trainer.update([rows], 1.0, loss, "token-mean", scored, scored)
    after = {name: weight.detach().clone() for name, weight in runner.parameters().items()}
    moments = [len(one.state) for one in inner]
    return after, {name: (after[name] - before[name]).abs().max().item() for name in after}, moments


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("architecture", "layout"),
    [("qwen3", "tp2"), ("qwen3_moe", "ep2"), pytest.param("qwen2", "tp1", marks=pytest.mark.nightly)],
)
def test_cpu_offload_adam_takes_the_steps_of_device_adam(ranks, tmp_path, architecture, layout, dtype):
    model = tiny_model(tmp_path / "model", architecture, layers=2)
    device = ranks.run(2, trained, model, layout, dtype, False)
    host = ranks.run(2, trained, model, layout, dtype, True)
    for (expected, went, moments), (found, _, own) in zip(device, host, strict=True):
        assert own == moments and all(moments)
        for name, weight in expected.items():
            assert went[name] > 1e-3, name
            rounding = 0 if dtype is torch.float32 else 2**-8 * weight.abs().max().item()
            assert (found[name] - weight).abs().max() <= 1e-5 * went[name] + rounding, name


def test_cpu_offload_adam_rollback_restores_moments(ranks, tmp_path):
    model = tiny_model(tmp_path / "model", "qwen3", layers=2)
    guard = GuardConfig(max_kl=1e-6, action="rollback")
    device = ranks.run(1, trained, model, "tp1", torch.float32, False, guard)
    host = ranks.run(1, trained, model, "tp1", torch.float32, True, guard)
    assert all(torch.allclose(host[0][0][name], weight, atol=1e-7) for name, weight in device[0][0].items())
