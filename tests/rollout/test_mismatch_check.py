"""The first samples after a start are compared with the trainer, and a mismatch ends the job before it trains."""

import json
import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.helpers.launched import finished, torchrun
from tests.helpers.split_engine import SplittingEngine
from tests.helpers.tiny_jobs import files_of, metrics_of
from tests.helpers.tiny_models import daily_of
from tests.helpers.traces import needs_sglang, needs_vllm
from tests.rollout.engine_jobs import engine_job
from tests.rollout.engine_jobs import inputs as inputs_of_engines
from tests.run.jobs import built_job, job, make_inputs
from verl_mg.config import load_config
from verl_mg.engines.engine import EngineWrapper, Request, Sample, Sampling
from verl_mg.engines.trajectory import MAX_SEGMENTS
from verl_mg.errors import UserError
from verl_mg.job import build_job
from verl_mg.job.job import RunningJob
from verl_mg.job.recipe import load_recipe
from verl_mg.rollout.engine_group import InFlightEngineGroup, WrapEngine
from verl_mg.rollout.mismatch_check import MismatchCheck, Precision, largest_mismatch
from verl_mg.run.loop import FULL_RUN, RunMode

WRONG_SAMPLE, WRONG_TOKEN, ERROR = 3, 2, 5.0
SAMPLES = 10  # of an iteration of `tests.run.jobs.job`
MESSAGE = re.compile(
    r"rollout\.max_mismatch=0\.001: log-probs of engine and trainer differ by (?P<mean>\S+) nats on average over the "
    r"first (?P<tokens>\d+) tokens, more than 0\.001\. The worst sample, sample_id (?P<sample>\d+) of the prompt "
    r"(?P<file>\S+):(?P<line>\d+) \('\d\+\d='\), differs by (?P<worst>\S+): at position (?P<position>\d+) of its "
    r"(?P<length>\d+) tokens the engine has (?P<engine>\S+) and the trainer (?P<trainer>\S+)\. "
    r"(Try rollout\.engine=hf|Look for the cause) as docs/guides/debug_a_mismatch\.md says, or train in spite of it "
    r"with a larger rollout\.max_mismatch, or null for none\."
)
PROMPT_TOKENS = 4
JOBS = {
    "tensor-parallel": ("grpo", ["actor.layout=tp2"]),
    "no-old-logprobs": ("gkd", ["actor.backend=fsdp"]),
    "critic-first": ("ppo", ["algorithm.critic_warmup=1", "algorithm.old_logprobs=skip", "actor.layout=pp2"]),
    "other-ranks": ("ppo", ["actor.ranks=0", "critic.ranks=1"]),
    "filtered": ("dapo", ["algorithm.dynamic_sampling=streaming", "actor.layout=cp2"]),
    "process-reward": ("prime", ["algorithm.old_logprobs=rollout"]),
    "temperature": ("grpo", ["rollout.temperature=0.7"]),
    "fsdp-cp": ("grpo", ["actor.backend=fsdp", "actor.layout=cp2"]),
}
WRONG_RECIPE = """
from dataclasses import replace
from verl_mg.recipes.grpo import Config, iteration as right, roles

def iteration(job, cfg):
    job.actor._batching = replace(job.actor._batching, temperature=2.0)  # engines sample at 1
    return right(job, cfg)
"""


class WrongLogprob(EngineWrapper):
    """Reports one token of one sample of each iteration with another log-prob."""

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        self._engine.submit(requests, sampling)

    def collect(self, timeout: float) -> list[Sample]:
        return [self._changed(sample) for sample in self._engine.collect(timeout)]

    def _changed(self, sample: Sample) -> Sample:
        logprobs = list(sample.logprobs)
        if sample.id % SAMPLES == WRONG_SAMPLE:
            logprobs[WRONG_TOKEN] -= ERROR
        return replace(sample, logprobs=tuple(logprobs))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def refused(
    recipe: str,
    inputs: Path,
    output: Path,
    overrides: list[str],
    wrap: WrapEngine = WrongLogprob,
    mode: RunMode = FULL_RUN,
) -> tuple[str, list[str]]:
    """The error of a job with a wrong engine, and the optimizer steps that were requested before."""
    requested, message = [], ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_job, "_wrapper", lambda *_: wrap)
        patch.setattr(
            "verl_mg.roles.models.TrainableRole.update", lambda role, *_, **__: requested.append(role.name) or {}
        )
        try:
            job(recipe, inputs, output, ["rollout.max_mismatch=0.001", *overrides], mode)
        except UserError as error:
            message = str(error)
    return message, requested


def assert_nothing_done(output: Path) -> None:
    assert not {path.name for path in output.iterdir()} & {"checkpoints", "samples", "model"}
    assert metrics_of(output) == []


@pytest.mark.parametrize("kind", daily_of(JOBS, "tensor-parallel", "no-old-logprobs", "critic-first", "other-ranks"))
def test_wrong_logprob_of_an_engine_ends_the_job_before_an_update(ranks, inputs, tmp_path, kind):
    recipe, overrides = JOBS[kind]
    for message, requested in ranks.run(2, refused, recipe, inputs, tmp_path / "run", overrides):
        found = MESSAGE.fullmatch(message)
        assert found and requested == []
        assert int(found["sample"]) == WRONG_SAMPLE
        assert int(found["position"]) == PROMPT_TOKENS + WRONG_TOKEN < int(found["length"])
        assert float(found["trainer"]) - float(found["engine"]) == pytest.approx(ERROR, abs=0.01)
        assert float(found["mean"]) == pytest.approx(ERROR / int(found["tokens"]), rel=0.01)
        assert float(found["worst"]) == pytest.approx(ERROR / (int(found["length"]) - PROMPT_TOKENS), rel=0.01)
    assert_nothing_done(tmp_path / "run")


def test_wrong_logprob_by_default_ends_the_job(ranks, inputs, tmp_path):
    overrides = ["rollout.max_mismatch=auto"]
    [(message, requested)] = ranks.run(1, refused, "grpo", inputs, tmp_path / "run", overrides)
    assert message.startswith("rollout.max_mismatch=auto: ") and "more than 0.001. " in message and requested == []


def test_wrong_logprob_in_a_segment_of_an_agent_names_its_row(ranks, inputs, tmp_path):
    wrap = partial(split, decode=str)
    for message, requested in ranks.run(2, refused, "grpo", inputs, tmp_path / "run", [], wrap):
        found = MESSAGE.fullmatch(message)
        assert found and requested == [] and int(found["sample"]) // MAX_SEGMENTS == WRONG_SAMPLE
        assert int(found["position"]) == PROMPT_TOKENS + WRONG_TOKEN


def split(engine, decode):
    return SplittingEngine(WrongLogprob(engine), decode)


def test_wrong_logprob_after_a_resume_ends_the_job_before_an_update(ranks, inputs, tmp_path):
    """The engine of the first start was right."""
    run = tmp_path / "run"
    ranks.run(2, job, "grpo", inputs, run, ["job.iterations=1", "checkpoint.every=1", "rollout.max_mismatch=0.001"])
    before = sorted(path.name for path in (run / "checkpoints").rglob("*"))
    for message, requested in ranks.run(2, refused, "grpo", inputs, run, ["checkpoint.every=1"]):
        found = MESSAGE.fullmatch(message)
        assert found and requested == [] and int(found["sample"]) == SAMPLES + WRONG_SAMPLE
    assert sorted(path.name for path in (run / "checkpoints").rglob("*")) == before != []
    assert len(metrics_of(run)) == 1


def test_rollout_alone_and_replay_compare_nothing(ranks, inputs, tmp_path):
    alone = RunMode(learns=False)
    ((message, requested),) = ranks.run(1, refused, "grpo", inputs, tmp_path / "run", [], WrongLogprob, alone)
    assert message == "" and requested and len(metrics_of(tmp_path / "run")) == 3
    replay = RunMode(replayed=f"{tmp_path / 'run'}@1")
    ((message, requested),) = ranks.run(1, refused, "grpo", inputs, tmp_path / "again", [], WrongLogprob, replay)
    assert message == "" and requested == ["actor"] and len(metrics_of(tmp_path / "again")) == 1


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_right_engine_trains_as_without_a_check(ranks, inputs, tmp_path, backend):
    common = ["job.iterations=2", f"actor.backend={backend}"]
    for name, bound in (("checked", "1e-4"), ("free", "null")):
        ranks.run(2, job, "grpo", inputs, tmp_path / name, [*common, f"rollout.max_mismatch={bound}"])
    assert metrics_of(tmp_path / "checked") == metrics_of(tmp_path / "free")
    assert metrics_of(tmp_path / "free")[0]["actor/grad_norm"] > 0


def compared(inputs: Path) -> tuple[list[str], list[str]]:
    """Errors of a check of rows whose tokens, from position 6 on, are wrong and of other weights, and of right ones."""
    with closing(built_job(inputs)) as of:
        of.start()
        batch = of.rollout.generate(of.prompts.next_batch(4), num_samples=2)
        later = batch.positions >= 6
        batch["policy_versions"] = torch.where(later, batch["policy_versions"] - 1, batch["policy_versions"])
        batch["rollout_logprobs"] = torch.where(later, batch["rollout_logprobs"] - 1, batch["rollout_logprobs"])
        check = MismatchCheck.of(of.config, of.actor, of.prompts, 16, Sampling(max_new_tokens=1), None)
        # Without a token of the present weights nothing is compared, and the next rows are.
        stale = batch.select_columns(batch.names())
        stale["policy_versions"] = batch["policy_versions"] - 1
        wrong = batch.select_columns(batch.names())
        wrong["rollout_logprobs"] = batch["rollout_logprobs"] - 1
        unknown = batch.select_columns(batch.names())
        unknown["rollout_logprobs"] = batch["rollout_logprobs"] * float("nan")
        refused_rows = [error_of(check, rows) for rows in (stale, wrong, unknown, batch)]
        return refused_rows, [error_of(check, wrong)]


def error_of(check: MismatchCheck, rows) -> str:
    try:
        check(rows)
    except UserError as error:
        return str(error)
    return ""


def test_check_compares_only_tokens_of_the_present_weights_and_once(ranks, inputs):
    for (stale, wrong, unknown, right), again in ranks.run(2, compared, inputs):
        assert stale == right == "" and again == [""]
        assert "differ by 1 nats" in wrong and "differ by nan nats" in unknown and "the engine has nan" in unknown


LONG = ["rollout.max_new_tokens=100", "rollout.max_mismatch=0.001"]
ONE_AT_A_TIME = ["rollout.max_running_requests=1", "algorithm.prompts_per_iteration=2", "algorithm.group_size=2"]
GROUPS = {
    "sglang": (1, "sglang", []),
    "tensor-parallel": (2, "sglang", ["rollout.layout=tp2"]),
    "replicas": (2, "sglang", ["job.deterministic=true"]),
    "disjoint": (2, "sglang", ["rollout.num_ranks=1"]),
    "vllm": (1, "vllm", []),
}


def generated_with_probes(folder: Path, engine: str, overrides: list[str]) -> tuple[list[object], list[int]]:
    """Samples of an iteration, and the lengths of the rows that this rank's engine was probed with."""
    lengths, generate_alone = [], InFlightEngineGroup.generate_alone

    def counted(group, request, sampling):
        samples = generate_alone(group, request, sampling)
        lengths.extend(len(request.prompt) + len(sample.tokens) for sample in samples)
        return samples

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InFlightEngineGroup, "generate_alone", counted)
        of, _ = engine_job(folder, *ONE_AT_A_TIME, *overrides, engine=engine)
    with closing(of):
        batch = of.rollout.generate(of.prompts.next_batch(2), num_samples=2)
        return [
            batch.row(name, i).tolist() for i in range(len(batch)) for name in ("tokens", "rollout_logprobs")
        ], lengths


@pytest.mark.nightly
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=needs_vllm if kind == "vllm" else needs_sglang) for kind in GROUPS],
)
def test_samples_after_a_long_row_are_bitwise_those_without(ranks, tmp_path, kind):
    count, engine, overrides = GROUPS[kind]
    folder = inputs_of_engines(tmp_path, "qwen3", positions=128, unused=1000)
    probed, free = (
        ranks.run(
            count, generated_with_probes, folder, engine, [*LONG[:1], *overrides, f"rollout.max_mismatch={bound}"]
        )
        for bound in ("0.001", "null")
    )
    assert [samples for samples, _ in probed] == [samples for samples, _ in free] and any(probed[0][0])
    leaders = count if kind == "replicas" else 1
    assert sorted(lengths for _, lengths in probed if lengths) == [[104]] * leaders
    assert not any(lengths for _, lengths in free)


def complaint_of_engine(folder: Path, overrides: list[str]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        started = []
        build = RunningJob.start
        patch.setattr(RunningJob, "start", lambda of: (started.append(of), build(of)))
        try:
            engine_job(folder, *overrides)
        except UserError as error:
            return str(error)
        finally:
            for of in started:
                of.close()
    return ""


# Architecture of the weights, and fields of config.json of which the engine's model ignores the window.
IGNORED = {
    "mistral": ("llama", {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 32}),
    "phi3": ("phi3", {"sliding_window": 32}),
}


@pytest.mark.nightly
@needs_sglang
@pytest.mark.parametrize("family", IGNORED)
def test_window_that_the_engine_ignores_is_refused_by_name_where_rows_reach_it(ranks, tmp_path, family):
    architecture, fields = IGNORED[family]
    folder = inputs_of_engines(tmp_path, architecture, positions=128)
    config = folder / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    [message] = ranks.run(1, complaint_of_engine, folder, [*LONG, "actor.backend=fsdp"])
    assert "over the last 16 tokens of rows of 104 tokens" in message
    assert re.search(r"Only transformers reads these fields of config\.json: .*\bsliding_window \(without it", message)
    [message] = ranks.run(1, complaint_of_engine, folder, [*LONG, "actor.backend=fsdp", "rollout.max_new_tokens=20"])
    assert message == ""


def test_wrong_temperature_ends_all_ranks_with_one_line(inputs, tmp_path):
    (tmp_path / "wrong.py").write_text(WRONG_RECIPE)
    settings = [
        *files_of(inputs, tmp_path / "run"),
        f"reward.function={inputs / 'reward.py'}:score",
        *("rollout.max_new_tokens=6", "rollout.max_mismatch=0.001", "checkpoint.every=1"),
        *("algorithm.prompts_per_iteration=4", "algorithm.group_size=2"),
    ]
    program = [*torchrun(2), "-m", "verl_mg", "train", str(tmp_path / "wrong.py"), *settings]
    line = finished(program, warm=True).refusal()
    found = MESSAGE.search(line)
    assert found and float(found["mean"]) > 0.05 and float(found["worst"]) > float(found["mean"])
    assert_nothing_done(tmp_path / "run")


DENSE = Precision(torch.bfloat16, "sglang", "auto", "cast", False, False, False)
MIXTURE = replace(DENSE, has_experts=True)


@pytest.mark.parametrize(
    ("precision", "bound"),
    [
        (DENSE, 0.05),
        (replace(DENSE, dtype=torch.float32), 1e-3),
        (replace(DENSE, wire="fp8_block"), 0.2),
        (replace(DENSE, wire="int4"), 0.2),
        (replace(DENSE, cache="fp8_e5m2"), 0.2),
        (replace(DENSE, cache="bfloat16"), 0.05),
        (replace(DENSE, trains_in_fp8=True), 0.2),
        (MIXTURE, 0.2),
        (replace(MIXTURE, dtype=torch.float32), 0.01),
        (replace(MIXTURE, replays_routing=True), 0.05),
        (replace(MIXTURE, replays_routing=True, has_indexer=True), 0.2),
        (replace(DENSE, has_indexer=True, replays_selections=True), 0.05),
        (replace(MIXTURE, replays_routing=True, dtype=torch.float32), 1e-3),
        (replace(MIXTURE, replays_routing=True, wire="fp8_channel"), 0.2),
    ],
)
def test_bound_by_default_is_that_of_the_precision(precision, bound):
    assert largest_mismatch("auto", precision) == bound
    assert largest_mismatch(0.3, precision) == 0.3 and largest_mismatch(None, precision) is None


@pytest.mark.parametrize("value", ["0", "-1", ".inf", ".nan", "true", "some", "[1]"])
def test_bound_that_is_no_number_is_refused(value):
    with pytest.raises(
        UserError, match=r"rollout\.max_mismatch: .* is invalid: neither a number above 0, auto nor null"
    ):
        load_config(None, ["model.path=m", "data.train=d", f"rollout.max_mismatch={value}"], load_recipe("grpo").config)
