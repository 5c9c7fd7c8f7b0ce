"""What training keeps leaves the device and comes back as it was."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.helpers.roles import build_role
from tests.helpers.tiny_models import random_rows, tiny_model
from verl_mg.config import OptimizerConfig
from verl_mg.roles.models import Actor
from verl_mg.training.offload import CpuOffload


def held(actor: Actor) -> int:
    """Bytes of the storages of parameters and of Adam's averages."""
    tensors = [*actor.runner.parameters().values()]
    states = [state for one in actor.trainer.inner_optimizers for state in one.state.values()]
    tensors += [value for state in states for value in state.values() if value.dim()]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def updated(
    model: Path, layout: str, dtype: torch.dtype, kind: str, away: bool
) -> tuple[dict[str, torch.Tensor], list[int]]:
    actor = build_role(
        Actor, model, layout, dtype=dtype, tokens_per_micro_batch=60, optimizer=OptimizerConfig(kind=kind, lr=1e-2)
    )
    batch = random_rows(6, vocab=24, seed=dist.get_rank())
    batch["sample_id"] = batch["sample_id"] * 2 + dist.get_rank()
    cpu_offload, sizes = CpuOffload(actor.runner, actor.trainer), []
    for _ in range(3):
        actor.update(batch, lambda tokens: (-tokens["advantages"] * tokens.logprobs, {}), "token-mean")
        if away:
            sizes.append(held(actor))
            cpu_offload.to_host()
            cpu_offload.to_host()  # the second time nothing is left to do
            sizes.append(held(actor))
            cpu_offload.to_device()
            sizes.append(held(actor))
    return {name: tensor.detach().clone() for name, tensor in actor.runner.parameters().items()}, sizes


@pytest.mark.parametrize(
    ("architecture", "dtype", "kind"),
    [
        ("qwen3", torch.float32, "adamw"),
        ("qwen3_moe", torch.bfloat16, "adamw"),
        pytest.param("qwen3", torch.bfloat16, "adamw", marks=pytest.mark.nightly),
        pytest.param("qwen3_moe", torch.float32, "adamw", marks=pytest.mark.nightly),
        pytest.param("qwen3_moe", torch.bfloat16, "muon", marks=pytest.mark.nightly),
    ],
)
def test_updates_with_offload_are_bitwise_identical(ranks, tmp_path, architecture, dtype, kind):
    model = tiny_model(tmp_path / "model", architecture, layers=2)
    stayed = ranks.run(2, updated, model, "tp2", dtype, kind, False)
    went = ranks.run(2, updated, model, "tp2", dtype, kind, True)
    for (expected, _), (found, sizes) in zip(stayed, went, strict=True):
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        for before, meanwhile, after in zip(sizes[::3], sizes[1::3], sizes[2::3], strict=True):
            assert meanwhile == 0 < before == after
