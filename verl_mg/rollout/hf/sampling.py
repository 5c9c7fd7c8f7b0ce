"""Drawing the next token: pure functions of logits and uniform numbers."""

import torch

from verl_mg.rollout.engine import Sampling


def uniforms(seed: int, n: int) -> torch.Tensor:
    """(n,) float32 numbers in [0, 1) on the CPU, a function of `seed` alone; entry t draws the t-th token."""
    return torch.rand(n, generator=torch.Generator().manual_seed(seed))


def choose(logits: torch.Tensor, uniforms: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token a row by inverting its cumulative distribution at the row's uniform number.

    logits: (n, V), any float dtype; uniforms: (n,) in [0, 1), unused by greedy decoding.
    Returns tokens (n,) int64 and logprobs (n,) float32, in nats, of the full temperature-scaled distribution:
    top-k and top-p restrict the draw but do not renormalise it.
    """
    scores = logits.float()
    if sampling.temperature > 0:
        scores = scores / sampling.temperature
    best_score, best = scores.max(dim=-1, keepdim=True)
    weights = torch.exp(scores - best_score)
    total = weights.sum(dim=-1, keepdim=True)
    tokens = best if sampling.temperature == 0 else _draw(weights, total, best, uniforms[:, None], sampling)
    logprobs = scores.gather(-1, tokens) - best_score - total.log()
    return tokens.squeeze(-1), logprobs.squeeze(-1)


def _draw(
    weights: torch.Tensor, total: torch.Tensor, best: torch.Tensor, uniforms: torch.Tensor, sampling: Sampling
) -> torch.Tensor:
    """Tokens (n, 1) from unnormalised weights (n, V); total, best (most probable token), uniforms: (n, 1)."""
    if sampling.top_k == 0 and sampling.top_p == 1:
        return _invert(weights, best, uniforms)
    kept, ids = _most_probable(weights, total, sampling)
    first = torch.zeros_like(best)
    return ids.gather(-1, _invert(kept, first, uniforms))


def _most_probable(weights: torch.Tensor, total: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights in descending order, those outside top-k cut, outside top-p 0, and token ids: both (n, k)."""
    kept, ids = weights.sort(dim=-1, descending=True, stable=True)
    if sampling.top_k > 0:
        kept, ids = kept[:, : sampling.top_k], ids[:, : sampling.top_k]
    mass_before = (kept.cumsum(dim=-1) - kept) / total
    inside = mass_before < sampling.top_p
    inside[:, 0] = True  # the subtraction above may leave a rounding error where there is no mass
    return kept * inside, ids


def _invert(weights: torch.Tensor, best: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The first column whose cumulative weight exceeds the uniform share of the total: (n, 1)."""
    cumulative = weights.cumsum(dim=-1)
    columns = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
    columns = columns.clamp(max=weights.shape[-1] - 1)  # the product can round up to the total itself
    # A parallel cumsum need not be monotonic to the last bit: a column without weight must never be drawn.
    return torch.where(weights.gather(-1, columns) > 0, columns, best)
