"""Dynamic context parallelism: rows on as few ranks as they need, with the log-probs and updates of one rank."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.helpers.roles import build_role
from tests.helpers.tiny_models import oracle, oracle_outputs
from tests.roles.updates import OPTIMIZER, TEMPERATURE, compare, oracle_update, settings, with_entropy
from tests.roles.updates import rows as all_rows
from verl_mg.layout import Layout, Placement
from verl_mg.megatron.process_groups import ParallelGroups
from verl_mg.roles.models import Actor
from verl_mg.rows.plan import RowIndexer

BUDGETS = {4: 32, 2: 20}
"""Tokens of a micro-batch by cp, for rows of 3 to 20 tokens, of which some fit a part of it and others do not."""
LAYOUTS = [("cp4", 4, [4, 2, 1]), ("cp2-pp2", 4, [2, 1])]
MODE = "seq-mean-token-mean"


def update(model, layout, folder, budget):
    placement = Placement.on(Layout.parse(layout), dist.get_world_size())
    actor = build_role(
        Actor,
        model,
        ParallelGroups(placement, dynamic_cp=True),
        temperature=TEMPERATURE,
        tokens_per_micro_batch=budget,
        optimizer=OPTIMIZER,
    )
    batch = all_rows(model)
    mine = batch.select(range(dist.get_rank(), len(batch), dist.get_world_size()))
    index = RowIndexer().index(mine)
    cp_sizes = actor.plan_micro_batches(index, index.row_groups).cp_sizes
    column = actor.compute_logprobs(mine).split(mine.lengths.tolist())
    metrics = actor.update(mine, partial(with_entropy, settings(MODE)), MODE, max_length=16)
    actor.save(folder, model)
    return metrics, dict(zip(mine["sample_id"].tolist(), column, strict=True)), cp_sizes


@pytest.mark.parametrize(
    ("architecture", "layout", "count", "cp_sizes"),
    [
        *(("qwen3", *layout) for layout in LAYOUTS),
        ("qwen3_moe", "cp2-ep2", 2, [2, 1]),
        *(pytest.param("qwen3", layout, 4, [2, 1], marks=pytest.mark.nightly) for layout in ("cp2", "tp2-cp2")),
    ],
)
def test_dynamic_context_of_short_rows_equals_torch(ranks, models, tmp_path, architecture, layout, count, cp_sizes):
    model = models[architecture]
    results = ranks.run(count, update, model, layout, tmp_path / "saved", BUDGETS[cp_sizes[0]])
    for metrics, _, used in results:
        assert metrics == results[0][0]
        assert sorted(set(used), reverse=True) == cp_sizes
    batch = all_rows(model)
    with torch.no_grad():
        expected, _ = oracle_outputs(oracle(model), batch, TEMPERATURE)
    found = {row: column for _, columns, _ in results for row, column in columns.items()}
    for row, sample in enumerate(batch["sample_id"].tolist()):
        mask = batch.row("loss_mask", row)
        wanted = expected[batch.offsets[row] : batch.offsets[row + 1]]
        assert torch.allclose(found[sample][mask], wanted[mask], atol=1e-4)
    compare(results[0][0], tmp_path / "saved", model, oracle_update(model, MODE))
