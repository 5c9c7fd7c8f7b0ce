"""Traced tables: the file format, errors for damaged and unfitting files, and use instead of the built-in table."""

import importlib.util
import json
import re
from contextlib import redirect_stdout
from io import StringIO
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.random_models import config, configs, engines, sources
from tests.helpers.roles import build_role
from tests.helpers.tiny_models import tiny_model
from tests.helpers.traces import folder_of, needs_sglang, sglang_traces
from verl_mg.config import Config, JobConfig, OptimizerConfig
from verl_mg.engines.kinds import ProcessKind
from verl_mg.errors import UserError
from verl_mg.job.engine_checks import check_engines
from verl_mg.job.engine_tables import with_engine_table
from verl_mg.layout import EngineLayout, EnginePlacement, Layout, Placement
from verl_mg.models.hf_config import read_config
from verl_mg.models.tensor_index import TensorInfo
from verl_mg.planner.from_config import plan_request
from verl_mg.reshard import best_stride, plan, schedule
from verl_mg.roles.models import Actor
from verl_mg.sharding.boxes import Piece, Shard
from verl_mg.sharding.module_table import module_table
from verl_mg.sharding.traced_table import (
    TracedTable,
    read_rank_shards,
    read_traced_table,
    write_rank_shards,
    write_traced_table,
)
from verl_mg.sharding.weight_table import WeightTable, weight_table
from verl_mg.weight_sync.transfer_plan import plan_to_engines

SHARDS = {
    "lm_head.weight": Shard((4, 8), (Piece("lm_head.weight", *[((0, 3), (0, 8))] * 2),), (((3, 4), (0, 8)),)),
    "experts.w13_weight": Shard(
        (2, 4, 6),
        tuple(
            Piece(f"experts.{e}.{kind}", ((0, 2), (0, 6)), ((e, e + 1), (2 * i, 2 * i + 2), (0, 6)))
            for e in range(2)
            for i, kind in enumerate(("gate", "up"))
        ),
    ),
    "scale": Shard((), (Piece("scale", (), ()),)),
}
TABLE = TracedTable("Qwen3MoeForCausalLM", "sglang", "0.5.23", EngineLayout(tp=2, ep=2), (SHARDS, SHARDS))


@pytest.fixture
def path(tmp_path):
    write_traced_table(tmp_path / "deep" / "table.json", TABLE)
    return tmp_path / "deep" / "table.json"


def test_traced_table_written_and_read_is_equal(path):
    assert read_traced_table(path) == TABLE
    assert [file.name for file in path.parent.iterdir()] == ["table.json"]


def test_traced_table_file_has_documented_format(path):
    content = json.loads(path.read_text())
    assert (content["format"], content["engine"], content["version"]) == (2, "sglang", "0.5.23")
    assert content["layout"] == {"tp": 2, "ep": 2, "attention_dp": 1, "pp": 1}
    assert content["ranks"][1]["lm_head.weight"] == {
        "shape": [4, 8],
        "pieces": [["lm_head.weight", [[0, 3], [0, 8]], [[0, 3], [0, 8]]]],
        "padding": [[[3, 4], [0, 8]]],
        "order": [],
    }


def test_rank_shards_written_and_read_are_equal(tmp_path):
    write_rank_shards(tmp_path / "rank.json", SHARDS)
    assert read_rank_shards(tmp_path / "rank.json") == SHARDS


def head(content):
    return content["ranks"][1]["lm_head.weight"]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda c: c.update(format=1), "format: Input should be 2"),
        (lambda c: c.update(format="2"), "format: "),
        (lambda c: c.update(engine="tgi"), "engine: Input should be 'sglang' or 'vllm'"),
        (lambda c: c.pop("version"), "version: Field required"),
        (lambda c: c.update(more=1), "more: Extra inputs are not permitted"),
        (lambda c: c["layout"].update(tp=3), "layout: rollout"),
        (lambda c: c["layout"].update(tp=2.0), "layout.tp: Input should be a valid integer"),
        (lambda c: c["ranks"].pop(), "ranks: 1 entries, but layout tp2-ep2 has 2 ranks"),
        (lambda c: head(c)["shape"].__setitem__(0, -1), "ranks.1.lm_head.weight.shape.0: Input should be greater"),
        (lambda c: head(c)["shape"].__setitem__(0, 5), "ranks.1.lm_head.weight: 8 of 40 elements"),
        (lambda c: head(c)["shape"].__setitem__(0, 3), "ranks.1.lm_head.weight: the box ((3, 4), (0, 8)) is outside"),
        (lambda c: head(c)["shape"].append(1), "ranks.1.lm_head.weight: the box ((0, 3), (0, 8)) is outside"),
        (lambda c: head(c).update(padding=[]), "ranks.1.lm_head.weight: 8 of 32 elements"),
        (lambda c: head(c)["padding"].append([[0, 1], [0, 8]]), "ranks.1.lm_head.weight: the box ((0, 1), (0, 8))"),
        (lambda c: head(c)["padding"][0][0].reverse(), "ranks.1.lm_head.weight: the box ((4, 3), (0, 8)) is outside"),
        (lambda c: head(c)["pieces"][0][1].__setitem__(0, [0, 2]), "ranks.1.lm_head.weight: a box of shape (2, 8)"),
        (lambda c: head(c)["pieces"][0].pop(), "ranks.1.lm_head.weight.pieces.0"),
        (lambda c: head(c)["pieces"][0].__setitem__(0, 7), "ranks.1.lm_head.weight.pieces.0.0: Input should be a val"),
    ],
)
def test_read_traced_table_damaged_file_names_file_and_key(path, change, complaint):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(UserError) as error:
        read_traced_table(path)
    assert str(error.value).startswith(f"{path}: {complaint}")


def test_read_traced_table_missing_or_not_json_is_user_error(path):
    path.write_text("{")
    with pytest.raises(UserError, match=f"{path}: the file: Invalid JSON"):
        read_traced_table(path)
    path.unlink()
    with pytest.raises(UserError, match=f"{path}: cannot be read"):
        read_traced_table(path)


def test_write_traced_table_failed_write_keeps_earlier_file(path):
    with pytest.raises(UserError, match="cannot be written"):
        write_traced_table(path / "below_a_file.json", TABLE)
    assert read_traced_table(path) == TABLE


def test_traced_table_shard_map_places_engines_on_their_ranks():
    tensors = {"lm_head.weight": TensorInfo(0, (3, 8))}
    shard_map = TABLE.shard_map(EnginePlacement(EngineLayout(tp=2, ep=2), tuple(range(10, 14))), tensors)
    assert shard_map.ranks == (10, 11, 12, 13) and shard_map.shards(12) == SHARDS
    assert shard_map.tensors is tensors
    with pytest.raises(UserError, match=r"rollout.layout=tp2: rollout.sharding_table was traced for tp2-ep2\. Write"):
        TABLE.shard_map(EnginePlacement(EngineLayout(tp=2), (0, 1)), tensors)


def traced(weights: WeightTable, layout: EngineLayout) -> TracedTable:
    """The table that a trace of a correct engine gives: parameters in another order than the built-in table's."""
    ranks = tuple(dict(reversed(weights.engine_shards(layout, rank).items())) for rank in range(layout.ranks))
    return TracedTable(weights.config.architecture, "sglang", "0.5", layout, ranks)


TP2 = EngineLayout(tp=2)


def moves(weights: WeightTable, source, placement, ranks_per_node):
    """Sends, receives, messages and (in any order) copies of every rank, and the bytes of all ranks."""
    moved = plan(source, weights.shard_map_engine(placement), ranks_per_node)
    plans = {rank: moved.rank_plan(rank) for rank in {*source.ranks, *placement.ranks}}
    buckets = {rank: schedule(moved, rank, torch.bfloat16, 4000).buckets for rank in plans}
    per_rank = {rank: (p.sends, p.receives, sorted(map(repr, p.copies))) for rank, p in plans.items()}
    return per_rank, buckets, {rank: (t.received, t.lower_bound) for rank, t in moved.traffic(2).items()}


@given(st.data(), st.sampled_from([2, 8]))
@settings(max_examples=10, deadline=None)
def test_with_traced_table_gives_the_plan_of_the_builtin_table(tmp_path_factory, data, ranks_per_node):
    c = data.draw(configs())
    placement, source = data.draw(engines(c)), data.draw(sources(c))
    builtin, path = weight_table(c), tmp_path_factory.mktemp("traced") / "table.json"
    write_traced_table(path, traced(builtin, placement.layout))
    from_file = builtin.with_traced_table(path)
    assert from_file.traced is not None and builtin.with_traced_table(None) is builtin
    assert moves(from_file, source, placement, ranks_per_node) == moves(builtin, source, placement, ranks_per_node)


def test_best_stride_with_traced_table_equals_builtin(tmp_path):
    builtin = weight_table(config("llama", num_key_value_heads=8))
    write_traced_table(tmp_path / "table.json", traced(builtin, TP2))
    source = builtin.shard_map_megatron(Placement.on(Layout.parse("tp8"), 8))
    placement = EnginePlacement(TP2, tuple(range(8)))
    from_file = builtin.with_traced_table(tmp_path / "table.json")
    assert best_stride(source, from_file, placement, 8) == best_stride(source, builtin, placement, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 16}, r"'model.embed_tokens.weight' has shape \(101, 8\), but \(101, 16\) in the model"),
        ({"num_hidden_layers": 5}, "the tensor 'model.layers.4.input_layernorm.weight' of the model is missing"),
        ({"num_hidden_layers": 3}, "the model has no tensor 'model.layers.3.input_layernorm.weight'"),
    ],
)
def test_with_traced_table_of_another_model_is_user_error(tmp_path, changes, message):
    path = tmp_path / "table.json"
    write_traced_table(path, traced(weight_table(config("llama")), EngineLayout(tp=2)))
    with pytest.raises(UserError, match=f"{path}: .*{message}.* Run verl-mg trace for this model"):
        weight_table(config("llama", **changes)).with_traced_table(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("traced") / "model", "qwen3")


@pytest.fixture
def table_file(model, tmp_path):
    """A traced table of the model at tp2."""
    table = weight_table(read_config(model))
    ranks = tuple(dict(table.engine_shards(TP2, rank)) for rank in range(2))
    write_traced_table(tmp_path / "table.json", TracedTable("Qwen3ForCausalLM", "sglang", "0.5", TP2, ranks))
    return tmp_path / "table.json"


def job_config(model, **rollout) -> Config:
    return Config.model_validate({
        "model": {"path": model, "dtype": "bfloat16"},
        "data": {"train": model},
        "rollout": {"engine": "sglang", "layout": "tp2", **rollout},
    })  # fmt: skip


def sync_plans(model, table_file):
    """Chunks of a weight sync (shards, dtypes and schedule) with the built-in and with the traced table."""
    actor = build_role(Actor, model, "tp2", dtype=torch.bfloat16, optimizer=OptimizerConfig())
    builtin, placement = actor.runner.table, EnginePlacement(TP2, (0, 1))
    plans = []
    for table in (builtin, builtin.with_traced_table(table_file)):
        transfer = plan_to_engines(actor.runner, table, [placement])
        plans.append(([(dict(c.shards), c.dtypes, c.schedule) for c in transfer.chunks], transfer.lower_bound))
    dist.barrier()
    return plans[0] == plans[1], len(plans[0][0])


def test_weight_sync_with_traced_table_plans_as_builtin(ranks, model, table_file):
    assert ranks.run(2, sync_plans, model, table_file) == [(True, 1), (True, 1)]


@pytest.fixture
def sglang_installed(monkeypatch):
    """Configurations with rollout.engine=sglang can be checked without SGLang."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=name))
    monkeypatch.setattr(ProcessKind, "check_layout", lambda kind, case: case.table.check_engine_layout(case.layout))


def test_check_engines_with_traced_table_accepts_its_model_and_layout(sglang_installed, model, table_file):
    check_engines(job_config(model, sharding_table=table_file), weight_table(read_config(model)), 2)


def test_check_engines_damaged_table_names_file_and_key(sglang_installed, model, table_file):
    content = json.loads(table_file.read_text())
    del content["ranks"][1]["model.norm.weight"]["shape"]
    table_file.write_text(json.dumps(content))
    with pytest.raises(UserError, match=rf"^{table_file}: ranks\.1\.model\.norm\.weight\.shape: Field required"):
        check_engines(job_config(model, sharding_table=table_file), weight_table(read_config(model)), 2)


def test_check_engines_table_of_another_model_or_layout_is_user_error(sglang_installed, model, table_file, tmp_path):
    other = weight_table(read_config(tiny_model(tmp_path / "other", "llama", layers=3)))
    with pytest.raises(UserError, match=f"^{table_file}: .* Run verl-mg trace for this model"):
        check_engines(job_config(model, sharding_table=table_file), other, 2)
    with pytest.raises(UserError, match="rollout.sharding_table was traced for tp2"):
        check_engines(job_config(model, sharding_table=table_file, layout="tp1"), weight_table(read_config(model)), 2)


def test_plan_request_contains_the_sharding_table(model, table_file):
    assert plan_request(job_config(model, sharding_table=table_file), {"actor", "rollout"}).sharding_table == table_file


def traced_by_the_job(folder, output):
    """The table's shards of each engine rank, what the console shows, and whether a second call traces again."""
    job = job_config(folder, layout="tp2").model_copy(update={"job": JobConfig(output=output)})
    with redirect_stdout(StringIO()) as console:
        table = with_engine_table(job, module_table(folder))
        again = with_engine_table(job, module_table(folder))
    assert again.traced == table.traced
    return [dict(table.engine_shards(TP2, rank)) for rank in range(2)], console.getvalue()


@needs_sglang
@pytest.mark.nightly
def test_job_traces_an_engine_without_a_built_in_table_once(ranks, tmp_path):
    folder = folder_of("olmo2")
    (shards, console), (others, silence) = ranks.run(2, traced_by_the_job, folder, tmp_path / "run")
    assert shards == others == sglang_traces([("olmo2", TP2)])["olmo2", TP2]
    assert silence == ""
    (path,) = (tmp_path / "run" / "sharding_tables").iterdir()
    assert re.fullmatch(
        rf"rollout\.engine=sglang: there is no built-in table for 'olmo2', so the engine's loader was traced in \d+ s: "
        rf"{path}\n",
        console,
    )
