"""GRPO updates and log-probs of an actor under every layout, compared with plain torch and `transformers`."""

import json
from functools import partial

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.checkpoint.quantized_directories import dequantized_by_transformers, quantize_directory
from tests.helpers.given_experts import with_experts
from tests.helpers.given_keys import drawn_keys, net_with_keys, with_keys
from tests.helpers.tiny_models import oracle, oracle_outputs, tiny_model
from tests.roles.updates import (
    COUNT,
    TEMPERATURE,
    actor_on,
    compare,
    oracle_update,
    own_rows,
    rows,
    settings,
    with_entropy,
)
from verl_mg.batch import Batch
from verl_mg.models.hf_config import SINGLE, read_config
from verl_mg.rows.plan import RowIndexer
from verl_mg.sharding.weight_table import weight_table

LAYOUTS = [
    ("tp1", 2),
    ("pp2", 2),
    ("tp2-pp2", 4),
    ("tp2-cp2", 4),
    *(pytest.param(*layout, marks=pytest.mark.nightly) for layout in (("tp1", 1), ("tp2", 2), ("tp2", 4), ("pp4", 4))),
]
MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def update(model, layout, budget, mode, folder, minibatches=1):
    """Metrics of one update on rows that are distributed over the ranks; saves the model."""
    actor = actor_on(model, layout, budget)
    mine = own_rows(rows(model))
    cfg = settings(mode)
    metrics = actor.update(mine, partial(with_entropy, cfg), mode, max_length=16, num_minibatches=minibatches)
    actor.save(folder, model)
    return metrics


@pytest.mark.parametrize(("layout", "count"), LAYOUTS)
@pytest.mark.parametrize("budget", [24, pytest.param(4096, marks=pytest.mark.nightly)])
def test_update_under_every_layout_and_budget_equals_plain_torch(ranks, models, tmp_path, layout, count, budget):
    model, mode = models["qwen3"], "seq-mean-token-mean"
    results = ranks.run(count, update, model, layout, budget, mode, tmp_path / "saved")
    assert all(result == results[0] for result in results)
    compare(results[0], tmp_path / "saved", model, oracle_update(model, mode))


@pytest.mark.parametrize(
    ("architecture", "layout", "mode"),
    [
        *(("llama", "tp2-pp2", mode) for mode in MODES),
        *(pytest.param("qwen2", "tp2-pp2", mode, marks=pytest.mark.nightly) for mode in MODES),
        ("qwen3_moe", "tp2-ep2", "seq-mean-token-mean"),
        pytest.param("mixtral", "pp2-ep2", "seq-mean-token-mean", marks=pytest.mark.nightly),
    ],
)
def test_update_of_every_architecture_and_aggregation_equals_plain_torch(
    ranks, models, tmp_path, architecture, layout, mode
):
    model = models[architecture]
    results = ranks.run(4, update, model, layout, 30, mode, tmp_path / "saved")
    compare(results[0], tmp_path / "saved", model, oracle_update(model, mode))


def test_minibatches_under_every_layout_are_cut_by_sample_id(ranks, models, tmp_path):
    model, mode = models["qwen2"], "token-mean"
    expected = oracle_update(model, mode, chunks=3)
    for layout, count in (("tp1", 1), ("tp1", 4), ("tp2-pp2", 4)):
        results = ranks.run(count, update, model, layout, 50, mode, tmp_path / "saved", 3)
        assert results[0]["actor/loss"] == pytest.approx(expected[0], rel=3e-5)
        assert results[0]["actor/grad_norm"] == pytest.approx(expected[1], rel=3e-5)


def logprobs(model, layout, budget):
    actor = actor_on(model, layout, budget)
    # The last rank has no rows.
    owners = max(dist.get_world_size() - 1, 1)
    mine = rows(model).select(range(dist.get_rank(), COUNT, owners) if dist.get_rank() < owners else [])
    return mine["sample_id"].tolist(), mine.lengths.tolist(), actor.compute_logprobs(mine)


@pytest.mark.parametrize(("layout", "count"), LAYOUTS)
def test_compute_logprobs_under_every_layout_returns_each_row_to_its_owner(ranks, models, layout, count):
    model = models["llama"]
    batch = rows(model)
    with torch.no_grad():
        expected, _ = oracle_outputs(oracle(model), batch, TEMPERATURE)
    expected = torch.where(batch["loss_mask"], expected, 0)
    place = {int(sample_id): i for i, sample_id in enumerate(batch["sample_id"])}
    seen = 0
    for ids, lengths, column in ranks.run(count, logprobs, model, layout, 40):
        for sample_id, part in zip(ids, column.split(lengths), strict=True):
            start, stop = batch.offsets[place[sample_id] : place[sample_id] + 2].tolist()
            assert torch.allclose(part, expected[start:stop], atol=2e-5)
            seen += 1
    assert seen == COUNT


BUDGETS = {4: 32, 2: 20}
"""Tokens of a micro-batch by cp, for rows of 3 to 20 tokens, of which some fit a part of it and others do not."""


def update_dynamically(model, layout, folder, budget):
    """Metrics of one update, the log-probs before it by row, and the sizes of context parallelism that were used."""
    actor, mine, mode = actor_on(model, layout, budget, dynamic_cp=True), own_rows(rows(model)), "seq-mean-token-mean"
    index = RowIndexer().index(mine)
    cp_sizes = actor.plan_micro_batches(index, index.row_groups).cp_sizes
    column = actor.compute_logprobs(mine).split(mine.lengths.tolist())
    metrics = actor.update(mine, partial(with_entropy, settings(mode)), mode, max_length=16)
    actor.save(folder, model)
    return metrics, dict(zip(mine["sample_id"].tolist(), column, strict=True)), cp_sizes


@pytest.mark.parametrize(
    ("architecture", "layout", "count", "cp_sizes"),
    [
        ("qwen3", "cp4", 4, [4, 2, 1]),
        ("qwen3", "cp2-pp2", 4, [2, 1]),
        ("qwen3_moe", "cp2-ep2", 2, [2, 1]),
        *(pytest.param("qwen3", layout, 4, [2, 1], marks=pytest.mark.nightly) for layout in ("cp2", "tp2-cp2")),
    ],
)
def test_dynamic_context_of_short_rows_equals_torch(ranks, models, tmp_path, architecture, layout, count, cp_sizes):
    """Each row is on as few ranks as it needs."""
    model = models[architecture]
    results = ranks.run(count, update_dynamically, model, layout, tmp_path / "saved", BUDGETS[cp_sizes[0]])
    for metrics, _, used in results:
        assert metrics == results[0][0] and sorted(set(used), reverse=True) == cp_sizes
    found, batch = {row: column for _, columns, _ in results for row, column in columns.items()}, rows(model)
    with torch.no_grad():
        expected, _ = oracle_outputs(oracle(model), batch, TEMPERATURE)
    for row, wanted in enumerate(expected.split(batch.lengths.tolist())):
        mask = batch.row("loss_mask", row)
        assert torch.allclose(found[int(batch["sample_id"][row])][mask], wanted[mask], atol=1e-4)
    compare(results[0][0], tmp_path / "saved", model, oracle_update(model, "seq-mean-token-mean"))


def replayed(model, layout, given):
    """Log-probs and metrics of one update, with the given experts or, without them, those of the routers."""
    batch = rows(model)
    if given is not None:
        batch["routed_experts"] = given
    mine, actor = own_rows(batch), actor_on(model, layout, 40)
    own, logprobs = list(range(dist.get_rank(), COUNT, dist.get_world_size())), actor.compute_logprobs(mine)
    cfg = settings("token-mean")
    return own, logprobs.split(mine.lengths.tolist()), actor.update(mine, partial(with_entropy, cfg), "token-mean")


def test_routed_experts_of_the_batch_replace_the_routers_in_logprobs_and_updates(ranks, models):
    model, batch = models["qwen3_moe"], rows(models["qwen3_moe"])
    given = torch.rand(batch.total_tokens, 4, 4, generator=torch.Generator().manual_seed(2)).topk(2).indices.short()
    with torch.no_grad():
        logprobs, _ = oracle_outputs(with_experts(model, given), batch, TEMPERATURE)
    expected = torch.where(batch["loss_mask"], logprobs, 0).split(batch.lengths.tolist())
    ((_, _, alone),) = ranks.run(1, replayed, model, "tp1", given)
    ((_, _, free),) = ranks.run(1, replayed, model, "tp1", None)
    for layout, count in (("tp2-ep2", 4), ("cp2-pp2", 4), ("pp2-vpp2", 2)):
        for own, parts, metrics in ranks.run(count, replayed, model, layout, given):
            assert metrics == pytest.approx(alone, rel=1e-5)
            assert all(torch.allclose(part, expected[row], atol=2e-5) for row, part in zip(own, parts, strict=True))
    assert abs(free["actor/entropy"] - alone["actor/entropy"]) > 1e-2


def with_selected_keys(model, layout, batch):
    """Log-probs by row, and metrics of an update."""
    mine, actor = own_rows(batch), actor_on(model, layout, 40)
    rows_here, logprobs = range(dist.get_rank(), COUNT, dist.get_world_size()), actor.compute_logprobs(mine)
    metrics = actor.update(mine, partial(with_entropy, settings("token-mean")), "token-mean")
    return dict(zip(rows_here, logprobs.split(mine.lengths.tolist()), strict=True)), metrics


@pytest.mark.nightly
def test_selected_keys_of_the_batch_replace_the_choice_of_indexers_in_logprobs_and_updates(ranks, tmp_path):
    kinds, selecting = ["full", "full", "shared", "full"], (0, 1, 3)
    model = tiny_model(tmp_path / "sparse", "glm_moe_dsa", indexer_types=kinds)
    selections = drawn_keys(rows(model), read_config(model).indexer.top_k, len(selecting))
    batch = with_keys(rows(model), selections)
    assert (batch["selection_sizes"] > 0).sum() > 5
    with torch.no_grad():
        logprobs, _ = oracle_outputs(net_with_keys(model, selecting, selections)[0], rows(model), TEMPERATURE)
    expected = torch.where(batch["loss_mask"], logprobs, 0).split(batch.lengths.tolist())
    ((_, alone),) = ranks.run(1, with_selected_keys, model, "tp1", batch)
    for layout, count in (("tp2-cp2", 4), ("cp2-pp2", 4), ("pp2-vpp2", 2)):
        for parts, metrics in ranks.run(count, with_selected_keys, model, layout, batch):
            assert metrics == pytest.approx(alone, rel=1e-5)
            assert all(torch.allclose(part, expected[row], atol=2e-5) for row, part in parts.items())


def columns_at_stage(model, layout, given):
    batch = rows(model)
    batch["routed_experts"] = given
    mine = own_rows(batch)
    actor = actor_on(model, layout, 40)
    index = RowIndexer().index(mine)
    plan = actor.plan_micro_batches(index, index.row_groups)
    at = actor.runner.groups.coordinates
    numbers = [row for micro in plan.rows[at.dp] for row in micro]
    return at, numbers, Batch.concat(*actor.gather_micro_batches(mine, index, [plan]))


@pytest.mark.parametrize(
    ("layout", "layers"), [("pp4", [[0], [1], [2], [3]]), ("pp2-vpp2", [[0, 2], [1, 3]]), ("ep2-pp2", [[0, 1], [2, 3]])]
)
def test_each_pipeline_stage_gets_its_layers_of_the_routing_and_only_the_ends_get_tokens(ranks, models, layout, layers):
    model = models["qwen3_moe"]
    batch = rows(model)
    given = torch.rand(batch.total_tokens, 4, 4, generator=torch.Generator().manual_seed(3)).topk(2).indices.short()
    batch["routed_experts"] = given
    batch = batch.select(batch["sample_id"].argsort())
    for at, numbers, found in ranks.run(2 if "vpp" in layout else 4, columns_at_stage, model, layout, given):
        expected = batch.select(numbers)
        assert torch.equal(found.lengths, expected.lengths)
        assert torch.equal(found["routed_experts"], expected["routed_experts"][:, layers[at.pp]])
        last, first = at.pp == len(layers) - 1, at.pp == 0
        names = set(batch.names()) if last else {"tokens", "routed_experts"} if first else {"routed_experts"}
        assert set(found.names()) == names
        for name in names - {"routed_experts"}:
            assert torch.equal(found[name], expected[name])


def save_unchanged(model, layout, folder):
    """Saves the actor of a model as it was loaded."""
    actor_on(model, layout, 24).save(folder, model)


def test_save_of_an_fp8_checkpoint_writes_the_dtype_of_training(ranks, tmp_path):
    model = tiny_model(tmp_path / "model", "deepseek_v3", layers=2)
    quantize_directory(model, (4, 4))
    ranks.run(2, save_unchanged, model, "tp2", tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    expected = dequantized_by_transformers(model, weight_table(read_config(model)), (4, 4))
    saved = load_file(tmp_path / "saved" / SINGLE)
    assert saved.keys() == expected.keys() and {tensor.dtype for tensor in saved.values()} == {torch.float32}
    assert all(torch.equal(saved[name].bfloat16(), expected[name].bfloat16()) for name in saved)
