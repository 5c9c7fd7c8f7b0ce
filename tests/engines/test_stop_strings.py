"""Stop strings: where samples end, against plain text and `transformers`, whatever tokens a string is split into."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.engines import SGLANG, VLLM, bring_weights, options_of
from verl_mg.engines.engine import Request, RolloutEngine, Sample, Sampling
from verl_mg.engines.hf.engine import HFEngine
from verl_mg.engines.kinds import PROCESSES
from verl_mg.engines.process_engine import ProcessEngine
from verl_mg.engines.stop_strings import StopStringEngine, cut_at_stop, decoder, num_tokens_to_stop
from verl_mg.engines.trajectory import NOT_GENERATED
from verl_mg.errors import UserError
from verl_mg.models.tiny_model import make_tiny_model
from verl_mg.models.transformers_module import read_tokenizer

PIECES = (*"abcdef", "ab", "ba", "bc", "ca", "abc", "cab", "bca", "aa", "bb", "cc", "aab", "bbc", "cca", "acb", "cb")
FREE = Sampling(max_new_tokens=50, temperature=0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A model whose tokens are pieces of words of a, b and c, so that a string has many divisions into tokens."""
    folder = make_tiny_model(
        tmp_path_factory.mktemp("model"), "qwen3_moe", characters="abcdefghijklmnopqrst", hidden=32, head_dim=32,
        ffn=64, max_positions=256, init_std=0.3, seed=3,
    )  # fmt: skip
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    names = ["<pad>", "<eos>", "<unk>", *PIECES]
    vocabulary = {name: i for i, name in enumerate([*names, *(f"<{i}>" for i in range(len(names), size))][:size])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split(Regex("."), "isolated"), decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def ask(count: int = 12) -> list[Request]:
    return [Request(i, (3 + i % 5, 4, 5 + i % 3), seed=i) for i in range(count)]


def end_of(tokens: Sequence[int], stop: Sequence[str], text: Callable[[Sequence[int]], str]) -> int:
    """The number of tokens up to a stop string, token by token."""
    return next((n for n in range(1, len(tokens) + 1) if any(s in text(tokens[:n]) for s in stop)), len(tokens))


def check(engine: RolloutEngine, model: Path) -> None:
    """Samples with stop strings are the beginnings of those without, up to the token that completes a string."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    free = engine.generate(ask(), FREE)
    texts = [tokenizer.decode(sample.tokens) for sample in free]
    stop = (texts[0][9:13], texts[1][14:21], texts[2][20:23])
    stopped = engine.generate(ask(), replace(FREE, stop=stop))
    ends = [end_of(sample.tokens, stop, tokenizer.decode) for sample in free]
    assert min(ends) < max(ends) and any(
        not tokenizer.decode(whole.tokens[:n]).endswith(stop) for whole, n in zip(free, ends, strict=True) if n < 50
    )
    for whole, sample, n in zip(free, stopped, ends, strict=True):
        assert sample.tokens == whole.tokens[:n] and len(sample.policy_versions) == n
        assert sample.finish == ("stop" if any(s in tokenizer.decode(sample.tokens) for s in stop) else "length")
        assert sample.logprobs == pytest.approx(whole.logprobs[:n], abs=2e-4)
        assert whole.routed_experts is None or len(sample.routed_experts) == len(ask()[0].prompt) + n - 1
    # Interrupted in the middle of a string, and behind it.
    for shift in (1, 0):
        cut = [max(n - shift, 1) for n in ends]
        partial = [
            replace(w, tokens=w.tokens[:n], logprobs=w.logprobs[:n], policy_versions=w.policy_versions[:n],
                    finish="abort", routed_experts=None)
            for w, n in zip(free, cut, strict=True)
        ]  # fmt: skip
        again = [replace(request, partial=part) for request, part in zip(ask(), partial, strict=True)]
        resumed = engine.generate(again, replace(FREE, stop=stop))
        assert [sample.tokens for sample in resumed] == [sample.tokens for sample in stopped]
        assert [sample.finish for sample in resumed] == [sample.finish for sample in stopped]


@pytest.fixture(scope="module")
def hf(model) -> HFEngine:
    return HFEngine(model, "cpu", torch.float32, decode_text=decoder(read_tokenizer(model)))


def test_hf_samples_end_at_stop_strings(hf, model):
    check(StopStringEngine(hf, decoder(read_tokenizer(model))), model)


def test_hf_decoding_itself_ends_where_transformers_ends(hf, model):
    tokenizer, whole = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    free = hf.generate(ask(1), FREE)[0]
    stop = (tokenizer.decode(free.tokens)[12:17],)
    (sample,) = hf.generate(ask(1), replace(FREE, stop=stop))
    prompt = torch.tensor([ask(1)[0].prompt])
    generated = whole.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=50, do_sample=False, eos_token_id=None,
        stop_strings=list(stop), tokenizer=tokenizer,
    )  # fmt: skip
    assert list(sample.tokens) == generated[0, prompt.shape[1] :].tolist()
    assert sample.finish == "stop" and len(sample.tokens) < 50


@pytest.fixture
def started(request, model, tmp_path) -> Iterator[ProcessEngine]:
    options = options_of(request.param, reads_text=True)
    with closing(ProcessEngine(PROCESSES[request.param], model, options, tmp_path / "0.log")) as engine:
        bring_weights(engine, model, version=7)
        yield engine


@pytest.mark.nightly
@pytest.mark.parametrize("started", [SGLANG, VLLM], indirect=True)
def test_engine_samples_end_at_stop_strings_and_it_stops_by_itself(started, model):
    decode = decoder(read_tokenizer(model))
    check(StopStringEngine(started, decode), model)
    (free,) = started.generate(ask(1), FREE)
    stop = (decode(free.tokens[5:6]),)
    (early,) = started.generate(ask(1), replace(FREE, stop=stop))
    assert early.finish == "stop" and early.tokens == free.tokens[: end_of(free.tokens, stop, decode)]


def utf8(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode("utf-8", "replace")


def test_string_of_parts_of_characters_ends_with_its_last_byte():
    tokens = tuple("xé€y€é".encode())
    for stop in (("€é",), ("é€",), ("€",), ("zz", "y"), ("z",)):
        expected = end_of(tokens, stop, utf8) if any(s in utf8(tokens) for s in stop) else None
        assert num_tokens_to_stop(tokens, stop, utf8) == expected
    assert num_tokens_to_stop(tokens, (), utf8) is None


def test_texts_of_tools_and_stop_tokens_are_not_searched():
    tokens, sampling = tuple(b"ab|cd|"), Sampling(max_new_tokens=9, stop=("b|", "|"), stop_token_ids=(ord("|"),))
    versions = (2, NOT_GENERATED, NOT_GENERATED, 2, 2, 2)
    sample = Sample(0, tokens, (-1.0,) * 6, versions, "stop")
    assert cut_at_stop(sample, sampling, utf8) is None
    cut = cut_at_stop(replace(sample, finish="length"), sampling, utf8)
    assert cut is not None and cut.tokens == tokens
    assert cut_at_stop(sample, replace(sampling, stop=("c",)), utf8) == replace(
        sample, tokens=tokens[:4], logprobs=(-1.0,) * 4, policy_versions=versions[:4]
    )


class EndsTooEarly(StopStringEngine):
    """An engine that ends samples at a string which is not there."""

    calls = 0

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        self.calls += 1
        super().submit(requests, replace(sampling, stop=("a",) if sampling.stop else ()))


def test_sample_that_an_engine_ended_without_a_string_is_continued(hf, model):
    decode = decoder(read_tokenizer(model))
    inner = EndsTooEarly(hf, decode)
    samples = StopStringEngine(inner, decode).generate(ask(), replace(FREE, stop=("zzz",)))
    assert [s.tokens for s in samples] == [s.tokens for s in hf.generate(ask(), FREE)] and inner.calls > 1


@pytest.mark.parametrize("stop", [("",), ("a", ""), "abc"])
def test_sampling_refuses_empty_strings_and_a_bare_one(stop):
    with pytest.raises(UserError, match="not empty"):
        Sampling(max_new_tokens=1, stop=stop)
