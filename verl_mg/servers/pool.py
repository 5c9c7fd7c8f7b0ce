"""Several SGLang servers as one rollout engine: servers come and go, and no sample is lost.

Requests of a lost server go to the others immediately. A pool without a server that is ready borrows one of another
rank. A server is chosen by the prompt (rendezvous hashing), as long as it has free slots: the samples of a group, all
turns of a conversation and the continuation of a partial sample find the keys and values of their tokens in its cache.

    generation loop           submit, collect, abort; each `collect` gathers results and moves requests of lost servers
    main thread               receivers, weights, confirm: the updates
    monitor (`ServerMonitor`) assign, due, reach, check_ready, borrow; woken by `attention`, else once a second
    thread of each client     sends its server's requests; wakes `collect` by `_arrival`

All share `_lock`, which is not held while a server is asked: that may take its whole time limit.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import replace

from verl_mg.engines.engine import Counts, EngineDiedError, Request, RolloutEngine, Sample, Sampling
from verl_mg.errors import UserError
from verl_mg.servers.pool_member import FIRST_PAUSE, LOST_SECONDS, Server, State
from verl_mg.servers.remote_engine import RemoteEngine

DRAIN_SECONDS = 60.0  # time of a removed server to finish its samples
WAIT_SECONDS = 0.05  # longest wait for a result before the pool looks at other things again

log = logging.getLogger(__name__)

# (address, whether it is borrowed, called on each result) -> client.
Connect = Callable[[str, bool, Callable[[], None]], RemoteEngine]


class ServerPool(RolloutEngine):
    """The servers of a rank; its methods can be called from any thread.

    `connect` raises EngineDiedError or UserError where a server cannot be reached now.
    """

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._servers: dict[int, Server] = {}
        self._lock = threading.RLock()
        self._arrival = threading.Event()
        self._backlog: list[tuple[Request, Sampling]] = []
        # Requests that were aborted to be continued by another server.
        self._moving: dict[int, tuple[Request, Sampling]] = {}
        self._done: list[Sample] = []
        self._aborting = self._updating = False
        self._waiting_since: float | None = None  # time at which requests began to wait for a server
        self._num_lost = 0
        self._counts: Counter[str] = Counter()
        self.attention = threading.Event()  # set when the monitor should look at the pool immediately

    # -- as an engine

    def num_free_slots(self) -> int:
        """Returns the free slots of the servers that are ready, minus the requests that wait for a server."""
        with self._lock:
            return sum(client.num_free_slots() for _, client in self._local_ready()) - len(self._backlog)

    def num_queue_slots(self) -> int:
        """Returns the queue slots of the servers that are ready."""
        with self._lock:
            return sum(client.num_queue_slots() for _, client in self._local_ready())

    def num_cache_tokens(self) -> int:
        """Returns the size of the caches of the servers that are ready."""
        with self._lock:
            return sum(client.num_cache_tokens() for _, client in self._local_ready())

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Sends each request to the server that probably has its tokens in the cache."""
        with self._lock:
            self._aborting = False
            for request in requests:
                self._place(request, sampling)

    def generate_on_each(self, request: Request, sampling: Sampling) -> list[Sample]:
        """Returns a sample of each server that is ready; one that is lost meanwhile leaves its request to another."""
        with self._lock:
            self._aborting, ready = False, self._local_ready()
            for i, (_, client) in enumerate(ready):
                client.submit([replace(request, id=i)], sampling)
        if not ready:
            return self.generate([request], sampling)  # it waits for a server
        samples: list[Sample] = []
        while len(samples) < len(ready):
            samples += self.collect(timeout=1.0)
        return samples

    def collect(self, timeout: float) -> list[Sample]:
        """Returns completed samples; UserError where no server has been ready for LOST_SECONDS."""
        deadline = time.monotonic() + timeout
        # Consumes results of all servers; waits for `_arrival`, WAIT_SECONDS at most; ends by a sample or the deadline.
        while True:
            self._arrival.clear()  # before the look, so that a result that arrives after it wakes the wait
            with self._lock:
                samples = self._gather()
            left = deadline - time.monotonic()
            if samples or left <= 0:
                return samples
            self._arrival.wait(min(left, WAIT_SECONDS))

    def abort(self) -> None:
        """Aborts all requests in flight."""
        with self._lock:
            self._aborting = True
            for client in self._clients():
                client.abort()
            waiting, self._backlog = self._backlog, []
            self._done += [_aborted(request) for request, _ in waiting]

    def abort_samples(self, ids: Collection[int]) -> None:
        """Aborts the requests of some samples."""
        with self._lock:
            for client in self._clients():
                client.abort_samples(ids)
            for i in set(ids) & self._moving.keys():
                del self._moving[i]  # its partial sample is returned, not continued
            self._done += [_aborted(request) for request, _ in self._backlog if request.id in ids]
            self._backlog = [item for item in self._backlog if item[0].id not in ids]

    def pause(self) -> None:
        """Stops generation between two tokens, for an update of the weights with requests in flight.

        Servers of other ranks are paused there, and those that drain keep the old weights.
        """
        with self._lock:
            self._updating = True
        self._change_ready(lambda client: client.pause())

    def unpause(self) -> None:
        """Continues generation after `pause`."""
        self._change_ready(lambda client: client.unpause())

    def _change_ready(self, change: Callable[[RemoteEngine], None]) -> None:
        with self._lock:
            ready = self._local_ready()
        for server, client in ready:
            try:
                change(client)
            except EngineDiedError as error:
                self.lose(server.number, str(error))

    def health(self) -> bool:
        """Returns whether a server is ready."""
        with self._lock:
            return bool(self._ready())

    def take_counts(self) -> Counts:
        """Returns the counters of all servers."""
        with self._lock:
            for client in self._clients():
                self._counts.update(client.take_counts())
            counts, self._counts = self._counts, Counter()
        return dict(counts)

    # -- weights

    def receivers(self, numbers: Iterable[int] | None = None) -> dict[int, RemoteEngine]:
        """Returns the servers of this rank that are to receive weights, and suspends checks of weights until `confirm`.

        None: all that respond. Of servers with given numbers only those in the state BARE.
        """
        with self._lock:
            wanted = (State.BARE, State.READY) if numbers is None else (State.BARE,)
            chosen = [
                server
                for number, server in self._servers.items()
                if server.state in wanted and not server.borrowed and (numbers is None or number in set(numbers))
            ]
            self._updating = True
        receivers: dict[int, RemoteEngine] = {}
        for server in chosen:
            assert server.client is not None
            try:
                for part in reversed(server.client.parts):  # prefill first: if it fails, the other is not changed
                    part.refresh()  # it may have been restarted in between
                receivers |= {server.number + i: part for i, part in enumerate(server.client.parts)}
            except (EngineDiedError, UserError) as error:
                self.lose(server.number, str(error))
        return receivers

    def confirm(self, numbers: Iterable[int], version: int) -> None:
        """Makes servers READY that have the weights of `version` now, and ends the transfer."""
        with self._lock:
            for number in numbers:
                server = self._servers.get(number)
                if server and server.state is State.BARE:
                    server.state, server.pause = State.READY, FIRST_PAUSE
                    log.info("rollout: %s has the weights and generates", server.url)
                elif server and server.borrowed and server.client:
                    for part in server.client.parts:
                        part.confirm(version)  # their leader has sent the weights
            self._updating = False
        self.attention.set()

    # -- servers that come and go

    def assign(self, servers: Mapping[int, str]) -> None:
        """Sets the servers that this rank leads: the monitor reaches new ones, others are drained."""
        now = time.monotonic()
        with self._lock:
            for number in servers.keys() - self._servers.keys():
                self._servers[number] = Server(number, servers[number])
            for number in self._servers.keys() - servers.keys():
                server = self._servers[number]
                if server.borrowed or server.state is State.DRAINING:
                    continue
                log.info("rollout: %s was removed; it finishes its samples", server.url)
                server.state, server.deadline = State.DRAINING, now + DRAIN_SECONDS
        self._remove_drained()

    def lose(self, number: int, reason: str) -> None:
        """Makes a server DOWN that does not respond, and gives its requests to others."""
        with self._lock:
            for server in [server for server in self._servers.values() if server.has(number)]:
                self._lose(server, reason)

    def due(self, now: float) -> list[Server]:
        """Returns the servers that should be reached now, each once per attempt."""
        with self._lock:
            due = [s for s in self._servers.values() if s.state is State.DOWN and s.attempt_at <= now]
            for server in due:
                server.postpone(now)
            return due

    def reach(self, server: Server) -> bool:
        """Tries to reach a server that is DOWN; returns whether it responds and fits the job."""
        try:
            if server.client is None:
                server.client = self._connect(server.url, False, self._arrival.set)
            else:
                for part in reversed(server.client.parts):
                    part.reconnect()
        except (EngineDiedError, UserError) as error:
            if server.pause <= 4 * FIRST_PAUSE:  # the first attempts; later ones would fill the log
                log.warning("rollout: %s", error)
            return False
        with self._lock:
            if server.state is State.DOWN:
                server.state = State.BARE
                log.info("rollout: %s responds", server.url)
        return True

    def check_ready(self) -> None:
        """Checks that the servers that are ready still run and have the weights."""
        with self._lock:
            ready = [] if self._updating else self._ready()
        for server, client in ready:
            try:
                for part in reversed(client.parts):
                    part.check_weights()
            except CancelledError:  # the job ends
                return
            except EngineDiedError as error:
                with self._lock:
                    if not self._updating:  # else the weights may have changed since the question
                        self._lose(server, str(error))

    def borrow(self, servers: Mapping[int, str], version: int) -> None:
        """Adds servers of other ranks, which have the weights of `version`, while none of this rank's is ready."""
        for number, url in servers.items():
            if number in self._servers:
                continue
            try:
                client = self._connect(url, True, self._arrival.set)
            except (EngineDiedError, UserError) as error:
                log.warning("rollout: %s", error)
                continue
            for part in client.parts:
                part.confirm(version)  # their leader has sent the weights
            with self._lock:
                self._servers[number] = Server(number, url, State.READY, client, borrowed=True)

    @property
    def needs_help(self) -> bool:
        """Whether requests wait, and no server of this rank is ready."""
        with self._lock:
            return bool(self._backlog) and not self._ready()

    def views(self, state: State) -> dict[int, str]:
        """Returns the addresses of this rank's own servers in a state, by number."""
        with self._lock:
            servers = self._servers.values()
            return {s.number: s.url for s in servers if s.state is state and not s.borrowed}

    def take_num_lost(self) -> int:
        """Returns how many servers were lost since the last call."""
        with self._lock:
            count, self._num_lost = self._num_lost, 0
            return count

    def close(self) -> None:
        """Disconnects from all servers, which keep running."""
        with self._lock:
            for client in self._clients():
                client.close()
            self._servers.clear()

    # -- with the lock held

    def _clients(self) -> list[RemoteEngine]:
        return [server.client for server in self._servers.values() if server.client]

    def _ready(self) -> list[tuple[Server, RemoteEngine]]:
        return [(s, s.client) for s in self._servers.values() if s.state is State.READY and s.client]

    def _local_ready(self) -> list[tuple[Server, RemoteEngine]]:
        return [(server, client) for server, client in self._ready() if not server.borrowed]

    def _place(self, request: Request, sampling: Sampling) -> None:
        """Sends a request to a server; without any it waits."""
        candidates = self._local_ready() or self._ready()  # borrowed servers only without another one
        if not candidates:
            self._backlog.append((request, sampling))
            self.attention.set()
            return
        if len(candidates) == 1:
            candidates[0][1].submit([request], sampling)
            return
        # Only the prompt counts: all turns of a conversation have the prompt of the first, so nothing is remembered.
        ranked = sorted(candidates, key=lambda item: item[0].weight(request.prompt), reverse=True)
        free = (client for _, client in ranked if client.num_free_slots() > 0)
        next(free, ranked[0][1]).submit([request], sampling)

    def _gather(self) -> list[Sample]:
        for server in list(self._servers.values()):  # a copy: servers that are lost may be forgotten
            try:
                samples = server.client.collect(0.0) if server.client else []
            except EngineDiedError as error:
                self._lose(server, str(error))
            else:
                for sample in samples:
                    self._accept(sample)
        self._remove_drained()
        if self._backlog and self._ready():
            waiting, self._backlog = self._backlog, []
            for request, sampling in waiting:
                self._place(request, sampling)
        now = time.monotonic()
        self._waiting_since = (self._waiting_since or now) if self._backlog else None
        if self._waiting_since and now - self._waiting_since > LOST_SECONDS:
            raise UserError(
                f"rollout.urls: no server has been ready for {LOST_SECONDS:.0f} s, and {len(self._backlog)} samples "
                "wait. Start servers again, then the job."
            )
        done, self._done = self._done, []
        return done

    def _accept(self, sample: Sample) -> None:
        moving = self._moving.pop(sample.id, None)
        if moving and sample.finish == "abort" and not self._aborting:
            request, sampling = moving
            self._place(replace(request, partial=sample) if sample.tokens else request, sampling)
        else:
            self._done.append(sample)

    def _lose(self, server: Server, reason: str) -> None:
        if server.state is State.DOWN:
            return
        log.warning("rollout: %s; its samples go to other servers", reason)
        was_draining = server.state is State.DRAINING
        # DOWN before its requests are placed again, which else would go to this server.
        server.state, server.attempt_at, server.pause = State.DOWN, 0.0, FIRST_PAUSE
        self._num_lost += not server.borrowed
        if client := server.client:
            for sample in client.take_done():
                self._accept(sample)
            for request, sampling in client.take_unfinished():
                self._moving.pop(request.id, None)
                if self._aborting:
                    self._done.append(_aborted(request))
                else:
                    self._place(request, sampling)
        if server.borrowed or was_draining:
            self._forget(server)
        self.attention.set()

    def _remove_drained(self) -> None:
        now = time.monotonic()
        with self._lock:
            has_local = bool(self._local_ready())
            for server in list(self._servers.values()):
                client = server.client
                unused = client is None or not client.in_flight()
                if server.state is State.DRAINING and client and not unused and now > server.deadline:
                    log.info("rollout: other servers continue the samples of %s", server.url)
                    self._moving |= {request.id: (request, sampling) for request, sampling in client.in_flight()}
                    client.abort()
                    server.deadline = now + DRAIN_SECONDS
                elif unused and (server.state is State.DRAINING or (server.borrowed and has_local)):
                    self._forget(server)

    def _forget(self, server: Server) -> None:
        del self._servers[server.number]
        if client := server.client:
            self._done += client.take_done()
            self._counts.update(client.take_counts())
            threading.Thread(target=client.close, daemon=True).start()  # it waits for the client's thread


def _aborted(request: Request) -> Sample:
    return request.prepend_partial(Sample(request.id, (), (), (), "abort"))
