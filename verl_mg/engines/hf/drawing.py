"""Rows that the engine hf generates, and how their tokens are drawn from logits."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from verl_mg.engines.engine import Finish, Sampling
from verl_mg.engines.sampled_support import SampledSupport, likeliest
from verl_mg.engines.stop_strings import Decode, num_tokens_to_stop
from verl_mg.images import RowImages


class Draws(NamedTuple):
    """Tokens that were drawn for n rows, one each, and what is reported of them."""

    tokens: Tensor  # (n,) int64
    logprobs: Tensor  # (n,) float32
    candidates: Tensor | None = None  # (n, vocabulary) bool; None where they are not reported
    top: Tensor | None = None  # likeliest tokens, (n, 2, k) float32; None where they are not reported


class TextEnd:
    """Watches the text of a row for stop strings, which may begin in `turn`, tokens of its partial sample."""

    def __init__(self, stop: Sequence[str], decode: Decode, turn: Sequence[int]) -> None:
        self._stop, self._decode, self._tokens = stop, decode, list(turn)
        # A token has a byte at least, and the first of those that are decoded may be part of a character.
        self._window = max(len(string.encode()) for string in stop) + 4

    def reached(self, token: int) -> bool:
        """Adds a token, and returns whether the text has a stop string now."""
        self._tokens.append(token)
        # The window is a cheap test for each token; the whole text decides, as everywhere.
        text = self._decode(self._tokens[-self._window :])
        return any(string in text for string in self._stop) and bool(
            num_tokens_to_stop(self._tokens, self._stop, self._decode)
        )


@dataclass(eq=False)
class Row:
    """A sample that is generated: what it continues, and its new tokens with the fields of a `Sample`."""

    context: tuple[int, ...]
    uniforms: Tensor  # (t,) on the CPU; number i in [0, 1) draws the i-th token, of which there are t at most
    images: RowImages = ()
    text_end: TextEnd | None = None
    finish: Finish | None = None  # None while it may get further tokens
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    candidates: list[Tensor] = field(default_factory=list)  # of each token, where they are reported
    tops: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.limit = len(self.uniforms)

    @property
    def num_left(self) -> int:
        """Returns how many tokens it may still get."""
        return self.limit - len(self.tokens)

    @property
    def support(self) -> SampledSupport | None:
        """Returns the candidates of each token, where they are reported."""
        if not self.candidates:
            return None
        sizes = torch.tensor([len(of_token) for of_token in self.candidates], dtype=torch.int32)
        return SampledSupport(sizes, torch.cat(self.candidates))

    @property
    def top(self) -> Tensor | None:
        """Returns the likeliest tokens in the place of each token, where they are reported."""
        return torch.stack(self.tops) if self.tops else None


def add_draws(rows: Sequence[Row], draws: Draws, stops: Collection[int]) -> int:
    """Adds one draw to each row that has not ended, and returns how many end with it.

    A row ends with a token of `stops`, a stop string, or its last number.
    """
    if draws.candidates is not None:
        ids = draws.candidates.nonzero()[:, 1].to("cpu", torch.int32)
        for row, of_token in zip(rows, ids.split(draws.candidates.sum(1).tolist()), strict=True):
            if not row.finish:
                row.candidates.append(of_token)
    if draws.top is not None:
        for row, top in zip(rows, draws.top.cpu(), strict=True):
            if not row.finish:
                row.tops.append(top)
    num_ended = 0
    # Once for each token of all samples: as few calls as possible.
    for row, token, logprob in zip(rows, draws.tokens.tolist(), draws.logprobs.tolist(), strict=True):
        if row.finish:
            continue
        row.tokens.append(token)
        row.logprobs.append(logprob)
        if token in stops or (row.text_end and row.text_end.reached(token)):
            row.finish = "stop"
        elif len(row.tokens) == row.limit:
            row.finish = "length"
        num_ended += row.finish is not None
    return num_ended


def uniforms(seed: int, n: int) -> torch.Tensor:
    """Returns n random numbers in [0, 1) that depend only on `seed`, on the CPU; entry t draws the t-th token."""
    return torch.rand(n, generator=torch.Generator().manual_seed(seed))


def draw_tokens(logits: torch.Tensor, uniforms: torch.Tensor, sampling: Sampling) -> Draws:
    """Draws one token per row by inverting its cumulative distribution at the row's uniform number.

    `logits` are (n, V), `uniforms` (n,). Log-probs in nats are under the full temperature-scaled distribution, which
    top-k, top-p, min-p and exclusion do not renormalise, or under that of the candidates where these are reported.
    """
    # With given uniforms a sample depends only on its seed, and not on the other rows or on the device's generator.
    scores = logits.float()
    if sampling.temperature not in (0, 1):
        scores = scores / sampling.temperature
    best_score = scores.amax(dim=-1, keepdim=True)
    weights = (scores - best_score).exp_()  # in place: new memory of this size costs the CPU more than the function
    total = weights.sum(dim=-1, keepdim=True)
    excluded = torch.tensor(sampling.excluded_token_ids, dtype=torch.int64, device=scores.device)
    if sampling.excluded_token_ids:
        # After `total`: training computes log-probs under the full distribution, and so they are here.
        weights.index_fill_(-1, excluded, 0.0)
    candidates = None
    if sampling.temperature > 0:
        kept, ids = _kept(weights, total, sampling)
        columns = _invert(kept, uniforms[:, None])
        tokens = columns if ids is None else ids.gather(-1, columns)
        if sampling.reports_support:
            total = kept.sum(dim=-1, keepdim=True)
            candidates = (
                kept > 0 if ids is None else torch.zeros_like(weights, dtype=torch.bool).scatter(-1, ids, kept > 0)
            )
    else:
        tokens = scores.index_fill(-1, excluded, -torch.inf).argmax(dim=-1, keepdim=True)
    logprobs = scores.gather(-1, tokens) - best_score - total.log()
    top = None
    if sampling.top_logprobs:
        under = scores - best_score - total.log()
        top = likeliest(under if candidates is None else under.where(candidates, -torch.inf), sampling.top_logprobs)
    return Draws(tokens.squeeze(-1), logprobs.squeeze(-1), candidates, top)


def _kept(weights: torch.Tensor, total: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns unnormalised weights (n, V) that are 0 but for candidates; with the ids of the columns where sorted."""
    if sampling.min_p > 0:
        weights = weights * (weights >= sampling.min_p * weights.amax(dim=-1, keepdim=True))
    if sampling.top_k == 0 and sampling.top_p == 1:
        return weights, None
    return _most_probable(weights, total, sampling)


def _most_probable(weights: torch.Tensor, total: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorts weights in descending order, cut to top-k and 0 outside top-p; returns them and token ids, both (n, k)."""
    kept, ids = weights.sort(dim=-1, descending=True, stable=True)
    if sampling.top_k > 0:
        kept, ids = kept[:, : sampling.top_k], ids[:, : sampling.top_k]
    mass_before = (kept.cumsum(dim=-1) - kept) / total
    inside = mass_before < sampling.top_p
    inside[:, 0] = True  # the subtraction above may leave a rounding error where there is no mass
    return kept * inside, ids


def _invert(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Finds the first column whose cumulative weight exceeds the uniform share of the total, (n, 1)."""
    cumulative = weights.cumsum(dim=-1)
    columns = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
    columns = columns.clamp(max=weights.shape[-1] - 1)  # the product can round up to the total itself
    # A parallel cumsum need not be exactly monotonic: a column without weight must never be drawn.
    has_weight = weights.gather(-1, columns) > 0
    # GPU: the second result is always computed, since a test would wait for the device.
    # GPU-TEST: none
    # GPU-RAN: not yet
    if weights.device.type == "cpu" and bool(has_weight.all()):  # the best column takes as long as the cumsum
        return columns
    return torch.where(has_weight, columns, weights.argmax(dim=-1, keepdim=True))
