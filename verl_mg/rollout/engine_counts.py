"""Counters of an engine: how many tokens it found in its cache, and how many drafted tokens it accepted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

PROMPT, CACHED = "prompt tokens", "cached tokens"
"""Tokens in front of the first new one, and those of them whose keys and values were in the cache."""
DRAFTED, ACCEPTED = "drafted tokens", "accepted tokens"
"""Tokens that speculative decoding proposed, and those that the policy accepted."""
VERIFIED, GENERATED = "verifications", "generated tokens"
"""Steps of the policy with drafted tokens, and the tokens that requests with such steps generated."""

Counts = Mapping[str, int]
"""Sums over requests, by the names above."""


def count_metrics(counts: Iterable[Counts]) -> dict[str, float]:
    """Returns the metrics of a call; {} for engines that count nothing.

    They begin with `time/`, since what is in a cache depends on the order in which requests arrive.

    Args:
        counts: counters of all engines.
    """
    total: dict[str, int] = {}
    for part in counts:
        for name, value in part.items():
            total[name] = total.get(name, 0) + value
    ratios = {
        "time/prompt_cache_hits": (CACHED, PROMPT),
        "time/draft_acceptance": (ACCEPTED, DRAFTED),
        "time/draft_tokens_per_step": (GENERATED, VERIFIED),
    }
    return {name: total.get(part, 0) / total[whole] for name, (part, whole) in ratios.items() if total.get(whole)}
