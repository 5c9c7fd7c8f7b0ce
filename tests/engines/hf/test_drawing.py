"""Drawing tokens compared with an independent oracle: softmax and allowed sets computed in plain Python."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from verl_mg.engines.engine import Sampling
from verl_mg.engines.hf.drawing import draw_tokens, uniforms
from verl_mg.errors import UserError


def grid(n: int) -> torch.Tensor:
    """(n,) midpoints of n equal parts of [0, 1): the frequencies of an exact sampler follow without noise."""
    return (torch.arange(n) + 0.5) / n


def oracle(logits: list[float], temperature: float) -> list[float]:
    weights = [math.exp(logit / temperature) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def allowed(probabilities: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    kept: set[int] = set()
    mass = 0.0
    for token in sorted(range(len(probabilities)), key=lambda t: -probabilities[t]):
        if mass >= top_p or (top_k and len(kept) == top_k) or probabilities[token] < min_p * max(probabilities):
            break
        kept.add(token)
        mass += probabilities[token]
    return kept


def draw(logits: list[float], n: int, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    return draw_tokens(torch.tensor(logits).expand(n, -1), grid(n), sampling)[:2]


LOGITS = [0.3, -1.2, 2.0, 1.1, -0.4, 0.9, -3.0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draw_tokens_frequencies_equal_the_softmax(temperature):
    n = 20_000
    tokens, _ = draw(LOGITS, n, Sampling(max_new_tokens=1, temperature=temperature))
    counts = torch.bincount(tokens, minlength=len(LOGITS)).tolist()
    for count, probability in zip(counts, oracle(LOGITS, temperature), strict=True):
        assert abs(count - n * probability) <= 1.5


CUTS = [(3, 1.0, 0), (0, 0.6, 0), (0, 0.95, 0), (4, 0.7, 0), (1, 1.0, 0), (50, 1.0, 0), (0, 1e-9, 0)]
CUTS_BY_MIN_P = [(0, 1.0, 0.3), (0, 0.6, 0.3), (2, 1.0, 0.3), (0, 1.0, 0.99), (0, 0.99, 0.05)]


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [*CUTS, *CUTS_BY_MIN_P])
def test_draw_tokens_top_k_top_p_and_min_p_restrict_the_set(top_k, top_p, min_p):
    n = 20_000
    sampling = Sampling(max_new_tokens=1, temperature=1.3, top_k=top_k, top_p=top_p, min_p=min_p)
    tokens, _ = draw(LOGITS, n, sampling)
    probabilities = oracle(LOGITS, 1.3)
    kept = allowed(probabilities, top_k, top_p, min_p)
    assert set(tokens.tolist()) == kept
    inside = sum(probabilities[token] for token in kept)
    for token in kept:
        assert abs(int((tokens == token).sum()) - n * probabilities[token] / inside) <= 1.5


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [*CUTS, *CUTS_BY_MIN_P])
@pytest.mark.parametrize("excluded", [(), (2, 5)])
def test_draw_tokens_with_support_reports_the_allowed_set_and_its_distribution(top_k, top_p, min_p, excluded):
    limits: dict[str, Any] = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "excluded_token_ids": excluded}
    sampling = Sampling(max_new_tokens=1, temperature=1.3, returns_support=True, top_logprobs=3, **limits)
    draws = draw_tokens(torch.tensor(LOGITS).expand(50, -1), grid(50), sampling)
    probabilities = oracle(LOGITS, 1.3)
    kept = allowed([0.0 if i in excluded else p for i, p in enumerate(probabilities)], top_k, top_p, min_p)
    kept -= set(excluded)
    assert [set(row.nonzero().flatten().tolist()) for row in draws.candidates] == [kept] * 50
    inside = sum(probabilities[token] for token in kept)
    expected = [math.log(probabilities[token] / inside) for token in draws.tokens.tolist()]
    torch.testing.assert_close(draws.logprobs, torch.tensor(expected), atol=1e-6, rtol=0)
    best = sorted(kept, key=lambda token: -probabilities[token])[:3]
    missing = 3 - len(best)
    logprobs = [math.log(probabilities[token] / inside) for token in best] + [-math.inf] * missing
    expected_top = torch.tensor([logprobs, [*best, *[0] * missing]], dtype=torch.float32)
    torch.testing.assert_close(draws.top, expected_top.expand(50, -1, -1), atol=1e-6, rtol=0)
    plain = draw_tokens(torch.tensor(LOGITS).expand(50, -1), grid(50), replace(sampling, returns_support=False))
    assert torch.equal(plain.tokens, draws.tokens) and plain.candidates is None


def test_draw_tokens_likeliest_are_of_the_distribution_of_the_logprobs():
    """More than there are tokens; those that are never drawn count in the full distribution."""
    sampling = Sampling(max_new_tokens=1, top_k=2, top_logprobs=9, excluded_token_ids=(2,))
    tokens, logprobs, candidates, top = draw_tokens(torch.tensor([LOGITS]), grid(1), sampling)
    assert candidates is None and top.shape == (1, 2, 9)
    values, ids = torch.tensor(LOGITS).log_softmax(0).sort(descending=True)
    torch.testing.assert_close(top[0, 0, :7], values)
    assert top[0, 1].tolist() == [*ids.tolist(), 0, 0] and top[0, 0, 7:].tolist() == [-math.inf] * 2
    assert top[0, 0, ids.tolist().index(int(tokens))] == pytest.approx(float(logprobs), abs=1e-6)


@pytest.mark.parametrize("sampling", [Sampling(max_new_tokens=1, temperature=0.7, top_k=3, top_p=0.9, min_p=0.1)])
def test_draw_tokens_logprobs_are_of_the_full_distribution(sampling):
    tokens, logprobs = draw(LOGITS, 100, sampling)
    expected = torch.tensor(oracle(LOGITS, 0.7)).log()[tokens]
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)


def test_draw_tokens_temperature_zero_is_greedy():
    tokens, logprobs = draw(LOGITS, 10, Sampling(max_new_tokens=1, temperature=0))
    assert tokens.tolist() == [2] * 10
    assert logprobs[0].item() == pytest.approx(math.log(oracle(LOGITS, 1.0)[2]), abs=1e-5)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-24, 1.0])
def test_draw_tokens_impossible_tokens_are_never_drawn(uniform):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 5000, generator=generator)
    logits[:, ::2] = -math.inf
    logits[:, -100:] = -math.inf
    logits[:, 10] = -200.0
    tokens, logprobs, *_ = draw_tokens(logits, torch.full((64,), uniform), Sampling(max_new_tokens=1))
    assert torch.isfinite(logits.gather(1, tokens[:, None])).all()
    assert torch.isfinite(logprobs).all()
    assert not (tokens == 10).any()


def test_draw_tokens_half_precision_is_computed_in_float32():
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(0)).bfloat16()
    tokens, logprobs, *_ = draw_tokens(logits, grid(4), Sampling(max_new_tokens=1))
    assert logprobs.dtype == torch.float32
    expected = logits.float().log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
    torch.testing.assert_close(logprobs, expected)


def test_uniforms_depend_only_on_the_seed():
    assert torch.equal(uniforms(7, 5), uniforms(7, 100)[:5])
    assert not torch.equal(uniforms(7, 5), uniforms(8, 5))


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_new_tokens", 0), ("temperature", -1.0), ("top_p", 0.0), ("top_p", 1.5), ("top_k", -1), ("min_p", 1.0)],
)
def test_sampling_value_out_of_range_raises(name, value):
    with pytest.raises(UserError, match=f"{name}: it is {value}"):
        Sampling(**{"max_new_tokens": 1, name: value})  # type: ignore[arg-type]
