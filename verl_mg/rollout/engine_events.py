"""Restarts of engines and ends of calls, in a store that all ranks share: each rank sees all of them, in one order.

    count                number of events; adding 1 to it gives an event its number
    event/1, event/2     "restart 3": engine 3 runs again, without weights;  "end KEY": all engines have finished a call

A rank without anything to do waits for the next event. It sends one request for that, however long it takes.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed import PrefixStore, Store

from verl_mg.distributed.collectives import GROUP_TIMEOUT

# Kinds of event: an engine runs again, without weights; all engines have finished a call.
RESTART, END = "restart", "end"


class EngineEvents:
    """The events of a job as one rank sees them. Any thread can announce them; one thread waits for them."""

    def __init__(self, store: Store) -> None:
        self._store = PrefixStore("engine_events", store)
        # While a thread waits for a key its connection is blocked.
        self._waiting_store = PrefixStore("engine_events", store.clone())  # type: ignore[attr-defined]
        self._num_seen = 0
        self._ended: set[str] = set()

    def announce_restart(self, engine: int) -> None:
        """Announces that an engine runs again, without weights."""
        self._append(f"{RESTART} {engine}")

    def announce_end(self, call: str) -> None:
        """Announces that all engines have finished a call."""
        self._append(f"{END} {call}")

    def has_ended(self, call: str) -> bool:
        """Returns whether this rank has seen the end of a call."""
        return call in self._ended

    def unseen_restarts(self) -> Iterator[int]:
        """Yields the engines that were restarted since this rank looked last."""
        # Adding 0 reads the counter, also before the first event. The text of a counted event may arrive later.
        while self._num_seen < self._store.add("count", 0):
            yield from self.wait()

    def wait(self) -> list[int]:
        """Waits for the next event; returns the engine if one was restarted, else nothing."""
        key = f"event/{self._num_seen + 1}"
        self._waiting_store.wait([key], GROUP_TIMEOUT)  # a week: the watchdog ends a stalled job
        kind, _, value = self._waiting_store.get(key).decode().partition(" ")
        self._num_seen += 1
        if kind == RESTART:
            return [int(value)]
        self._ended.add(value)
        return []

    def _append(self, event: str) -> None:
        self._store.set(f"event/{self._store.add('count', 1)}", event)
