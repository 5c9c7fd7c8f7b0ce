"""`rollout.sharding_table` in jobs and in `verl-mg plan`: a traced file is used like the built-in table."""

import importlib.util
import json
import re
from contextlib import redirect_stdout
from io import StringIO

import pytest
import torch
import torch.distributed as dist

from tests.helpers.rank_pool import job_context
from tests.helpers.tiny_models import tiny_model
from tests.helpers.traces import folder_of, needs_sglang, sglang_traces
from verl_mg.config import Config, JobConfig, OptimizerConfig
from verl_mg.errors import UserError
from verl_mg.job import build_engines
from verl_mg.job.build_engines import check_engines
from verl_mg.job.engine_tables import with_engine_table
from verl_mg.layout import EngineLayout, EnginePlacement, Layout, Placement
from verl_mg.megatron.process_groups import ParallelGroups
from verl_mg.models.hf_config import read_config
from verl_mg.planner.from_config import plan_request
from verl_mg.roles.models import Actor
from verl_mg.sharding.module_table import module_table
from verl_mg.sharding.traced_table import TracedTable, write_traced_table
from verl_mg.sharding.weight_table import weight_table
from verl_mg.weight_sync.transfer_plan import plan_to_engines

TP2 = EngineLayout(tp=2)


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


def config(model, **rollout) -> Config:
    return Config.model_validate({
        "model": {"path": model, "dtype": "bfloat16"},
        "data": {"train": model},
        "rollout": {"engine": "sglang", "layout": "tp2", **rollout},
    })  # fmt: skip


def sync_plans(model, table_file):
    """Chunks of a weight sync (shards, dtypes and schedule) with the built-in and with the traced table."""
    actor = Actor(
        model,
        ParallelGroups(Placement(Layout.parse("tp2"), (0, 1))),
        job_context(),
        dtype=torch.bfloat16,
        temperature=1.0,
        tokens_per_micro_batch=64,
        optimizer=OptimizerConfig(),
    )
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
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(build_engines, "check_sglang_on_cpu", lambda config, dims, layout: None)


def test_check_engines_with_traced_table_accepts_its_model_and_layout(sglang_installed, model, table_file):
    check_engines(config(model, sharding_table=table_file), weight_table(read_config(model)), 2)


def test_check_engines_damaged_table_names_file_and_key(sglang_installed, model, table_file):
    content = json.loads(table_file.read_text())
    del content["ranks"][1]["model.norm.weight"]["shape"]
    table_file.write_text(json.dumps(content))
    with pytest.raises(UserError, match=rf"^{table_file}: ranks\.1\.model\.norm\.weight\.shape: Field required"):
        check_engines(config(model, sharding_table=table_file), weight_table(read_config(model)), 2)


def test_check_engines_table_of_another_model_or_layout_is_user_error(sglang_installed, model, table_file, tmp_path):
    other = weight_table(read_config(tiny_model(tmp_path / "other", "llama", layers=3)))
    with pytest.raises(UserError, match=f"^{table_file}: .* Run verl-mg trace for this model"):
        check_engines(config(model, sharding_table=table_file), other, 2)
    with pytest.raises(UserError, match="rollout.sharding_table was traced for tp2"):
        check_engines(config(model, sharding_table=table_file, layout="tp1"), weight_table(read_config(model)), 2)


@pytest.mark.parametrize("rollout", [{"engine": "hf"}, {"urls": ["http://localhost:1"]}])
def test_check_engines_table_without_engines_in_the_job_is_user_error(model, table_file, rollout):
    with pytest.raises(UserError, match=r"^rollout\.sharding_table: only engines inside the job"):
        check_engines(config(model, sharding_table=table_file, **rollout), weight_table(read_config(model)), 2)


def test_plan_request_contains_the_sharding_table(model, table_file):
    assert plan_request(config(model, sharding_table=table_file), {"actor", "rollout"}).sharding_table == table_file


# -- without a file ----------------------------------------------------------------------------------------------


def traced_by_the_job(folder, output):
    """The table's shards of each engine rank, what the console shows, and whether a second call traces again."""
    job = config(folder, layout="tp2").model_copy(update={"job": JobConfig(output=output)})
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
