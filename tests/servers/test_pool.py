"""A pool of servers: which server gets which request, and where requests go when servers come, go and fail."""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from itertools import pairwise

import pytest

from verl_mg.engines.engine import EngineDiedError, Request, Sample, Sampling
from verl_mg.errors import UserError
from verl_mg.servers import pool as server_pool
from verl_mg.servers.info import ServerKeys
from verl_mg.servers.pool import ServerPool
from verl_mg.servers.pool_member import Server, State

SAMPLING = Sampling(max_new_tokens=8)


class Client:
    """Stands in for a `RemoteEngine`: requests run until the test completes them, or until `dead`."""

    def __init__(self, url: str, slots: int = 100) -> None:
        self.url, self.slots, self.dead, self.closed = url, slots, "", False
        self.running: dict[int, tuple[Request, Sampling]] = {}
        self.done: list[Sample] = []
        self.version = -1

    @property
    def parts(self) -> tuple[Client, ...]:
        return (self,)

    def num_free_slots(self) -> int:
        return self.slots - len(self.running)

    def num_queue_slots(self) -> int:
        return 1

    def submit(self, requests, sampling) -> None:
        self.running |= {request.id: (request, sampling) for request in requests}

    def finish(self, *ids: int, tokens: tuple[int, ...] = (5,), how: str = "stop") -> None:
        for i in ids:
            request, _ = self.running.pop(i)
            sample = Sample(i, tokens, (0.0,) * len(tokens), (0,) * len(tokens), how)
            self.done.append(request.prepend_partial(sample))

    def collect(self, timeout: float) -> list[Sample]:
        if self.dead:
            raise EngineDiedError(self.dead)
        return self.take_done()

    def abort(self) -> None:
        self.finish(*self.running, tokens=(4, 4), how="abort")

    def refresh(self) -> None:
        if self.dead:
            raise EngineDiedError(self.dead)

    reconnect = check_weights = refresh

    def take_counts(self) -> dict[str, int]:
        return {}

    def in_flight(self):
        return list(self.running.values())

    def take_unfinished(self):
        taken, self.running = self.in_flight(), {}
        return taken

    def take_done(self) -> list[Sample]:
        done, self.done = self.done, []
        return done

    def confirm(self, version: int) -> None:
        self.version = version

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def clients() -> dict[str, Client]:
    return {}


@pytest.fixture
def pool(clients) -> ServerPool:
    def connect(url, borrowed, on_arrival) -> Client:
        if url.endswith("gone"):
            raise EngineDiedError(f"{url} does not respond")
        return clients.setdefault(url, Client(url))

    return ServerPool(connect)


def reach(pool: ServerPool) -> list[Server]:
    due = pool.due(1e12)
    for server in due:
        pool.reach(server)
    return due


def ready(pool: ServerPool, *urls: str) -> None:
    """The pool has these servers, and they have the weights."""
    pool.assign(dict(enumerate(urls)))
    reach(pool)
    pool.confirm(pool.receivers(), 3)


def requests(*ids: int, prompt: int | None = None) -> list[Request]:
    return [Request(i, (7, 100 + (i if prompt is None else prompt)), i) for i in ids]


def ids(samples: list[Sample]) -> list[int]:
    return sorted(sample.id for sample in samples)


def test_pool_prompt_goes_to_one_server_in_all_its_turns(pool, clients):
    ready(pool, "a", "b", "c")
    for prompt in range(40):
        pool.submit(requests(*range(4 * prompt, 4 * prompt + 4), prompt=prompt), SAMPLING)
    home = {i // 4: url for url, client in clients.items() for i in client.running}
    assert all(home[i // 4] == url for url, client in clients.items() for i in client.running)
    counts = [sum(url == server for url in home.values()) for server in "abc"]
    assert min(counts) >= 5
    turn = Sample(3, (1, 2), (0.0, 0.0), (0, 0), "stop")
    clients[home[0]].finish(3)
    pool.submit([Request(3, (7, 100), 3, partial=turn)], SAMPLING)
    assert 3 in clients[home[0]].running


def test_pool_lost_server_moves_only_its_prompts(pool, clients):
    ready(pool, "a", "b", "c")
    pool.submit(requests(*range(60)), SAMPLING)
    before = {url: set(client.running) for url, client in clients.items()}
    clients["b"].dead = "lost"
    assert pool.collect(0.0) == []
    assert before["a"] <= clients["a"].running.keys() and before["c"] <= clients["c"].running.keys()
    assert clients["a"].running.keys() | clients["c"].running.keys() == set(range(60))
    assert pool.take_num_lost() == 1 and not clients["b"].running
    for client in (clients["a"], clients["c"]):
        client.finish(*list(client.running))
    assert ids(pool.collect(0.0)) == list(range(60))


def test_pool_full_server_passes_requests_on(pool, clients):
    ready(pool, "a", "b")
    for client in clients.values():
        client.slots = 3
    pool.submit(requests(*range(6), prompt=0), SAMPLING)
    assert [len(client.running) for client in clients.values()] == [3, 3]
    assert pool.num_free_slots() == 0


def test_pool_request_to_each_is_answered_by_each_ready_server(pool, clients):
    ready(pool, "a", "b", "c")
    clients["b"].dead = "b is down"
    asked = threading.Thread(target=lambda: answers.extend(pool.generate_on_each(Request(0, (1, 2), seed=0), SAMPLING)))
    answers: list[Sample] = []
    asked.start()
    while asked.is_alive():
        for url in ("a", "c"):
            clients[url].finish(*list(clients[url].running), tokens=(5, ord(url)))
        time.sleep(0.01)
    assert ids(answers) == [0, 1, 2] and {sample.tokens[1] for sample in answers} == {ord("a"), ord("c")}


def test_pool_without_servers_keeps_requests_until_one_is_ready(pool, clients):
    pool.assign({4: "gone"})
    reach(pool)
    pool.submit(requests(1, 2), SAMPLING)
    assert pool.num_free_slots() == -2 and pool.needs_help and not pool.health()
    pool.assign({5: "a"})
    reach(pool)
    assert pool.views(State.BARE) == {5: "a"} and pool.collect(0.0) == []
    pool.confirm(pool.receivers([5]), 3)
    assert pool.receivers([5]) == {}  # it has the weights
    pool.confirm([], 3)
    assert pool.collect(0.0) == [] and clients["a"].running.keys() == {1, 2}


def test_pool_without_servers_for_too_long_raises(pool, monkeypatch):
    pool.submit(requests(1), SAMPLING)
    assert pool.collect(0.0) == []
    monkeypatch.setattr(server_pool, "LOST_SECONDS", -1.0)
    with pytest.raises(UserError, match="no server has been ready for -1 s, and 1 samples wait"):
        pool.collect(0.0)


def test_pool_removed_server_finishes_then_others_continue(pool, clients, monkeypatch):
    ready(pool, "a", "b")
    pool.submit(requests(*range(20)), SAMPLING)
    moving = set(clients["a"].running)
    pool.assign({1: "b"})
    pool.submit(requests(20, 21, 22, 23), SAMPLING)
    assert set(clients["a"].running) == moving  # nothing new
    finished = min(moving)
    clients["a"].finish(finished)
    assert ids(pool.collect(0.0)) == [finished] and "a" in clients
    monkeypatch.setattr(server_pool, "DRAIN_SECONDS", -1.0)
    for server in pool._servers.values():
        server.deadline = 0.0
    pool.collect(0.0)
    pool.collect(0.0)
    assert moving - {finished} <= clients["b"].running.keys()
    # What was generated is kept.
    assert all(clients["b"].running[i][0].partial.tokens == (4, 4) for i in moving - {finished})
    assert list(pool._servers) == [1] and pool.take_num_lost() == 0


def test_pool_abort_returns_every_request_once(pool, clients):
    ready(pool, "a", "b")
    pool.submit(requests(*range(10)), SAMPLING)
    clients["a"].dead = "lost"
    pool.abort()
    samples = pool.collect(0.0)
    samples += pool.collect(0.0)
    assert ids(samples) == list(range(10)) and {sample.finish for sample in samples} == {"abort"}


def test_pool_borrows_only_while_it_has_no_server(pool, clients):
    ready(pool, "a")
    pool.submit(requests(1, 2), SAMPLING)
    clients["a"].dead = "lost"
    pool.collect(0.0)
    assert pool.needs_help
    pool.borrow({7: "far", 8: "gone"}, 3)
    assert pool.collect(0.0) == [] and clients["far"].running.keys() == {1, 2} and clients["far"].version == 3
    assert pool.num_free_slots() == 0  # it attracts no further work
    pool.confirm([7], 4)  # its leader has sent it other weights
    assert clients["far"].version == 4
    clients["a"].dead = ""
    reach(pool)
    pool.confirm(pool.receivers(), 3)
    pool.submit(requests(3), SAMPLING)
    assert clients["a"].running.keys() == {3}
    clients["far"].finish(1, 2)
    assert ids(pool.collect(0.0)) == [1, 2] and list(pool._servers) == [0]


def test_pool_server_that_stays_away_is_tried_less_and_less_often(pool):
    pool.assign({0: "gone"})
    now, tried = 0.0, []
    while now < 200:
        if pool.due(now):
            tried.append(now)
        now += 0.5
    pauses = [after - before for before, after in pairwise(tried)]
    assert pauses[:6] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0] and set(pauses[6:]) == {30.0}


def test_pool_server_that_is_restarted_is_bare_again(pool, clients):
    ready(pool, "a", "b")
    clients["a"].dead = "restarted"
    pool.check_ready()
    clients["a"].dead = ""
    assert pool.views(State.READY) == {1: "b"}
    reach(pool)
    assert pool.views(State.BARE) == {0: "a"}


def test_pool_loses_nothing_over_random_events(pool, clients):
    rng = random.Random(5)
    ready(pool, *"abcd")
    left, done = list(range(300)), defaultdict(int)
    while len(done) < 300:
        if left and rng.random() < 0.5:
            pool.submit(requests(left.pop()), SAMPLING)
        client = clients[rng.choice("abcd")]
        event = rng.random()
        if event < 0.1:
            client.dead = "lost"
        elif event < 0.3:
            client.dead = ""
            reach(pool)
            pool.confirm(pool.receivers(), 3)
        elif client.running and not client.dead:
            client.finish(rng.choice(list(client.running)))
        if event > 0.97:
            pool.assign({i: url for i, url in enumerate("abcd") if rng.random() < 0.7})
        for sample in pool.collect(0.0):
            done[sample.id] += 1
        if not left and event > 0.9:
            for server in list(pool._servers.values()):
                server.deadline = 0.0  # their time to drain is over
    assert dict(done) == dict.fromkeys(range(300), 1)


def test_server_keys_are_sent_where_they_are_needed_and_never_shown():
    keys = ServerKeys("user", "admin")
    assert keys.headers("/generate") == keys.headers("/v1/models") == {"Authorization": "Bearer user"}
    assert keys.headers("/update_weights_from_tensor") == {"Authorization": "Bearer admin"}
    assert ServerKeys("user").headers("/abort_request") == {"Authorization": "Bearer user"}
    assert ServerKeys().headers("/generate") == {}
    assert "user" not in repr(keys) and "admin" not in repr(keys)


def test_server_keys_of_unset_variables_raise(monkeypatch):
    monkeypatch.setenv("A_KEY", " k ")
    assert ServerKeys.from_environment("A_KEY", None) == ServerKeys("k")
    monkeypatch.setenv("A_KEY", "two\nlines")
    with pytest.raises(UserError, match=r"^rollout\.api_key_env=A_KEY: .* not printable") as error:
        ServerKeys.from_environment("A_KEY", None)
    assert "two" not in str(error.value)
    with pytest.raises(UserError, match=r"^rollout\.admin_key_env=NOT_SET_ANYWHERE: .*not set\. Set it on every rank"):
        ServerKeys.from_environment(None, "NOT_SET_ANYWHERE")
