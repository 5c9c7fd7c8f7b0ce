"""Counters from the statistics that vLLM's schedulers report after each step."""

from __future__ import annotations

from collections import Counter
from typing import Any

from verl_mg.engines.engine import (
    ACCEPTED,
    CACHED,
    DRAFTED,
    GENERATED,
    PROMPT,
    VERIFIED,
    observed_load,
)

CACHE_UNITS = 1000  # units of the use of the cache, of which vLLM reports the share


class StepStatistics:
    """Sums what vLLM reports, by the methods of vLLM's `StatLoggerBase`.

    The instance itself is the factory of the loggers, of which vLLM makes one for each scheduler.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def __call__(self, vllm_config: Any, engine_index: int = 0) -> StepStatistics:
        """Returns the logger of a scheduler, this one."""
        return self

    def take(self) -> dict[str, int]:
        """Returns the counts since the last call."""
        counts, self._counts = self._counts, Counter()
        return dict(counts)

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Adds the statistics of a step."""
        if scheduler_stats is None:
            return
        used = round(scheduler_stats.kv_cache_usage * CACHE_UNITS)
        running, waiting = scheduler_stats.num_running_reqs, scheduler_stats.num_waiting_reqs
        if running or waiting:
            self._counts.update(observed_load(running, waiting, used, CACHE_UNITS))
        prefixes = scheduler_stats.prefix_cache_stats
        self._counts.update({PROMPT: prefixes.queries, CACHED: prefixes.hits})
        if (drafts := scheduler_stats.spec_decoding_stats) is not None:
            accepted, steps = drafts.num_accepted_tokens, drafts.num_drafts
            self._counts.update({DRAFTED: drafts.num_draft_tokens, ACCEPTED: accepted})
            self._counts.update({VERIFIED: steps, GENERATED: accepted + steps})  # and one token of the policy's own

    def log(self) -> None:
        """Does nothing: the counters are logged as metrics."""

    def log_engine_initialized(self) -> None:
        """Does nothing: there is nothing to announce."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """Does nothing: sleep is not counted."""
