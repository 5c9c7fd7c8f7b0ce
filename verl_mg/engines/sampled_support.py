"""Reports of engines about the distribution that a token was drawn from: its candidates, and its likeliest tokens.

Of the tokens 5, 8 and 3, of which no policy generated the second one, the first had the candidates 5 and 9:

    SampledSupport(sizes=(2, 0, 1), ids=(5, 9, 3))
    top, k = 2:  log-probs (-0.1, -2.4), (-inf, -inf), (0, -inf)      ids (5, 9), (0, 0), (3, 0)
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Self, TypeVar

from verl_mg.lazy_import import lazy_import

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor
else:
    np = lazy_import("numpy")
    torch = lazy_import("torch")

Wire = Sequence[str]
"""Two arrays from the process of an engine to its rank, in base64: int32 sizes and ids of a support, or float32
log-probs and int32 ids of the likeliest tokens, (tokens, k) each."""


@dataclass(frozen=True, eq=False)
class TokenEntries:
    """Several entries of each token."""

    sizes: Tensor  # number of entries of each token, (tokens,) int32
    entries: Tensor  # (sum(sizes), ...), token after token

    def part(self, start: int, stop: int) -> Self:
        """Returns the entries of the tokens from `start` up to, not including, `stop`."""
        ends = torch.cat([self.sizes.new_zeros(1, dtype=torch.int64), self.sizes.cumsum(0)])
        return type(self)(self.sizes[start:stop], self.entries[int(ends[start]) : int(ends[stop])])


@dataclass(frozen=True, eq=False)
class SampledSupport(TokenEntries):
    """The tokens that top-k, top-p and min-p left as candidates of each draw.

    A size of 0: all of the vocabulary, or no policy generated the token.
    """

    @property
    def ids(self) -> Tensor:
        """Token ids of all candidates, token after token, (sum(sizes),) int32."""
        return self.entries


Entries = TypeVar("Entries", bound=TokenEntries)


def join_entries(parts: Sequence[tuple[int, Entries | None]]) -> Entries | None:
    """Returns the entries of parts one after the other, each a number of tokens and what is known of them."""
    known = [entries for _, entries in parts if entries is not None]
    if not known:
        return None
    sizes = [torch.zeros(count, dtype=torch.int32) if part is None else part.sizes for count, part in parts]
    return type(known[0])(torch.cat(sizes), torch.cat([part.entries for part in known]))


def likeliest(logprobs: Tensor, count: int) -> Tensor:
    """Returns the likeliest tokens of log-probs (n, vocabulary), (n, 2, count) float32."""
    values, ids = logprobs.topk(min(count, logprobs.shape[1]))
    return widened(torch.stack([values, ids.where(values > -torch.inf, 0).to(values.dtype)], 1), count)


def widened(top: Tensor, count: int) -> Tensor:
    """Returns likeliest tokens (n, 2, k) as (n, 2, count), of which the last ones are missing."""
    missing = top.new_zeros(len(top), 2, count - top.shape[2])
    missing[:, 0] = -torch.inf
    return torch.cat([top, missing], 2)


def join_tops(parts: Sequence[tuple[int, Tensor | None]]) -> Tensor | None:
    """Returns the likeliest tokens of parts one after the other, each a number of tokens and what is known of them.

    Each is (tokens, 2, k) float32, log-probs and token ids; -inf and 0 where there is none.
    """
    known = [top for _, top in parts if top is not None]
    if not known:
        return None
    count = max(top.shape[2] for top in known)
    return torch.cat([widened(torch.zeros(n, 2, 0) if top is None else top, count) for n, top in parts])


def to_wire(first: np.ndarray, second: np.ndarray) -> Wire:
    """Returns two arrays in base64."""
    return [base64.b64encode(np.ascontiguousarray(array).tobytes()).decode() for array in (first, second)]


def support_to_wire(candidates: Sequence[Sequence[int]]) -> Wire:
    """Returns the candidates of each token for the rank."""
    sizes = np.array([len(of_token) for of_token in candidates], dtype=np.int32)
    return to_wire(sizes, np.fromiter(chain.from_iterable(candidates), dtype=np.int32, count=int(sizes.sum())))


def top_to_wire(entries: Sequence[Sequence[tuple[float, int]]], count: int) -> Wire:
    """Returns the `count` likeliest tokens of each token, (log-prob, id) in falling order, for the rank."""
    logprobs = np.full((len(entries), count), -np.inf, dtype=np.float32)
    ids = np.zeros((len(entries), count), dtype=np.int32)
    for place, of_token in enumerate(entries):
        for i, (logprob, token) in enumerate(of_token):
            logprobs[place, i], ids[place, i] = logprob, token
    return to_wire(logprobs, ids)
