"""An iteration replayed with recorded lengths: what the long samples cost, in generation and in training.

    engines    take samples from one queue as they have room, all of an engine's samples advance by a token a step
    training   rows are packed and dealt as training does it; ranks wait for each other where they exchange

Seconds of a step and of a micro-batch are those of `cost`, so equal lengths give its closed form.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout, EnginePlacement, Layout
from verl_mg.layout.packing import pack
from verl_mg.planner.cost import (
    INFERENCE,
    TERA,
    UPDATE,
    Work,
    decode_seconds,
    fullest_stage,
    optimizer_seconds,
    working_seconds,
)
from verl_mg.planner.inputs import PlanInputs
from verl_mg.planner.iteration_time import Seconds, iteration_seconds, weight_sync
from verl_mg.planner.lengths import Length
from verl_mg.planner.memory import RolloutMemory, train_memory
from verl_mg.planner.memory_phases import problem
from verl_mg.planner.search import rollout_side


@dataclass(frozen=True)
class Iteration:
    """A simulated iteration. tokens: of prompts and responses. ranks: of the job."""

    ranks: int
    train: Layout
    rollout: EngineLayout
    tokens: int
    parts: Seconds

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.parts.all


def simulate(setting: PlanInputs, lengths: Sequence[Length], train: Layout, rollout: EngineLayout) -> Iteration:
    """An iteration over these samples, of layouts on all ranks of the setting. UserError where they do not fit.

    The setting's own batch and sequence do not count.
    """
    tokens = sum(length.total for length in lengths)
    setting = replace(setting, batch=tokens, sequence=max(length.total for length in lengths))
    layout = train.fit(len(setting.standing))
    memory = train_memory(setting, layout)
    engine = rollout_side(setting, rollout, memory).memory
    if too_large := problem(setting, memory, engine):
        raise UserError(too_large)
    engines = EnginePlacement(rollout, setting.engine_ranks).engines
    generated = drawing(setting, lengths, engines, engine)
    judging = training_seconds(setting, lengths, layout, INFERENCE)
    update = setting.epochs * (
        training_seconds(setting, lengths, layout, UPDATE[setting.recompute])
        + setting.minibatches * fullest_stage(setting, layout) * optimizer_seconds(setting, layout)
    )
    synced = weight_sync(setting, layout, rollout).seconds
    drawn = max(engine.clock for engine in generated)
    return Iteration(
        setting.ranks, layout, rollout, tokens, iteration_seconds(setting, memory, judging, update, drawn, synced)
    )


# -- generation


@dataclass
class Engine:
    """What an engine has done, and what runs on it.

    clock: seconds. steps: decoded since the beginning. written: tokens. `running` is a heap of (step at which a
    sample is done, tokens that it has then). cached: tokens in the cache now; reserved: when all that runs is done.
    """

    clock: float = 0.0
    steps: int = 0
    written: int = 0
    running: list[tuple[int, int]] = field(default_factory=list)
    cached: int = 0
    reserved: int = 0

    def begin(self, length: Length, prefill: float) -> None:
        """Take a sample on; all others wait while its prompt is read."""
        heapq.heappush(self.running, (self.steps + length.response, length.total))
        self.cached += length.prompt
        self.reserved += length.total
        self.clock += prefill

    def advance(self, step: Callable[[float, float], float]) -> None:
        """Until the next samples are done. step(samples, cached tokens): seconds of a step, even in the cached ones."""
        steps, running = self.running[0][0] - self.steps, len(self.running)
        self.clock += steps * step(running, self.cached + running * (steps - 1) / 2)
        self.cached += steps * running
        self.steps += steps
        self.written += steps * running
        while self.running and self.running[0][0] == self.steps:
            _, total = heapq.heappop(self.running)
            self.cached -= total
            self.reserved -= total


def drawing(setting: PlanInputs, lengths: Sequence[Length], engines: int, memory: RolloutMemory) -> list[Engine]:
    """All samples drawn by so many engines: the seconds are those of the slowest.

    A sample is begun where there is room for all that it will be; prompts are read one after the other.
    """
    layout = memory.layout
    room = memory.tokens_per_engine
    speed = layout.ranks * setting.flops * TERA

    def has_room(engine: Engine, length: Length) -> bool:
        many = setting.max_running_requests and len(engine.running) >= setting.max_running_requests
        return not engine.running or (not many and engine.reserved + length.total <= room)

    def prefill(length: Length) -> float:
        return setting.row_flops(length.prompt) / speed

    return continuous_batching(lengths, engines, has_room, prefill, partial(decode_seconds, setting, layout, memory))


def continuous_batching(
    lengths: Sequence[Length],
    engines: int,
    has_room: Callable[[Engine, Length], bool],
    prefill: Callable[[Length], float],
    step: Callable[[float, float], float],
) -> list[Engine]:
    """Engines that take the next sample of one queue whenever they have room for it."""
    waiting, all_of_them = deque(lengths), [Engine() for _ in range(engines)]
    # At first all are idle and take turns.
    open_ones = deque(all_of_them)
    while waiting and open_ones:
        engine = open_ones.popleft()
        if has_room(engine, waiting[0]):
            length = waiting.popleft()
            engine.begin(length, prefill(length))
            open_ones.append(engine)
    agenda = []
    for number, engine in enumerate(all_of_them):
        if engine.running:
            engine.advance(step)
            agenda.append((engine.clock, number))
    heapq.heapify(agenda)
    while agenda:
        _, number = heapq.heappop(agenda)
        engine = all_of_them[number]
        while waiting and has_room(engine, waiting[0]):
            length = waiting.popleft()
            engine.begin(length, prefill(length))
        if engine.running:
            engine.advance(step)
            heapq.heappush(agenda, (engine.clock, number))
    return all_of_them


# -- training


def training_seconds(setting: PlanInputs, lengths: Sequence[Length], layout: Layout, work: Work) -> float:
    """The rows once through the model, packed and dealt as training does it, on the slowest data-parallel index."""
    rows = [length.total for length in lengths]
    flops = [setting.row_flops(row) for row in rows]
    shares = pack(rows, flops, layout.dp, setting.micro_batch)
    seconds = [
        [
            working_seconds(setting, layout, work, sum(flops[i] for i in micro), sum(rows[i] for i in micro))
            for micro in share
        ]
        for share in shares
    ]
    return fullest_stage(setting, layout) * slowest(seconds, layout, lockstep=layout.ep > 1)


def slowest(seconds: Sequence[Sequence[float]], layout: Layout, lockstep: bool) -> float:
    """seconds[data-parallel index][micro-batch] -> when the last is done.

    A pipeline adds (pp - 1) / vpp of its longest micro-batch, in which stages wait (Narayanan et al., arXiv:2104.04473,
    section 2.2). lockstep: ranks exchange in every micro-batch, so the slowest of each counts.
    """
    bubble = (layout.pp - 1) / layout.vpp
    if lockstep:
        seconds = [[max(step) for step in zip(*seconds, strict=True)]]
    return max(sum(own) + bubble * max(own) for own in seconds)


def repeated(lengths: Sequence[Length], count: int) -> list[Length]:
    """So many samples of the same distribution: all of them over and over, shuffled anew each time, and a part."""
    generator, found = random.Random(0), list[Length]()
    while len(found) < count:
        found += generator.sample(lengths, min(len(lengths), count - len(found)))
    return found
