"""Weight syncs that send changes alone: real updates, and what arrives in an engine's process, without the engine."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.helpers.roles import build_role
from tests.roles.updates import COUNT, rows, settings, with_entropy
from verl_mg.config import OptimizerConfig
from verl_mg.engines.ipc_payload import named_views, open_payload
from verl_mg.engines.patch_payload import apply_payload, has_patches
from verl_mg.layout import EngineLayout, EnginePlacement
from verl_mg.models.tiny_model import make_tiny_model
from verl_mg.roles.models import Actor
from verl_mg.weight_sync.engines import ProcessEngineSync, engine_groups

MODE, UPDATES = "seq-mean-token-mean", 4


class PatchedEngine:
    """An engine that keeps the parameters of its ranks and applies changes to them."""

    def __init__(self, size):
        self.parameters = [{} for _ in range(size)]
        self.loads = []

    def load(self, payloads, version):
        for held, payload in zip(self.parameters, payloads, strict=True):
            places, memory = open_payload(payload, torch.device("cpu"))
            if has_patches(places):
                apply_payload(places, memory, held.__getitem__)
            else:
                held |= {name: tensor.clone() for name, tensor in named_views(places, memory)}
        self.loads.append("changes" if has_patches(places) else "all")
        return 0

    def loaded(self, number): ...


def same_bits(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n].view(torch.uint8), b[n].view(torch.uint8)) for n in a)


def run(model, layout, wire, lr):
    """Real updates of an actor on 4 ranks, and after each a sync of changes and one of all values."""
    actor = build_role(
        Actor,
        model,
        layout,
        dtype=torch.bfloat16,
        tokens_per_micro_batch=200,
        optimizer=OptimizerConfig(lr=lr, weight_decay=0.0),
    )
    placement, table = EnginePlacement(EngineLayout(tp=2), (0, 1, 2, 3)), actor.runner.table
    leads = dist.get_rank() in {ranks[0] for ranks in placement.members().values()}
    patched, whole = (PatchedEngine(2) if leads else None for _ in range(2))
    groups = engine_groups(placement)
    changes = ProcessEngineSync(placement, groups, patched, table, wire, delta=True)
    everything = ProcessEngineSync(placement, groups, whole, table, wire)
    mine = rows(model).select(range(dist.get_rank(), COUNT, 4))
    report = []
    for number in range(UPDATES):
        if number:
            actor.update(mine, partial(with_entropy, settings(MODE)), MODE, max_length=16, num_minibatches=1)
        if number == UPDATES - 1 and leads:
            parameter = patched.parameters[1]["model.norm.weight"]
            parameter.view(torch.int16)[3] ^= 1  # a bit of the engine's memory
        metrics = [sync.transfer(actor)["weight_sync/bytes_received"] for sync in (changes, everything)]
        report.append((metrics, not leads or all(map(same_bits, patched.parameters, whole.parameters))))
    return report, patched.loads if leads else None


@pytest.mark.parametrize(
    ("architecture", "layout", "wire"),
    [
        ("qwen3_moe", "pp2-ep2", "cast"),
        pytest.param("qwen3", "tp2-pp2", "cast", marks=pytest.mark.nightly),
        pytest.param("qwen3", "tp4", "fp8_block", marks=pytest.mark.nightly),
    ],
)
def test_transfer_of_changes_after_adamw_updates_gives_the_bits_of_a_whole_transfer(
    ranks, tmp_path, architecture, layout, wire
):
    model = make_tiny_model(
        tmp_path, architecture, hidden=128, layers=2, heads=4, kv_heads=4, head_dim=64, ffn=256, init_std=0.02
    )
    results = ranks.run(4, run, model, layout, wire, 1e-6)
    for number, steps in enumerate(zip(*(report for report, _ in results), strict=True)):
        (sent, full), _ = steps[0]
        assert all(same for _, same in steps), number
        print(f"{architecture} {layout} {wire}, update {number}: {sent:.0f} of {full:.0f} bytes, {sent / full:.1%}")
        if number in (1, 2):
            assert sent < 0.4 * full
        elif number == 0:
            assert sent == full
        else:  # the changes, then all values for the engine that was damaged
            assert full < sent < 1.4 * full
    assert [loads for _, loads in results if loads] == [["all", "changes", "changes", "changes", "all"]] * 2
