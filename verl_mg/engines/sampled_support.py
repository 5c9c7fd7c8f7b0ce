"""What engines report of the distribution that a token was drawn from: its candidates, and its likeliest tokens.

Of the tokens 5, 8 and 3, of which no policy generated the second one, the first had the candidates 5 and 9:

    SampledSupport(sizes=(2, 0, 1), ids=(5, 9, 3))
    top, k = 2:  log-probs (-0.1, -2.4), (-inf, -inf), (0, -inf)      ids (5, 9), (0, 0), (3, 0)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class SampledSupport:
    """The tokens that top-k, top-p and min-p left as candidates of each draw."""

    sizes: Tensor
    """Number of candidates of each token, (tokens,) int32; 0: all of the vocabulary, or no policy generated it."""
    ids: Tensor  # token ids of all candidates, token after token, (sum(sizes),) int32

    def part(self, start: int, stop: int) -> SampledSupport:
        """Returns the candidates of the tokens from `start` up to, not including, `stop`."""
        ends = torch.cat([self.sizes.new_zeros(1, dtype=torch.int64), self.sizes.cumsum(0)])
        return SampledSupport(self.sizes[start:stop], self.ids[int(ends[start]) : int(ends[stop])])


def join_supports(parts: Sequence[tuple[int, SampledSupport | None]]) -> SampledSupport | None:
    """Returns the candidates of parts one after the other, each a number of tokens and what is known of them."""
    known = [support for _, support in parts if support is not None]
    if not known:
        return None
    none = [torch.zeros(count, dtype=torch.int32) if support is None else support.sizes for count, support in parts]
    return SampledSupport(torch.cat(none), torch.cat([support.ids for support in known]))


def join_tops(parts: Sequence[tuple[int, Tensor | None]]) -> Tensor | None:
    """Returns the likeliest tokens of parts one after the other, each a number of tokens and what is known of them.

    Each is (tokens, 2, k) float32, log-probs and token ids; -inf and 0 where there is none.
    """
    known = [top for _, top in parts if top is not None]
    if not known:
        return None
    joined = torch.zeros(sum(count for count, _ in parts), 2, max(top.shape[2] for top in known))
    joined[:, 0] = -torch.inf
    start = 0
    for count, top in parts:
        if top is not None:
            joined[start : start + count, :, : top.shape[2]] = top
        start += count
    return joined
