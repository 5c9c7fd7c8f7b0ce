"""The limit of an engine by its load, with an engine that is simulated token by token."""

import random
from collections import Counter
from contextlib import closing
from itertools import pairwise

import pytest
from torch.distributed import HashStore

from tests.helpers.engines import SGLANG, bring_weights, options_of
from verl_mg.data.prompts import Prompt
from verl_mg.engines.engine import FULL, LIMIT, LIMITED, Request, Sampling, count_metrics, observed_load
from verl_mg.engines.kinds import PROCESSES
from verl_mg.engines.process_engine import ProcessEngine
from verl_mg.models.tiny_model import make_tiny_model
from verl_mg.rollout.engine_worker import EngineEvents, EngineWorker
from verl_mg.rollout.groups import Group
from verl_mg.rollout.request_limit import LARGEST_STEP, LimitState, RequestLimit
from verl_mg.rollout.work_queue import WorkQueue

LONGEST = 512
SPECIAL = (0, 1, 2, 3)
"""Tokens of a tiny model that are no characters, its end of a response among them."""


class SimulatedEngine:
    """Gives each sample a token in a step, and retracts the newest ones while the cache is full."""

    def __init__(self, cache, length_of):
        self._cache, self._length_of, self._random = cache, length_of, random.Random(0)
        self._ids, self._waiting, self._running = iter(range(10**6)), [], []
        self.num_retracted, self.uses = 0, []

    def run(self, steps, limit):
        """Keeps as many samples in flight as the limit permits, and returns its value after each observation."""
        load, values = Counter(), []
        for _ in range(steps):
            while len(self._running) + len(self._waiting) < (limit if isinstance(limit, int) else limit.value):
                self._waiting.append([next(self._ids), min(LONGEST, self._length_of(self._random)), 0])
            self._step()
            used = sum(age for *_, age in self._running)
            self.uses.append(used / self._cache)
            load.update(observed_load(len(self._running), len(self._waiting), used, self._cache))
            if any(age >= length for _, length, age in self._running):  # counts come with complete samples
                in_flight = {i for i, *_ in self._running + self._waiting}
                if isinstance(limit, RequestLimit):
                    limit.observe(load, in_flight)
                    values.append(limit.value)
                self._running = [sample for sample in self._running if sample[2] < sample[1]]
                load = Counter()
        return values

    def _step(self):
        used = sum(age for *_, age in self._running)
        while self._waiting and used + self._waiting[0][2] + len(self._running) < self._cache:
            self._running.append(self._waiting.pop(0))
            used += self._running[-1][2]
        while used + len(self._running) > self._cache:
            used -= self._running[-1][2]
            self._waiting.insert(0, self._running.pop())
            self.num_retracted += 1
        for sample in self._running:
            sample[2] += 1


def heavy(draw):
    """As many tokens in samples of each of six lengths."""
    scale = draw.choices(range(6), [2.0**-k for k in range(6)])[0]
    return int(draw.expovariate(1 / (8 * 2**scale))) + 1


@pytest.mark.parametrize(
    ("cache", "length_of", "least"),
    [
        (8192, heavy, 0.35),
        (2048, lambda draw: draw.randint(20, 60), 0.6),
        (4096, lambda draw: LONGEST, 0.45),
        pytest.param(32768, heavy, 0.6, marks=pytest.mark.nightly),
        pytest.param(16384, lambda draw: draw.randint(20, 500), 0.5, marks=pytest.mark.nightly),
    ],
)
def test_limit_uses_the_cache_and_neither_overfills_it_nor_oscillates(cache, length_of, least):
    engine, fixed = SimulatedEngine(cache, length_of), SimulatedEngine(cache, length_of)
    limit = RequestLimit(cache, LONGEST)
    assert limit.value == cache // LONGEST, "all fit at their greatest length"
    values = engine.run(3000, limit)
    fixed.run(1500, 2 * cache // LONGEST + 2 * max(values))  # more than fit
    assert engine.num_retracted < 0.1 * fixed.num_retracted
    largest_steps = [after / before for before, after in pairwise(values)]
    assert min(values) >= 1 and max(largest_steps, default=1) <= LARGEST_STEP
    settled = values[len(values) // 2 :]
    assert max(settled) <= 2 * min(settled)
    assert sum(engine.uses[1500:]) / 1500 > least


def observe(limit, running, waiting, share, in_flight):
    return limit.observe(observed_load(running, waiting, round(1000 * share), 1000), in_flight)


def test_limit_shrinks_once_to_what_fits_and_grows_when_most_samples_are_complete():
    limit = RequestLimit(1000, 10)
    assert observe(limit, 70, 30, 0.96, range(100)) is LimitState.SHRINK and limit.value == int(70 * 0.9 / 0.96)
    assert observe(limit, 60, 30, 0.96, range(90)) is LimitState.SHRINK and limit.value == 65, "they are not left yet"
    assert observe(limit, 60, 5, 0.5, range(50, 115)) is LimitState.HOLD and limit.value == 65
    assert observe(limit, 65, 0, 0.91, range(50, 115)) is LimitState.HOLD and limit.value == 65
    assert observe(limit, 65, 0, 0.4, range(90, 155)) is LimitState.GROW and limit.value == 65, "64 had fit before"
    assert observe(limit, 65, 0, 0.4, range(120, 185)) is LimitState.GROW and limit.value == 65, "not settled"
    assert observe(limit, 65, 0, 0.5, range(149, 214)) is LimitState.GROW
    assert limit.value == 71, "a tenth is left; 117 would fit, and steps are small after a cut"


def test_limit_learns_nothing_without_observations_or_from_few_samples():
    limit = RequestLimit(1000, 100)
    assert limit.observe({"prompt tokens": 5}, {1}) is None
    for start in range(0, 40, 4):
        assert observe(limit, 4, 0, 0.01, range(start, start + 4)) is LimitState.GROW
    assert limit.value == 10
    assert RequestLimit(10, 100).value == 1


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [SGLANG])
def test_requests_fill_the_cache_of_an_engine_and_wait_at_a_fixed_number_and_hardly_by_its_load(tmp_path, kind):
    sizes = {"hidden": 64, "max_positions": 256, "init_std": 0.2}
    model = make_tiny_model(tmp_path / "model", "llama", characters="abcdefgh", **sizes)
    # The engine takes nearly all requests at once, as if they were short; they have a token to stop at, and never do.
    extra = {"max_total_tokens": 2048, "schedule_conservativeness": 0.05}
    options = options_of(kind, max_running=None, routed_experts=False, extra=extra)
    sampling = Sampling(max_new_tokens=200, stop_token_ids=SPECIAL, excluded_token_ids=SPECIAL)
    groups = [Group(Prompt(0, (4, 5, 6), "", None, {}), range(i, i + 4)) for i in range(0, 64, 4)]
    store = HashStore()
    with closing(ProcessEngine(PROCESSES[kind], model, options, tmp_path / "0.log")) as engine:
        bring_weights(engine, model, 0)
        assert engine.num_cache_tokens() == 2048 and engine.num_free_slots() >= 64
        reports, samples = [], []
        for longest in (None, 203):
            queue = WorkQueue(store, f"{longest}", sampling, groups, len(groups))
            worker = EngineWorker(
                engine, 1, EngineEvents(store), lambda i: Request(i, (4, 5, 6), i), samples.append, samples.append,
                longest=longest,
            )  # fmt: skip
            worker.add(queue)
            worker.work_off(queue)
            reports.append(worker.take_counts())
    fixed, limited = reports
    # Where requests run with a full cache, the engine retracts some of them, which wait.
    waiting = [count_metrics([report])["time/engine_waiting"] for report in reports]
    assert fixed[FULL] > 0 and waiting[0] > 5 and waiting[1] < 0.1 * waiting[0], reports
    assert limited[LIMITED] > 0 and limited[LIMIT] / limited[LIMITED] < 1.2 * 2048 / 203, limited
    assert len(samples) == 128 and all(len(sample.tokens) == 200 for sample in samples)
