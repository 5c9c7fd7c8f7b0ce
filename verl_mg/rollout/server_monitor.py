"""List of a job's servers, which may change while it runs, and the thread of each leading rank that looks after them.

    rank 0           reads `rollout.urls_file`, decides which rank leads each server ──▶ store, key "list"
    each leader      thread "servers", one cycle a second:
                     list ──▶ reaches new or lost servers, in a short thread each
                     servers without weights ──▶ announced as restarted engines: all ranks transfer weights to them
                     servers with weights    ──▶ store, keys "ready/NUMBER"
                     requests wait, none ready  ──▶ borrows ready servers of other leaders
                     every 5th cycle             checks ready servers, in a short thread

The work queue and the loop over samples are the main thread's; both threads meet in the `ServerPool`.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, Store

from verl_mg.errors import UserError
from verl_mg.rollout.engine_worker import EngineEvents
from verl_mg.servers.paired_engine import check_addresses, parts_of
from verl_mg.servers.pool import ServerPool
from verl_mg.servers.pool_member import Server, State

CYCLE_SECONDS = 1.0
"""Interval at which a rank looks at its list and its servers."""
HEALTH_CYCLES = 5
"""Cycles between two checks of servers that are ready."""
LIST_KEY = "list"
"""Key of the store with the number, the address and the leader of each server."""

log = logging.getLogger(__name__)


def read_urls(path: Path) -> list[str]:
    """Reads a file of servers, one address a line, without what follows "#"; UserError where that is not possible."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"rollout.urls_file={path}: cannot be read ({error}). Write one address a line.") from None
    urls: dict[str, None] = {}
    for number, line in enumerate(lines, 1):
        url = line.partition("#")[0].strip().rstrip("/")
        if url and not url.startswith(("http://", "https://")):
            raise UserError(f"{path}, line {number}: {url!r} is not an address. Write http://HOST:PORT.")
        if url:
            urls[url] = None
    return list(urls)


class ServerList:
    """Numbers and leaders of servers, on rank 0: `urls` stay, the file at `path` is read again and again."""

    def __init__(self, store: Store, leaders: Sequence[int], urls: Sequence[str], path: Path | None) -> None:
        self._store, self._leaders, self._urls, self._path = store, leaders, urls, path
        self._entries: dict[str, tuple[int, int]] = {}  # by address: number and leader
        self._next_number = 0  # numbers are not used again: a server that returns to the list is a new one
        self._problem = ""
        self.update()

    def update(self) -> None:
        """Reads the file again, and publishes what has changed; a file that is not valid changes nothing."""
        try:
            urls = [*self._urls, *(read_urls(self._path) if self._path else ())]
            check_addresses(urls)
            self._problem = ""
        except UserError as error:
            if str(error) != self._problem:  # reported once, not in each cycle
                log.warning("%s The servers stay as they are.", error)
                self._problem = str(error)
            return
        if set(urls) == self._entries.keys() and self._entries:
            return
        self._entries = {url: entry for url, entry in self._entries.items() if url in urls}
        for url in dict.fromkeys(urls):
            if url not in self._entries:
                # Servers that stay keep their leaders, which have their requests; a new one goes to the rank with the
                # fewest servers.
                load = Counter(leader for _, leader in self._entries.values())
                leader = min(self._leaders, key=lambda rank: load[rank])
                self._entries[url] = self._next_number, leader
                self._next_number += len(parts_of(url))  # each server of a pair receives weights
        self._store.set(LIST_KEY, json.dumps([[*entry, url] for url, entry in self._entries.items()]))


class ServerMonitor:
    """Thread of a rank that reaches and checks its servers, and borrows servers of other ranks when it has none.

    `version` returns the policy version of servers that are ready; `servers` is the list, on the first rank.
    """

    def __init__(
        self, pool: ServerPool, store: Store, rank: int, version: Callable[[], int], servers: ServerList | None = None
    ) -> None:
        self._pool, self._rank, self._version, self._list = pool, rank, version, servers
        self._store = PrefixStore("servers", store)
        self._events = EngineEvents(store)
        self._all: dict[int, tuple[int, str]] = {}
        self._announced: set[int] = set()
        self._published: set[int] = set()
        self._reaching: set[int] = set()
        self._stop = threading.Event()
        self._num_cycles = 0
        self._thread = threading.Thread(target=self._run, daemon=True, name="servers")
        # Reached here once, so that the first weight sync finds the servers that are up.
        self._read_list()
        for server in pool.due(time.monotonic()):
            pool.reach(server)

    def start(self) -> None:
        """Starts the thread of the monitor."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread of the monitor."""
        self._stop.set()
        self._pool.attention.set()  # wakes the thread
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        # Waits for CYCLE_SECONDS; woken earlier when the pool loses or reaches a server; ends with `close`.
        while not self._stop.is_set():
            self._pool.attention.wait(CYCLE_SECONDS)
            self._pool.attention.clear()
            if not self._stop.is_set():
                try:
                    self._cycle()
                except Exception:  # the job needs this thread as long as it runs: the next cycle tries again
                    if self._stop.is_set():
                        return
                    log.exception("rollout: the servers could not be looked after")
                    time.sleep(CYCLE_SECONDS)

    def _cycle(self) -> None:
        self._num_cycles += 1
        if self._list:
            self._list.update()
        self._read_list()
        for server in self._pool.due(time.monotonic()):
            if server.number not in self._reaching:
                self._reaching.add(server.number)
                _start(self._reach, server)  # a host that is gone takes its time to say so
        bare = self._pool.views(State.BARE).keys()
        for number in bare - self._announced:
            self._events.announce_restart(number)
        self._announced = set(bare)
        self._publish()
        if self._pool.needs_help:
            self._borrow()
        if self._num_cycles % HEALTH_CYCLES == 0:
            _start(self._pool.check_ready)

    def _reach(self, server: Server) -> None:
        if self._pool.reach(server):
            self._pool.attention.set()
        self._reaching.discard(server.number)

    def _read_list(self) -> None:
        entries = json.loads(self._store.get(LIST_KEY))
        self._all = {number: (leader, url) for number, leader, url in entries}
        self._pool.assign({number: url for number, (leader, url) in self._all.items() if leader == self._rank})

    def _publish(self) -> None:
        """Writes into the store which servers of this rank are ready."""
        ready = set(self._pool.views(State.READY))
        for number in ready ^ self._published:
            self._store.set(f"ready/{number}", "1" if number in ready else "")
        self._published = ready

    def _borrow(self) -> None:
        """Finds servers of other ranks that are ready."""
        others = {number: url for number, (leader, url) in self._all.items() if leader != self._rank}
        # Checked first, because `get` waits for a key that was never set.
        known = {number: url for number, url in others.items() if self._store.check([f"ready/{number}"])}
        ready = {number: url for number, url in known.items() if self._store.get(f"ready/{number}")}
        self._pool.borrow(ready, self._version())


def _start(function: Callable[..., Any], *arguments: Any) -> None:
    threading.Thread(target=function, args=arguments, daemon=True).start()
