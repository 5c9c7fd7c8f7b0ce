"""Sleep and time limits of a real SGLang engine, beyond the promises of all (`test_conformance.py`)."""

import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.helpers.engines import all_of, bring_weights, options_of, requests, workers_of
from tests.helpers.traces import needs_sglang
from verl_mg import device
from verl_mg.engines.engine import EngineDiedError, Request, Sampling
from verl_mg.engines.kinds import SGLANG
from verl_mg.engines.payloads import Staging
from verl_mg.engines.process_engine import ProcessEngine
from verl_mg.layout import EngineLayout
from verl_mg.models.hf_config import read_config
from verl_mg.models.shrunk_config import shrink
from verl_mg.sharding.weight_table import weight_table
from verl_mg.tracing.tracer import TracedEngine, trace

pytestmark = needs_sglang
of_sglang = pytest.mark.parametrize("started", ["sglang"], indirect=True, scope="package")
LONG, SHORT = Sampling(max_new_tokens=100), Sampling(max_new_tokens=5)


@of_sglang
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


@of_sglang
def test_engine_after_sleep_and_wake_generates_the_same(engine, mixtures):
    before = engine.generate(requests(), Sampling(max_new_tokens=9, temperature=0.0))
    engine.sleep()
    assert not engine.health()
    engine.wake(weights=True, kv=False)
    bring_weights(engine, mixtures[0], version=8)
    engine.wake(weights=False, kv=True)
    after = engine.generate(requests(), Sampling(max_new_tokens=9, temperature=0.0))
    assert [sample.tokens for sample in after] == [sample.tokens for sample in before]
    assert {v for sample in after for v in sample.policy_versions} == {8}


@of_sglang
def test_engine_sleep_with_requests_in_flight_cuts_them(engine, mixtures):
    engine.submit(requests(), Sampling(max_new_tokens=250))
    engine.sleep()
    cut = all_of(engine, 6)
    assert {sample.finish for sample in cut} == {"abort"} and all(len(sample.tokens) < 250 for sample in cut)
    engine.wake()
    bring_weights(engine, mixtures[0], version=8)
    assert [len(sample.tokens) for sample in engine.generate(requests(), SHORT)] == [5] * 6


@of_sglang
def test_engine_sleep_with_requests_that_do_not_end_kills_it(engine, mixtures, monkeypatch):
    monkeypatch.setattr("verl_mg.engines.process_engine.IDLE_SECONDS", 0.5)
    (scheduler,) = workers_of(engine)
    scheduler.suspend()
    engine.submit(requests(), LONG)
    with pytest.raises(EngineDiedError, match="does not end its requests and was killed .*6 requests"):
        engine.sleep()
    assert not engine.health()
    scheduler.wait(600)
    engine.restart()
    bring_weights(engine, mixtures[0], version=8)
    engine.resume()
    assert {sample.finish for sample in all_of(engine, 6)} == {"length"}


@pytest.mark.nightly
@of_sglang
def test_engine_updated_right_after_its_last_sample_flushes_its_cache(engine, mixtures):
    shards = weight_table(read_config(mixtures[0])).for_engine("sglang").engine_shards(engine.options.layout, 0)
    for _ in range(300):
        staging = Staging(shards, dict.fromkeys(shards, engine.options.dtype), device.current_device())
        payload = staging.payload()
        engine.generate(requests(), SHORT)
        engine.loaded(engine.load([payload], 8))


@pytest.mark.nightly
def test_engine_that_imports_its_libraries_late_is_updated_after_samples_with_experts(mixtures, tmp_path):
    options = options_of("sglang", python=Path(sys.executable))
    with closing(ProcessEngine(SGLANG, mixtures[0], options, tmp_path / "0.log")) as engine:
        for version in (1, 2):
            bring_weights(engine, mixtures[0], version)
            assert all(set(sample.policy_versions) == {version} for sample in engine.generate(requests(), SHORT))


@pytest.mark.nightly
def test_engine_whose_loader_fills_buffers_receives_them(tmp_path):
    """The activation of Apertus has numbers in buffers, which training or a conversion may have changed."""
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(shrink(CONFIG_MAPPING["apertus"](), 200).config, dtype=torch.float32)
    saved = module.state_dict()
    for name in (buffers := {name for name, _ in module.named_buffers() if name in saved}):
        saved[name].add_(1.0)
    module.save_pretrained(tmp_path / "model")
    layout = EngineLayout()
    ((shards,),) = trace([(tmp_path / "model", layout)], TracedEngine("sglang"))
    assert buffers <= shards.keys() and buffers
    options = options_of("sglang", routed_experts=False)
    with closing(ProcessEngine(SGLANG, tmp_path / "model", options, tmp_path / "0.log")) as engine:
        bring_weights(engine, tmp_path / "model", 0, traced=[shards])
        (sample,) = engine.generate(requests(1), Sampling(max_new_tokens=9, temperature=0.0))
    with torch.no_grad():
        scores = module.eval()(torch.tensor([[*requests(1)[0].prompt, *sample.tokens]])).logits[0].log_softmax(-1)
    likeliest = scores[len(requests(1)[0].prompt) - 1 : -1].amax(-1)
    torch.testing.assert_close(torch.tensor(sample.logprobs), likeliest, atol=1e-4, rtol=0)
