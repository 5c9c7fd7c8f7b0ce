"""Counters of an engine: its load, tokens that it found in its cache, drafted tokens that it accepted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

# Tokens in front of the first new one, and how many of them had keys and values in the cache.
PROMPT, CACHED = "prompt tokens", "cached tokens"
# Tokens that speculative decoding proposed, and those that the policy accepted.
DRAFTED, ACCEPTED = "drafted tokens", "accepted tokens"
# Steps of the policy with drafted tokens, and the tokens that requests with such steps generated.
VERIFIED, GENERATED = "verifications", "generated tokens"

# Sums over observations of the load: requests that an engine computes, requests that wait; number of observations.
RUNNING, WAITING, OBSERVED = "running requests", "waiting requests", "observations"
# Sums over observations: tokens in the key-value cache, and its capacity in tokens.
USED, CAPACITY = "used cache tokens", "cache capacity tokens"

Counts = Mapping[str, int]  # sums over requests and observations, by the names above


def observed_load(running: int, waiting: int, used: int, capacity: int) -> dict[str, int]:
    """Returns the counts of an observation of the load: numbers of requests, and of tokens in the cache."""
    return {RUNNING: running, WAITING: waiting, USED: used, CAPACITY: capacity, OBSERVED: 1}


def count_metrics(counts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Returns the metrics of a call; {} for engines that count nothing.

    They begin with `time/`, since load and cache depend on the moments at which requests arrive. 30 running requests in
    10 observations of one engine and 10 in 10 of another give `time/engine_running` = 2.0.
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
