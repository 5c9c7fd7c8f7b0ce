"""One real SGLang engine: requests, aborts, time-outs, stop tokens, kills and restarts."""

import dataclasses
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers.engines import all_of, bring_weights, cut_short, late_and_other, process_of, requests, workers_of
from tests.helpers.traces import needs_sglang
from verl_mg import device
from verl_mg.engines.engine import EngineDiedError, Request, Sampling, count_metrics
from verl_mg.engines.engine_options import EngineOptions
from verl_mg.engines.ipc_payload import Staging
from verl_mg.engines.kinds import SGLANG
from verl_mg.engines.process_engine import ProcessEngine
from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout
from verl_mg.models.hf_config import read_config
from verl_mg.models.tiny_model import make_tiny_model
from verl_mg.sharding.weight_table import weight_table

pytestmark = needs_sglang
SETTINGS = EngineOptions(
    layout=EngineLayout(), dtype=torch.float32, max_running=16, max_positions=256, routed_experts=True
)
LENGTH = 100
LONG = Sampling(max_new_tokens=LENGTH)
SHORT = Sampling(max_new_tokens=5)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model(
        tmp_path_factory.mktemp("model"), "qwen3_moe", characters="abcdefgh", hidden=32, ffn=64, max_positions=256,
        init_std=0.2, seed=3,
    )  # fmt: skip


@pytest.fixture(scope="module")
def engine(model, tmp_path_factory) -> Iterator[ProcessEngine]:
    engine = ProcessEngine(SGLANG, model, SETTINGS, tmp_path_factory.mktemp("log") / "0.log")
    bring_weights(engine, model, version=7)
    yield engine
    engine.close()


@pytest.mark.parametrize("min_p", [0.0, 0.4])
def test_engine_samples_match_transformers_logprobs_and_routing(engine, model, min_p):
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    requested = requests()
    samples = engine.generate(requested, Sampling(max_new_tokens=12, temperature=0.8, min_p=min_p))
    for request, sample in zip(requested, samples, strict=True):
        row = torch.tensor([[*request.prompt, *sample.tokens]])
        out = whole(row, output_router_logits=True)
        scores = (out.logits[0] / 0.8).log_softmax(-1)[len(request.prompt) - 1 : -1]
        own = scores.gather(1, torch.tensor(sample.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(sample.logprobs), own, atol=1e-4, rtol=0)
        assert ((own - scores.amax(1)).exp() >= min_p - 1e-4).all()
        assert sample.policy_versions == (7,) * 12 and sample.finish == "length"
        chosen = torch.stack([layer.topk(2).indices for layer in out.router_logits], dim=1)[:-1]
        assert sample.routed_experts is not None
        assert torch.equal(sample.routed_experts.long().sort(-1).values, chosen.sort(-1).values)


def test_engine_counts_its_load(engine):
    requested = requests()
    engine.generate(requested, Sampling(max_new_tokens=100, temperature=0.8))
    load = count_metrics([engine.take_counts()])
    assert 0 < load["time/engine_running"] <= len(requested) and load["time/engine_waiting"] >= 0
    assert 0 < load["time/engine_cache_usage"] < 1


def test_engine_given_stop_tokens_stops_there(engine):
    free = engine.generate(requests(), Sampling(max_new_tokens=30, temperature=0.0))
    stop = free[0].tokens[10]
    stopped = engine.generate(requests(), Sampling(max_new_tokens=30, temperature=0.0, stop_token_ids=(stop,)))
    assert {len(sample.tokens) for sample in free} == {30}
    first = free[0].tokens[: free[0].tokens.index(stop) + 1]
    assert stopped[0].tokens == first and stopped[0].finish == "stop"


def test_engine_given_partial_samples_continues_them(engine):
    greedy = Sampling(max_new_tokens=LENGTH, temperature=0.0)
    whole = engine.generate(requests(), greedy)
    cut = cut_short(engine, requests(), greedy)
    assert all(len(sample.tokens) < LENGTH for sample in cut)
    again = [Request(r.id, r.prompt, r.seed, partial=s) for r, s in zip(requests(), cut, strict=True)]
    joined = engine.generate(again, greedy)
    assert [sample.tokens for sample in joined] == [sample.tokens for sample in whole]
    for one, other in zip(joined, whole, strict=True):
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=1e-4, rtol=0)
        assert len(one.policy_versions) == LENGTH and torch.equal(one.routed_experts, other.routed_experts)


def test_engine_abort_right_after_submit_cuts_requests(engine):
    engine.submit(requests(), Sampling(max_new_tokens=250))
    engine.abort()
    assert any(sample.finish == "abort" for sample in all_of(engine, 6))
    assert [len(sample.tokens) for sample in engine.generate(requests(), SHORT)] == [5] * 6


def test_engine_request_over_its_time_is_cut_alone(engine, monkeypatch):
    late, other = late_and_other(engine, monkeypatch, LONG)
    assert len(late.tokens) < LENGTH
    assert other.finish == "length" and len(other.tokens) == LENGTH


def test_engine_request_without_answer_times_out(engine, monkeypatch):
    monkeypatch.setattr(engine, "_request_timeout", 0.2)
    monkeypatch.setattr("verl_mg.engines.request_tracker.ABORT_SECONDS", 0.3)
    (scheduler,) = workers_of(engine)
    scheduler.suspend()
    try:
        engine.submit([Request(1, (6, 7), 1)], SHORT)
        (sample,) = all_of(engine, 1)
    finally:
        scheduler.resume()
    assert sample.finish == "timeout" and sample.tokens == ()
    monkeypatch.setattr(engine, "_request_timeout", 1000.0)
    assert [len(sample.tokens) for sample in engine.generate(requests(), SHORT)] == [5] * 6


def test_engine_after_sleep_and_wake_generates_the_same(engine, model):
    before = engine.generate(requests(), Sampling(max_new_tokens=9, temperature=0.0))
    engine.sleep()
    assert not engine.health()
    engine.wake(weights=True, kv=False)
    bring_weights(engine, model, version=8)
    engine.wake(weights=False, kv=True)
    after = engine.generate(requests(), Sampling(max_new_tokens=9, temperature=0.0))
    assert [sample.tokens for sample in after] == [sample.tokens for sample in before]
    assert {v for sample in after for v in sample.policy_versions} == {8}


def test_engine_sleep_with_requests_in_flight_cuts_them(engine, model):
    engine.submit(requests(), Sampling(max_new_tokens=250))
    engine.sleep()
    cut = all_of(engine, 6)
    assert {sample.finish for sample in cut} == {"abort"} and all(len(sample.tokens) < 250 for sample in cut)
    engine.wake()
    bring_weights(engine, model, version=8)
    assert [len(sample.tokens) for sample in engine.generate(requests(), SHORT)] == [5] * 6


def test_engine_updated_twice_in_flight_writes_what_each_version_gives(engine, model, tmp_path):
    other = make_tiny_model(
        tmp_path, "qwen3_moe", characters="abcdefgh", hidden=32, ffn=64, max_positions=256, init_std=0.2, seed=4
    )
    models = {21: model, 22: other, 23: model}
    whole = {path: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (model, other)}
    bring_weights(engine, model, version=21)
    engine.submit(requests(), Sampling(max_new_tokens=250, temperature=0.0))
    for version in (22, 23):
        assert engine.collect(0.15) == []
        engine.pause()
        bring_weights(engine, models[version], version)
        engine.unpause()
    for request, sample in zip(requests(), all_of(engine, 6), strict=True):
        assert sorted(set(sample.policy_versions)) == [21, 22, 23] == list(dict.fromkeys(sample.policy_versions))
        versions, tokens = torch.tensor(sample.policy_versions), torch.tensor(sample.tokens)
        row = torch.tensor([[*request.prompt, *sample.tokens]])
        for version, folder in models.items():
            scores = whole[folder](row).logits[0].log_softmax(-1)[len(request.prompt) - 1 : -1][versions == version]
            assert torch.equal(scores.argmax(-1), tokens[versions == version])
            found = torch.tensor(sample.logprobs)[versions == version]
            torch.testing.assert_close(found, scores.max(-1).values, atol=1e-4, rtol=0)
    bring_weights(engine, model, version=8)


@pytest.mark.nightly
def test_engine_updated_right_after_its_last_sample_flushes_its_cache(engine, model):
    shards = weight_table(read_config(model)).for_engine("sglang").engine_shards(SETTINGS.layout, 0)
    for _ in range(300):
        staging = Staging(shards, dict.fromkeys(shards, SETTINGS.dtype), device.current_device())
        payload = staging.payload()
        engine.generate(requests(), SHORT)
        engine.loaded(engine.load([payload], 8))
    bring_weights(engine, model, version=7)


@pytest.mark.nightly
def test_engine_that_imports_its_libraries_late_is_updated_after_samples_with_experts(model, tmp_path):
    settings = dataclasses.replace(SETTINGS, python=Path(sys.executable))
    engine = ProcessEngine(SGLANG, model, settings, tmp_path / "0.log")
    try:
        for version in (1, 2):
            bring_weights(engine, model, version)
            assert all(set(sample.policy_versions) == {version} for sample in engine.generate(requests(), SHORT))
    finally:
        engine.close()


def test_engine_sleep_with_requests_that_do_not_end_kills_it(engine, model, monkeypatch):
    monkeypatch.setattr("verl_mg.engines.process_engine.IDLE_SECONDS", 0.5)
    (scheduler,) = workers_of(engine)
    scheduler.suspend()
    engine.submit(requests(), LONG)
    with pytest.raises(EngineDiedError, match="does not end its requests and was killed .*6 requests"):
        engine.sleep()
    assert not engine.health()
    scheduler.wait(600)
    engine.restart()
    bring_weights(engine, model, version=8)
    engine.resume()
    assert {sample.finish for sample in all_of(engine, 6)} == {"length"}


@pytest.mark.parametrize(
    ("prompt", "words"), [((), "request 5: the prompt is empty"), ((6,) * 256, "256 tokens fill the 256 positions")]
)
def test_engine_given_unanswerable_prompt_raises(engine, prompt, words):
    with pytest.raises(UserError, match=words):
        engine.submit([Request(5, prompt, 0)], SHORT)


def test_engine_killed_while_generating_restarts_and_finishes(engine, model):
    requested = requests(12)
    engine.submit(requested, LONG)
    finished = engine.collect(0.2)
    workers_of(engine)[0].kill()
    with pytest.raises(EngineDiedError, match="crashed with exit code -9"):
        while len(finished) < 12:
            finished += engine.collect(0.5)
    assert not engine.health()
    engine.restart()
    bring_weights(engine, model, version=9)
    engine.resume()
    samples = all_of(engine, 12 - len(finished))
    assert samples and {v for sample in samples for v in sample.policy_versions} == {9}
    assert sorted(sample.id for sample in [*samples, *finished]) == [request.id for request in requested]


def test_engine_of_a_dead_rank_leaves_no_process(engine):
    """What the kernel does to the socket of a rank that is killed."""
    processes = [psutil.Process(engine.pid), process_of(engine), *process_of(engine).children(recursive=True)]
    engine._running_process._socket.shutdown(socket.SHUT_RDWR)
    _, alive = psutil.wait_procs(processes, timeout=600)
    assert alive == []


def test_engine_that_cannot_start_raises_with_its_log(model, tmp_path):
    wrong = dataclasses.replace(SETTINGS, extra={"chunked_prefil_size": 512})
    with pytest.raises(UserError, match=r"cannot start. See its log .*0\.log, which ends: .*chunked_prefil_size"):
        ProcessEngine(SGLANG, model, wrong, tmp_path / "0.log")
