"""Refresh of the reference: afterwards it is the actor, as one that is loaded from the actor's export."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.helpers.rank_pool import job_context
from tests.helpers.roles import build_role
from tests.helpers.tiny_models import random_rows
from tests.roles.updates import COUNT, OPTIMIZER, TEMPERATURE, noise_loss, own_rows
from verl_mg.config import LoraConfig
from verl_mg.fsdp.mesh import MeshGroups
from verl_mg.layout import Layout, Placement
from verl_mg.megatron.process_groups import ParallelGroups
from verl_mg.models.hf_config import read_config
from verl_mg.roles.models import Actor, Reference

LORA = LoraConfig(rank=4)


def refreshed(
    model: Path, folder: Path, actor_on: str, reference_on: str, lora: LoraConfig | None, dtype: torch.dtype
) -> list[tuple[float, float, bool]]:
    """For each of two refreshes: how far the actor has moved, how far the reference is off, whether as one loaded."""
    context, ranks = job_context(), dist.get_world_size()

    def groups(text: str) -> ParallelGroups | MeshGroups:
        backend, layout = text.split()
        placement = Placement.on(Layout.parse(layout), ranks)
        return MeshGroups(placement) if backend == "fsdp" else ParallelGroups(placement)

    options = {"temperature": TEMPERATURE, "tokens_per_micro_batch": 60}
    actor = build_role(
        Actor, model, groups(actor_on), context, dtype=torch.float32, optimizer=OPTIMIZER, lora=lora, **options
    )
    where = groups(reference_on)
    reference = build_role(Reference, model, where, context, dtype=dtype, name="reference", **options)
    context.offload.register(reference.cpu_offload)
    reference.cpu_offload.to_host()
    reference.follow(actor)
    own = own_rows(random_rows(COUNT, read_config(model).vocab))
    found = []
    for number in range(2):
        before = reference.compute_logprobs(own)
        actor.update(own, noise_loss, "token-mean")
        reference.refresh()
        now, wanted = reference.compute_logprobs(own), actor.compute_logprobs(own)
        actor.save(folder / str(number), model)
        loaded = build_role(Reference, folder / str(number), where, context, dtype=dtype, name="loaded", **options)
        same = torch.equal(now, loaded.compute_logprobs(own))
        found.append((float((wanted - before).abs().max()), float((wanted - now).abs().max()), same))
    return found


CASES = [
    ("megatron tp2-pp2", "megatron tp1", None, torch.float32),
    ("megatron tp2", "fsdp tp1", LORA, torch.bfloat16),
    ("fsdp tp2", "megatron pp2", None, torch.float32),
    ("megatron pp2", "megatron pp2-vpp2", LORA, torch.float32),
]


@pytest.mark.parametrize(
    ("actor_on", "reference_on", "lora", "dtype"),
    [pytest.param(*case, marks=[pytest.mark.nightly] if number else []) for number, case in enumerate(CASES)],
)
def test_refreshed_reference_in_any_layout_is_the_actor(ranks, models, tmp_path, actor_on, reference_on, lora, dtype):
    tolerance = 1e-5 if dtype is torch.float32 else 0.2
    results = ranks.run(4, refreshed, models["qwen3"], tmp_path, actor_on, reference_on, lora, dtype)
    for refreshes in zip(*results, strict=True):
        assert max(moved for moved, _, _ in refreshes) > 0.1
        assert all(off < tolerance and same for _, off, same in refreshes), refreshes
