"""Rows that begin while others go on, and steps by recorded operators, compared with the module over whole rows."""

import random
from pathlib import Path

import pytest
import torch

from tests.helpers.engines import all_of
from tests.helpers.tiny_models import nightly, tiny_model
from verl_mg.engines.engine import Request, Sample, Sampling
from verl_mg.engines.hf import token_step
from verl_mg.engines.hf.engine import HFEngine

WINDOW = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
# Keys and values, windows of them, states of linear attention; keys that are selected, whose rows do not join.
FAMILIES = ["qwen3", "qwen2-window", "qwen3_next", *nightly("gemma2", "deepseek_v3", "deepseek_v32", "mixtral")]
STOPS = (4, 5)


def engine_of(name: str, folder: Path, slots: int = 8) -> HFEngine:
    fields = {"max_position_embeddings": 160} | (WINDOW if name == "qwen2-window" else {})
    return HFEngine(tiny_model(folder, name.removesuffix("-window"), **fields), "cpu", torch.float32, slots)


def requests(count: int = 20, group: int = 4) -> list[Request]:
    """Groups of contexts of different lengths."""
    source = random.Random(0)
    contexts = [tuple(source.randrange(12, 30) for _ in range(3 + 14 * i)) for i in range(count // group)]
    return [Request(i, contexts[i // group], seed=i) for i in range(count)]


def check_logprobs(engine: HFEngine, requested: list[Request], samples: list[Sample]) -> None:
    for request, sample in zip(requested, samples, strict=True):
        with torch.inference_mode():
            scores = engine.module(torch.tensor([request.prompt + sample.tokens]), use_cache=False).logits[0]
        own = scores[len(request.prompt) - 1 : -1].log_softmax(-1).gather(1, torch.tensor(sample.tokens)[:, None])
        torch.testing.assert_close(torch.tensor(sample.logprobs), own[:, 0], atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_that_begin_while_others_go_on_have_the_logprobs_of_whole_rows(name, tmp_path):
    engine, requested = engine_of(name, tmp_path), requests()
    computed: list[int] = []
    hook = engine.module.get_input_embeddings().register_forward_hook(
        lambda _, args, __: computed.append(args[0].shape[0] if args[0].shape[1] > 1 else 0)
    )
    samples = engine.generate(requested, Sampling(max_new_tokens=75, stop_token_ids=STOPS))
    hook.remove()
    check_logprobs(engine, requested, samples)
    ends = sorted(len(request.prompt) + len(sample.tokens) for request, sample in zip(requested, samples, strict=True))
    assert ends[0] < 32 and ends[-1] > 64, "rows should be in decks of different lengths"
    if name not in ("deepseek_v32",):
        assert sum(computed) == len({request.prompt for request in requested}), "a prompt should be computed once"


def test_samples_do_not_depend_on_when_rows_begin(tmp_path):
    engine, sampling = engine_of("qwen3", tmp_path), Sampling(max_new_tokens=40, stop_token_ids=STOPS)
    expected = engine.generate(requests(), sampling)
    begun = requests()
    engine.submit(begun[::3], sampling)
    samples = engine.collect(0.0)
    assert 0 < len(samples) < len(begun[::3])
    engine.submit([request for i, request in enumerate(begun) if i % 3], sampling)
    samples += all_of(engine, len(begun) - len(samples))
    assert [s.tokens for s in sorted(samples, key=lambda s: s.id)] == [s.tokens for s in expected]


def test_update_while_rows_run_continues_them_with_the_new_weights(tmp_path):
    engine, requested = engine_of("qwen3", tmp_path), requests(8)
    sampling = Sampling(max_new_tokens=40, stop_token_ids=STOPS)
    whole = engine.generate(requested, sampling)
    engine.submit(requested, sampling)
    samples = engine.collect(0.0)
    engine.begin_update()
    engine.end_update(3)
    samples += all_of(engine, len(requested) - len(samples))
    samples.sort(key=lambda sample: sample.id)
    assert [sample.tokens for sample in samples] == [sample.tokens for sample in whole]
    assert any(set(sample.policy_versions) == {0, 3} for sample in samples)


@pytest.mark.parametrize("name", ["qwen3", "qwen2-window", "qwen3_moe"])
def test_recorded_steps_are_those_of_the_module_bit_for_bit(name, tmp_path, monkeypatch):
    calls: list[int] = []
    samples = []
    for steps in (10**9, 3):
        monkeypatch.setattr(token_step, "STEPS_BEFORE_TRACE", steps)
        engine = engine_of(name, tmp_path)
        engine.module.register_forward_hook(lambda *_: calls.append(1))
        samples.append(engine.generate(requests(), Sampling(max_new_tokens=75, stop_token_ids=STOPS)))
        calls.append(0)
    recorded = len(calls) - calls.index(0)
    assert recorded < calls.index(0) / 2, "steps should not call the module"
    assert samples[0] == samples[1]


def test_recorded_steps_read_weights_that_have_moved(tmp_path, monkeypatch):
    monkeypatch.setattr(token_step, "STEPS_BEFORE_TRACE", 2)
    engine, sampling = engine_of("qwen3", tmp_path), Sampling(max_new_tokens=20)
    before = engine.generate(requests(), sampling)
    other = {name: tensor + 0.1 * torch.randn(tensor.shape) for name, tensor in engine.parameters().items()}
    engine.begin_update()
    engine.share(other)
    engine.end_update(1)
    after = engine.generate(requests(), sampling)
    check_logprobs(engine, requests(), after)
    assert [sample.tokens for sample in after] != [sample.tokens for sample in before]


def test_module_whose_values_decide_what_it_does_is_not_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(token_step, "STEPS_BEFORE_TRACE", 2)
    engine = engine_of("qwen3_moe", tmp_path)
    engine.module.set_experts_implementation("eager")  # a loop over the experts that have tokens
    calls: list[int] = []
    engine.module.register_forward_hook(lambda *_: calls.append(1))
    samples = engine.generate(requests(4), Sampling(max_new_tokens=20))
    check_logprobs(engine, requests(4), samples)
    assert len(calls) >= 20
