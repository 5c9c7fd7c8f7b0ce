"""Counters of an engine: its load, tokens that it found in its cache, drafted tokens that it accepted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

PROMPT, CACHED = "prompt tokens", "cached tokens"
"""Tokens in front of the first new one, and those of them whose keys and values were in the cache."""
DRAFTED, ACCEPTED = "drafted tokens", "accepted tokens"
"""Tokens that speculative decoding proposed, and those that the policy accepted."""
VERIFIED, GENERATED = "verifications", "generated tokens"
"""Steps of the policy with drafted tokens, and the tokens that requests with such steps generated."""

RUNNING, WAITING, OBSERVED = "running requests", "waiting requests", "observations"
"""Sums over observations of the load: requests that an engine computes, those that wait for it; the observations."""
USED, CAPACITY = "used cache tokens", "cache capacity tokens"
"""Sums over observations: tokens in the key-value cache, and those that fit into it."""

Counts = Mapping[str, int]
"""Sums over requests and observations, by the names above."""


def observed_load(running: int, waiting: int, used: int, capacity: int) -> dict[str, int]:
    """Returns the counts of an observation of the load."""
    return {RUNNING: running, WAITING: waiting, USED: used, CAPACITY: capacity, OBSERVED: 1}


def count_metrics(counts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Returns the metrics of a call; {} for engines that count nothing.

    They begin with `time/`, since load and cache depend on the moments at which requests arrive.
    """
    total: dict[str, float] = {}
    for part in counts:
        for name, value in part.items():
            total[name] = total.get(name, 0) + value
    ratios = {
        "time/engine_running": (RUNNING, OBSERVED),
        "time/engine_waiting": (WAITING, OBSERVED),
        "time/engine_cache_usage": (USED, CAPACITY),
        "time/prompt_cache_hits": (CACHED, PROMPT),
        "time/draft_acceptance": (ACCEPTED, DRAFTED),
        "time/draft_tokens_per_step": (GENERATED, VERIFIED),
    }
    return {name: total.get(part, 0) / total[whole] for name, (part, whole) in ratios.items() if total.get(whole)}
