"""Simulation of an iteration with recorded lengths: the cost of long samples in generation and training.

    engines    take samples from one queue while their cache has capacity; all samples of an engine advance by one token
               per step
    training   rows are packed and distributed as in training; ranks wait for each other where they communicate

Seconds of a step and of a micro-batch are computed by `generation_time` and `cost`, so equal lengths give their closed
form.
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
from verl_mg.planner.cost import Work, micro_batch_seconds, optimizer_seconds
from verl_mg.planner.generation_time import decode_seconds
from verl_mg.planner.inputs import PlanInputs
from verl_mg.planner.iteration_time import Seconds, iteration_seconds, weight_sync
from verl_mg.planner.layer_time import TERA, MicroBatch
from verl_mg.planner.lengths import Length
from verl_mg.planner.memory import RolloutMemory, train_memory
from verl_mg.planner.memory_phases import problem
from verl_mg.planner.search import rollout_side


@dataclass(frozen=True)
class Iteration:
    """Result of a simulated iteration."""

    ranks: int
    train: Layout
    rollout: EngineLayout
    tokens: int  # tokens of prompts and responses
    parts: Seconds  # predicted seconds of each part

    @property
    def rate(self) -> float:
        """Tokens per second of the whole iteration."""
        return self.tokens / self.parts.all


def simulate(inputs: PlanInputs, lengths: Sequence[Length], train: Layout, rollout: EngineLayout) -> Iteration:
    """Simulates an iteration over recorded samples."""
    # The recorded samples replace the tokens of an iteration and the longest sample of the inputs.
    tokens = sum(length.total for length in lengths)
    inputs = replace(inputs, tokens_per_iteration=tokens, sequence=max(length.total for length in lengths))
    layout = train.fit(len(inputs.placement_ranks))
    memory = train_memory(inputs, layout)
    engine = rollout_side(inputs, rollout, memory).memory
    if too_large := problem(inputs, memory, engine):
        raise UserError(too_large)
    engines = EnginePlacement(rollout, inputs.engine_ranks).engines
    generated = generate(inputs, lengths, engines, engine)
    inference = training_seconds(inputs, lengths, layout, Work.INFERENCE) if inputs.old_logprobs else 0.0
    update = inputs.epochs * (
        training_seconds(inputs, lengths, layout, Work.UPDATE) + inputs.minibatches * optimizer_seconds(inputs, layout)
    )
    sync_seconds = weight_sync(inputs, layout, rollout).seconds
    rollout_seconds = max(engine.clock for engine in generated)
    return Iteration(
        inputs.ranks,
        layout,
        rollout,
        tokens,
        iteration_seconds(inputs, memory, inference, update, rollout_seconds, sync_seconds),
    )


# -- generation


@dataclass
class Engine:
    """State of a simulated engine."""

    clock: float = 0.0  # seconds since the start
    steps: int = 0  # decoding steps since the start
    num_generated: int = 0  # generated tokens
    # Heap of running samples: (step at which the sample is complete, its tokens then).
    running: list[tuple[int, int]] = field(default_factory=list)
    cached: int = 0  # tokens in the cache now
    reserved: int = 0  # tokens in the cache when all running samples are complete

    def begin(self, length: Length, prefill: float) -> None:
        """Starts a sample; all running samples wait for its prefill, of so many seconds."""
        heapq.heappush(self.running, (self.steps + length.response, length.total))
        self.cached += length.prompt
        self.reserved += length.total
        self.clock += prefill

    def advance(self, step: Callable[[float, float], float]) -> None:
        """Advances to the completion of the next samples; `step`: (running, cached tokens) -> seconds of a step."""
        # Until then the cache grows by a token a sample and step, and `step` is linear in it: the middle step is the
        # mean.
        steps, running = self.running[0][0] - self.steps, len(self.running)
        self.clock += steps * step(running, self.cached + running * (steps - 1) / 2)
        self.cached += steps * running
        self.steps += steps
        self.num_generated += steps * running
        while self.running and self.running[0][0] == self.steps:
            _, total = heapq.heappop(self.running)
            self.cached -= total
            self.reserved -= total


def generate(inputs: PlanInputs, lengths: Sequence[Length], engines: int, memory: RolloutMemory) -> list[Engine]:
    """Simulates the generation of all samples."""
    # A sample starts where the cache has capacity for its final length; prefills run one after the other.
    layout = memory.layout
    capacity = memory.tokens_per_engine
    speed = layout.ranks * inputs.flops * TERA

    def has_capacity(engine: Engine, length: Length) -> bool:
        is_full = inputs.max_running_requests and len(engine.running) >= inputs.max_running_requests
        return not engine.running or (not is_full and engine.reserved + length.total <= capacity)

    def prefill(length: Length) -> float:
        return inputs.row_flops(length.prompt) / speed

    return continuous_batching(lengths, engines, has_capacity, prefill, partial(decode_seconds, inputs, layout, memory))


def continuous_batching(
    lengths: Sequence[Length],
    engines: int,
    has_capacity: Callable[[Engine, Length], bool],
    prefill: Callable[[Length], float],
    step: Callable[[float, float], float],
) -> list[Engine]:
    """Simulates engines that take the next sample of one queue whenever they have capacity for it.

    Returns them in their final state. `step`: (running samples, cached tokens) -> seconds of a decoding step.
    """
    waiting, all_engines = deque(lengths), [Engine() for _ in range(engines)]
    # At first all are idle and take turns.
    open_engines = deque(all_engines)
    while waiting and open_engines:
        engine = open_engines.popleft()
        if has_capacity(engine, waiting[0]):
            length = waiting.popleft()
            engine.begin(length, prefill(length))
            open_engines.append(engine)
    # Then by their clocks: the engine that is the first to have completed a sample takes the next ones.
    queue = []
    for number, engine in enumerate(all_engines):
        if engine.running:
            engine.advance(step)
            queue.append((engine.clock, number))
    heapq.heapify(queue)
    while queue:
        _, number = heapq.heappop(queue)
        engine = all_engines[number]
        while waiting and has_capacity(engine, waiting[0]):
            length = waiting.popleft()
            engine.begin(length, prefill(length))
        if engine.running:
            engine.advance(step)
            heapq.heappush(queue, (engine.clock, number))
    return all_engines


# -- training


def training_seconds(inputs: PlanInputs, lengths: Sequence[Length], layout: Layout, work: Work) -> float:
    """Predicts the seconds of one pass over the rows, packed and distributed as in training."""
    rows = [length.total for length in lengths]
    flops = [inputs.row_flops(row) for row in rows]
    shares = pack(rows, flops, layout.dp, inputs.micro_batch)
    seconds = [
        [
            micro_batch_seconds(
                inputs, layout, work, MicroBatch(sum(rows[i] for i in micro), sum(rows[i] ** 2 for i in micro))
            )
            for micro in share
        ]
        for share in shares
    ]
    return slowest(seconds, layout, lockstep=layout.ep > 1 or inputs.options.fsdp is not None)


def slowest(seconds: Sequence[Sequence[float]], layout: Layout, lockstep: bool) -> float:
    """Returns the seconds until the last data-parallel index is done."""
    # A pipeline adds (pp - 1) / vpp of its longest micro-batch, in which stages wait (Narayanan et al.,
    # arXiv:2104.04473, section 2.2).
    bubble = (layout.pp - 1) / layout.vpp
    # In lockstep all ranks communicate in every micro-batch: the slowest one of each determines its time.
    if lockstep:
        seconds = [[max(step) for step in zip(*seconds, strict=True)]]
    return max(sum(micros) + bubble * max(micros) for micros in seconds)


def repeated(lengths: Sequence[Length], count: int) -> list[Length]:
    """Returns `count` samples of the same distribution: all of them repeatedly, shuffled each time, and a part."""
    generator, result = random.Random(0), list[Length]()  # the same samples each time
    while len(result) < count:
        result += generator.sample(lengths, min(len(lengths), count - len(result)))
    return result
