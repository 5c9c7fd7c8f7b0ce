"""Lengths of samples of which only the mean and the longest are known.

Lengths of responses are taken as R u^(1/a) for u even in (0, 1): the longest is R, the mean R a / (a + 1), and the
fraction of samples that is still generated after s steps 1 - (s / R)^a. A mean near the longest is what a limit on the
length gives, a mean far below it a long tail.

    prompt 0, longest 1000, mean 250: a = 250 / 750 = 1/3; after 125 steps 1 - (1/8)^(1/3) = half of them are generated
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from verl_mg.layout.packing import pack

QUANTILES = 96  # number of samples that represent a spread


@dataclass(frozen=True)
class LengthSpread:
    """Spread of the lengths of samples, in tokens."""

    longest: int  # prompt and longest response
    mean: float  # prompt and mean response
    prompt: int = 0  # prompt

    @property
    def exponent(self) -> float:
        """Exponent a; infinite where all responses have the same length."""
        return math.inf if self.mean >= self.longest else (self.mean - self.prompt) / (self.longest - self.mean)

    @property
    def longest_response(self) -> int:
        """Tokens of the longest response: decoding steps until all samples are complete."""
        return self.longest - self.prompt

    @property
    def mean_response(self) -> float:
        """Mean tokens of a response."""
        return self.mean - self.prompt

    def unfinished(self, step: float) -> float:
        """Returns the fraction of samples that are longer than `step` tokens of response."""
        share = step / self.longest_response
        return 1.0 if math.isinf(self.exponent) else 1 - share**self.exponent

    @property
    def mean_square(self) -> float:
        """Mean of the squared lengths, on which attention depends."""
        if math.isinf(self.exponent):
            return float(self.longest) ** 2
        a, r, p = self.exponent, self.longest_response, self.prompt
        return p * p + 2 * p * r * a / (a + 1) + r * r * a / (a + 2)

    def samples(self) -> tuple[int, ...]:
        """Returns QUANTILES lengths that represent the spread."""
        power = 0.0 if math.isinf(self.exponent) else 1 / self.exponent
        shares = (((number + 0.5) / QUANTILES) ** power for number in range(QUANTILES))
        return tuple(max(1, round(self.prompt + self.longest_response * share)) for share in shares)


@dataclass(frozen=True)
class Packed:
    """Micro-batches that a spread is packed into."""

    per_sample: float  # micro-batches of a sample
    tokens: tuple[int, ...]  # tokens of representative micro-batches, in increasing order

    def longest_of(self, count: int) -> float:
        """Returns the expected tokens of the longest of `count` micro-batches, relative to their mean."""
        mean = sum(self.tokens) / len(self.tokens)
        size = len(self.tokens)
        # The chance that the longest of `count` is among the first k of `size` is (k / size) ** count.
        expected = sum(
            tokens * (((k + 1) / size) ** count - (k / size) ** count) for k, tokens in enumerate(self.tokens)
        )
        return expected / mean


@cache  # equal for all layouts of a search
def packed(spread: LengthSpread, budget: int) -> Packed:
    """Packs a spread into micro-batches of at most `budget` tokens, as a job packs its rows."""
    if math.isinf(spread.exponent):
        # In closed form: packing equal rows in any number gives this, without the remainder of QUANTILES of them.
        together = max(1, budget // spread.longest)
        return Packed(1 / together, (together * spread.longest,))
    rows = spread.samples()
    (micro_batches,) = pack(rows, [float(row) for row in rows], 1, budget)
    return Packed(
        len(micro_batches) / QUANTILES, tuple(sorted(sum(rows[row] for row in micro) for micro in micro_batches))
    )
