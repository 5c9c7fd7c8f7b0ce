"""`job.deterministic`: two runs are bitwise the same, and what makes them so is really on."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.helpers.rank_pool import job_context, job_store
from tests.run.jobs import job, lines_of, make_inputs
from verl_mg.data import Prompt
from verl_mg.engines import Sampling
from verl_mg.engines.engine_options import EngineOptions
from verl_mg.engines.sglang.arguments import engine_arguments
from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout
from verl_mg.models.hf_config import read_config
from verl_mg.rollout.engine_group import ProcessEngineGroup
from verl_mg.rollout.groups import Group
from verl_mg.rollout.work_queue import WorkQueue
from verl_mg.servers.info import ServerInfo, ServerRequirements, check

SPY = """
import os
import torch
from verl_mg.recipes.grpo import Config, iteration as learn, roles

def iteration(job, cfg):
    chunk = job.actor.runner.chunks[0]
    return learn(job, cfg) | {
        "seen/torch": torch.are_deterministic_algorithms_enabled(),
        "seen/cudnn": torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark,
        "seen/megatron": chunk.config.deterministic_mode and chunk.embedding.word_embeddings.deterministic_mode,
        "seen/cublas": os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8",
        "seen/nccl": os.environ["NCCL_ALGO"] == "Ring",
    }
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = make_inputs(tmp_path_factory.mktemp("inputs"))
    (folder / "spy.py").write_text(SPY)
    return folder


@contextmanager
def restored_determinism() -> Iterator[None]:
    """Restores the settings, for the rank runs other tests afterwards."""
    environment, cudnn = dict(os.environ), torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        torch.use_deterministic_algorithms(False)
        cudnn.deterministic, cudnn.benchmark = before


def deterministic_job(inputs: Path, output: Path, overrides: list[str]) -> None:
    with restored_determinism():
        job(inputs / "spy.py", inputs, output, ["job.deterministic=true", *overrides])


def test_deterministic_runs_are_bitwise_identical(ranks, inputs, tmp_path):
    layout = ["actor.layout=tp2", "algorithm.kl.coefficient=0.01"]
    for name in ("one", "two"):
        ranks.run(2, deterministic_job, inputs, tmp_path / name, layout)
    one = lines_of(tmp_path / "one")
    assert one == lines_of(tmp_path / "two") and len(one) == 3 and one[3]["actor/grad_norm"] > 0
    seen = {name: value for name, value in one[3].items() if name.startswith("seen/")}
    assert len(seen) == 5 and all(seen.values()), seen
    assert not any(ranks.run(2, torch.are_deterministic_algorithms_enabled))


def taken(fixed: bool) -> list[int]:
    """Of four groups of two samples, what this rank's engine takes; every second rank leads one."""
    leads = [rank % 2 == 0 for rank in range(dist.get_world_size())]
    engines = ProcessEngineGroup(None, None, leads, job_context(), sleep=False, disjoint=False, static=fixed)
    groups = [Group(Prompt(g, (1,), "", None, {}), range(2 * g, 2 * g + 2)) for g in range(4)]
    queue, mine = WorkQueue(job_store(), "key", Sampling(max_new_tokens=1), groups, 4, share=engines.share), []
    if leads[dist.get_rank()]:
        while found := queue.pop(1):
            mine += found
    return mine


def test_static_engine_group_shares_do_not_depend_on_time(ranks):
    assert ranks.run(4, taken, True) == [[0, 1, 2, 3], [], [4, 5, 6, 7], []]
    assert sorted(chain(*ranks.run(4, taken, False))) == list(range(8))


@pytest.mark.parametrize("wanted", [True, False])
def test_engine_arguments_deterministic_enables_deterministic_inference(monkeypatch, wanted):
    settings = EngineOptions(
        layout=EngineLayout(), dtype=torch.bfloat16, max_running=4, max_positions=64, deterministic=wanted
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert engine_arguments(Path("model"), settings)["enable_deterministic_inference"] is wanted


def info_of(inputs) -> ServerInfo:
    model = read_config(inputs / "model")
    texts = {"device": "cpu", "model": "model", "architecture": model.architecture, "layout": "tp1"}
    sizes = {"vocab": model.vocab, "context": 64, "tp": 1, "dp": 1, "pp": 1, "max_running": 4, "nodes": 1}
    others = {"disaggregation": "null", "seeded": False, "routed": False, "shard_obstacle": ""}
    return ServerInfo(start="", version="", cache_tokens=256, **texts, **sizes, **others)


def test_deterministic_with_an_unseeded_server_raises(inputs):
    model, info = read_config(inputs / "model"), info_of(inputs)
    check("http://node7", info, ServerRequirements(model, 32))
    unseeded = "job.deterministic is not supported. Start the server with --enable-deterministic-inference"
    with pytest.raises(UserError, match=unseeded):
        check("http://node7", info, ServerRequirements(model, 32, seeded=True))
    check("http://node7", replace(info, seeded=True), ServerRequirements(model, 32, seeded=True))
    with pytest.raises(UserError, match=r"--disaggregation-mode is decode instead of null. Name a pair as PREFILL"):
        check("http://node7", replace(info, disaggregation="decode"), ServerRequirements(model, 32))
    needs, prefill = ServerRequirements(model, 32, role="prefill"), replace(info, disaggregation="prefill")
    check("http://node7", prefill, needs)
    for unsupported in (replace(needs, in_flight=True), replace(needs, routed=(2, 2))):
        with pytest.raises(UserError, match="pairs of servers for prefill and decoding do not support rollout.*Leave"):
            check("http://node7", replace(prefill, routed=True), unsupported)
    with pytest.raises(UserError, match="draws are not known with pairs of servers for prefill and decoding. Set alg"):
        check("http://node7", replace(prefill, max_candidates=9), replace(needs, candidates=9))


def test_candidates_that_a_server_does_not_report_raise(inputs):
    info, needs = info_of(inputs), ServerRequirements(read_config(inputs / "model"), 32, candidates=9)
    check("http://node7", replace(info, max_candidates=9), needs)
    with pytest.raises(UserError, match="reports 8 candidates of a token at most, and 9 are possible. Start"):
        check("http://node7", replace(info, max_candidates=8), needs)
    with pytest.raises(UserError, match="draws are not known with --speculative-algorithm EAGLE. Set"):
        check("http://node7", replace(info, max_candidates=9, draft="EAGLE"), needs)
