"""Search of layouts: all that a model admits, the nearest ones that fit into memory, and the best pairs.

trains     training layouts x recomputation, fastest first: the first ones that fit with an engine
engines    engine layouts, on the fewest nodes first: the first group with a layout that fits
pairs      of both, each with its weight sync planned, best first

Layers of pipeline stages are also tried in the numbers that make the slowest stage as fast as possible (`balanced`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import groupby
from operator import itemgetter

from verl_mg.dtypes import ITEM_BYTES
from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout, EnginePlacement, Layout
from verl_mg.layout.suggest import engine_layouts_on, is_valid, layouts_on, nearest, resolve_engine_layout
from verl_mg.planner.activations import micro_batches
from verl_mg.planner.cost import inference_seconds, train_seconds, update_parts
from verl_mg.planner.inputs import PlanInputs
from verl_mg.planner.iteration_time import Seconds, Sync, iteration_seconds, rollout_seconds, weight_sync
from verl_mg.planner.memory import (
    RolloutMemory,
    TrainMemory,
    check,
    check_engine,
    fit_layout,
    rollout_memory,
    train_memory,
)
from verl_mg.planner.memory_phases import awake, engine_limit, problem
from verl_mg.planner.training_options import Recompute, recompute
from verl_mg.reshard.encoding import encoding_of

PARTNERS = 4  # number of rollout layouts whose weight sync is planned for each training layout
MIN_TOKENS_PER_CP_RANK = 4096
"""Tokens of the longest micro-batch on a context-parallel rank, at least, in a layout that a search tries."""
INTERLEAVINGS = (1, 2, 4)  # virtual pipeline sizes that a search tries
BISECTIONS = 20  # halvings of the interval in which the seconds of the slowest stage are searched
LEAST_GAIN = 0.01  # fraction of the slowest stage's seconds that chosen layers must save


@dataclass(frozen=True)
class TrainSide:
    """Layout of the actor with its memory and predicted seconds."""

    layout: Layout
    memory: TrainMemory
    update_seconds: float  # predicted seconds of the updates of an iteration
    inference_seconds: float  # predicted seconds of old log-probs; 0 where they are not computed
    recompute: Recompute  # parts of a layer computed again in the backward pass


@dataclass(frozen=True)
class RolloutSide:
    """Layout of the engines with their memory and predicted seconds."""

    layout: EngineLayout
    memory: RolloutMemory
    seconds: float  # predicted seconds of generating an iteration's samples


@dataclass(frozen=True)
class Pair:
    """Layouts of training and rollout, and the weight sync between them."""

    train: TrainSide
    rollout: RolloutSide
    sync: Sync
    parts: Seconds  # predicted seconds of each part of an iteration

    @property
    def seconds(self) -> float:
        """Score of a search: predicted seconds of one iteration, lower is better."""
        return self.parts.all


def check_rollout(inputs: PlanInputs, layout: EngineLayout) -> EngineLayout:
    """Returns a layout of engines after checking it; the UserError lists the nearest valid ones."""
    ranks, experts = len(inputs.engine_ranks), inputs.weights.model_dims.experts
    resolved = resolve_engine_layout(layout, ranks, experts, partial(check_engine, inputs))
    EnginePlacement(resolved, inputs.engine_ranks).check_nodes(inputs.node)
    return resolved


def train_side(inputs: PlanInputs, layout: Layout) -> TrainSide:
    """Computes memory and seconds of a checked training layout."""
    memory = train_memory(inputs, layout)
    inference = inference_seconds(inputs, layout) if inputs.old_logprobs else 0.0
    return TrainSide(layout, memory, train_seconds(inputs, layout), inference, inputs.recompute)


def pair_of(inputs: PlanInputs, train: TrainSide, rollout: RolloutSide) -> Pair:
    """Combines both sides, with the weight sync planned byte by byte."""
    sync = weight_sync(inputs, train.layout, rollout.layout)
    parts = iteration_seconds(
        inputs, train.memory, train.inference_seconds, train.update_seconds, rollout.seconds, sync.seconds
    )
    return Pair(train, rollout, sync, parts)


def rollout_side(inputs: PlanInputs, layout: EngineLayout, train: TrainMemory | None = None) -> RolloutSide:
    """Computes memory and seconds of a checked layout of engines; `train` is the actor's memory, if there is one."""
    return _with_limit(inputs, rollout_memory(inputs, layout), train)


def _with_limit(inputs: PlanInputs, memory: RolloutMemory, train: TrainMemory | None) -> RolloutSide:
    limited = replace(memory, limit=engine_limit(inputs, train))
    return RolloutSide(memory.layout, limited, rollout_seconds(inputs, memory.layout, limited))


def train_layouts(inputs: PlanInputs) -> Iterator[Layout]:
    """Yields all training layouts that the model admits, with tp within a node and etp 1 or tp."""
    # cp is a power of two that leaves a rank MIN_TOKENS_PER_CP_RANK tokens of a micro-batch; vpp is above 1 only
    # where the number of micro-batches is a multiple of the stages, as Megatron's interleaved schedule needs.
    # Of this layout only the bounds of cp and vpp are read; vpp needs a pp of 2.
    cp_sizes = max(1, inputs.longest_micro_batch // MIN_TOKENS_PER_CP_RANK)
    for layout in _layouts(inputs, Layout(pp=2, vpp=max(INTERLEAVINGS), cp=cp_sizes)):
        rounds = layout.vpp == 1 or micro_batches(inputs, layout) % layout.pp == 0
        # Tensor parallelism communicates in every layer, so only within a node.
        aligned = layout.cp & (layout.cp - 1) == 0 and inputs.node % layout.tp == 0
        if rounds and aligned and layout.vpp in INTERLEAVINGS and is_valid(layout, partial(check, inputs)):
            yield layout


def _layouts(inputs: PlanInputs, up_to: Layout) -> Iterator[Layout]:
    return layouts_on(len(inputs.placement_ranks), inputs.weights.model_dims.experts, up_to)


def rollout_layouts(inputs: PlanInputs, like: EngineLayout | None = None) -> Iterator[EngineLayout]:
    """Yields all engine layouts that the model admits, with tp within a node or over whole nodes and adp 1 or tp."""
    for layout in engine_layouts_on(len(inputs.engine_ranks), inputs.weights.model_dims.experts, like):
        sizes = layout.tp, layout.ranks
        aligned = all(inputs.node % size == 0 or size % inputs.node == 0 for size in sizes)
        if aligned and is_valid(layout, partial(check_engine, inputs)):
            yield layout


def nearest_train(inputs: PlanInputs, layout: Layout, rollout: RolloutMemory | None = None) -> list[Layout]:
    """Returns the nearest training layouts that fit into memory with an engine, if given; tp is within a node."""

    def fits(near: Layout) -> bool:
        check(inputs, near)
        within = inputs.node % near.tp == 0 and _may_fit(inputs, near)
        return within and not problem(inputs, train_memory(inputs, near), rollout)

    return nearest(layout, _layouts(inputs, layout), fits)


def nearest_rollout(inputs: PlanInputs, layout: EngineLayout) -> list[EngineLayout]:
    """Returns the nearest engine layouts that fit into memory."""

    def fits(near: EngineLayout) -> bool:
        return problem(inputs, None, rollout_memory(inputs, near)) is None

    return nearest(layout, rollout_layouts(inputs, layout), fits)


def recomputations(inputs: PlanInputs) -> list[Recompute]:
    """Returns what a search tries to recompute, from nothing to whole layers."""
    # Modules that cost little are first: norms, activations of experts, projections of latent attention. Then
    # feed-forward layers, which keep the most.
    c = inputs.weights.config
    if inputs.options.fsdp:
        return [False, True]  # parts of layers are Megatron's
    cheap = ["layernorm", *(["mla_up_proj"] if c.latent else [])]
    dense = ["mlp"] if not c.experts or len(c.experts.layers) < c.layers else []
    activations, mixture = (["moe_act"], ["moe"]) if c.experts else ([], [])
    return [False, recompute(cheap + activations), recompute(cheap + dense + mixture), True]


def search(
    inputs: PlanInputs,
    train: Layout | None,
    rollout: EngineLayout | None,
    top: int,
    tried: Sequence[Recompute] | None = None,
) -> list[Pair]:
    """Searches the pairs of layouts that fit into memory, best first; all pairs of a given training layout."""
    planned = [replace(inputs, recompute=modules) for modules in tried] if tried else [inputs]
    rollouts = [check_rollout(inputs, rollout)] if rollout else rollout_layouts(inputs)
    trains = [fit_layout(inputs, train)] if train else list(train_layouts(inputs))
    # Sides are cached: the same candidates are tried for each group of engine layouts.
    candidates = [
        (train_seconds(some, tried_layout), tried_layout, cache(partial(train_side, some, tried_layout)))
        for some in planned
        for layout in trains
        for tried_layout in ([layout] if train else filter(None, (layout, balanced(some, layout))))
    ]
    candidates.sort(key=itemgetter(0))
    too_large = "generation"  # named in the error: what did not fit in the last group of engine layouts
    for engines in _fitting_rollouts(inputs, rollouts):
        if sides := _fitting_trains(inputs, candidates, engines, top):
            return _pairs(inputs, sides, engines, top if train else PARTNERS, all_of_them=train is not None)
        too_large = "training"
    raise UserError(
        f"--search: no layout of {too_large} fits {inputs.memory - inputs.reserve:g} GiB on {inputs.ranks} ranks. "
        "Use more --ranks or --memory, a smaller --micro-batch or --sequence, or leave --train and --rollout out."
    )


def _pairs(
    inputs: PlanInputs, trains: list[TrainSide], engines: list[RolloutSide], partners: int, all_of_them: bool
) -> list[Pair]:
    result: list[Pair] = []
    for side in trains:
        limited = [_with_limit(inputs, other.memory, side.memory) for other in engines]
        fitting = [other for other in limited if not problem(inputs, side.memory, other.memory)]
        best = sorted(fitting, key=lambda other: other.seconds)[:partners]
        pairs = [pair_of(inputs, side, other) for other in best]
        result += pairs if all_of_them else [min(pairs, key=lambda pair: pair.seconds)]
    return sorted(result, key=lambda pair: pair.seconds)


def _fitting_rollouts(inputs: PlanInputs, layouts: Iterable[EngineLayout]) -> Iterator[list[RolloutSide]]:
    """Yields the layouts that fit, by nodes of an engine in increasing order: between nodes links are slow."""

    def nodes(layout: EngineLayout) -> int:
        return -(-layout.ranks // inputs.node)

    # A lower bound of the weights on a rank first: it spares the weight table of a layout that cannot fit.
    encoding = encoding_of(inputs.wire)
    least = inputs.size.bytes
    if encoding:
        least = inputs.size.elements * ITEM_BYTES[encoding.dtype] // encoding.packed
    for _, equal in groupby(sorted(layouts, key=nodes), key=nodes):
        may_fit = [layout for layout in equal if least / layout.ranks <= inputs.usable]
        sides = [rollout_side(inputs, layout) for layout in may_fit]
        if fitting := [side for side in sides if not problem(inputs, None, side.memory)]:
            yield fitting


def _fitting_trains(
    inputs: PlanInputs,
    candidates: Iterable[tuple[float, Layout, Callable[[], TrainSide]]],
    rollouts: list[RolloutSide],
    count: int,
) -> list[TrainSide]:
    """Returns the best `count` training layouts that fit together with the smallest rollout weights."""
    # A training layout that does not fit with the smallest weights fits with no engine; pairs are checked later.
    lightest = min(rollouts, key=lambda side: max(side.memory.weights))
    fitting: dict[str, TrainSide] = {}  # of each layout the best number of layers of stages
    for _, layout, make_side in candidates:
        if len(fitting) < count and str(layout) not in fitting and _may_fit(inputs, layout):
            side = make_side()
            if not problem(inputs, side.memory, lightest.memory):
                fitting[str(layout)] = side
    return list(fitting.values())


def _may_fit(inputs: PlanInputs, layout: Layout) -> bool:
    """Returns whether a lower bound of weights, gradients and optimizer states fits, without a weight table."""
    if inputs.options.fsdp:
        return True
    dense = (inputs.size.elements - inputs.size.experts) / layout.tp
    experts = inputs.size.experts / (layout.ep * layout.etp)
    others = sum(awake(inputs, None).values())
    options = inputs.options
    states = (1 - options.offloaded_states) * options.state_bytes * inputs.size.elements / layout.ranks
    local = (options.weight_bytes + options.gradient_bytes) * (dense + experts) / layout.pp
    return local + states + others <= inputs.usable


def balanced(inputs: PlanInputs, layout: Layout) -> Layout | None:
    """Returns a layout with layers of its stages by predicted seconds; None where these save next to nothing."""
    # Stages are filled from the last one, which has the output layer, so that the first one, with the activations of
    # the most micro-batches, has what is left.
    if layout.pp == 1 or layout.vpp > 1 or inputs.options.fsdp:
        return None
    # Bisection over the seconds of the slowest stage: whether stages of at most so many seconds exist is found in one
    # pass over the layers.
    layers, head = update_parts(inputs, layout)
    stages = [[layers[layer] for layer in layout.layers(len(layers), stage)] for stage in range(layout.pp)]
    # By identity: two stages may be equal lists, and only the last one has the output layer.
    given = max(sum(stage) + head * (stage is stages[-1]) for stage in stages)
    least, most = max(layers), given
    best: list[int] | None = None
    for _ in range(BISECTIONS):
        middle = (least + most) / 2
        if counts := _filled(layers, head, layout.pp, middle):
            best, most = counts, middle
        else:
            least = middle
    if best is None or most > (1 - LEAST_GAIN) * given:
        return None
    return replace(layout, pipeline_layers=tuple(best))


def _filled(layers: list[float], head: float, stages: int, limit: float) -> list[int] | None:
    """Returns numbers of layers of stages of at most `limit` seconds, each at least 1; None where there are none."""
    counts, left = [], list(layers)
    for stage in reversed(range(stages)):  # `len(left) > stage` leaves a layer for each earlier stage
        seconds, count = head if stage == stages - 1 else 0.0, 0
        while len(left) > stage and seconds + left[-1] <= limit:
            seconds, count = seconds + left.pop(), count + 1
        if not count:
            return None
        counts.append(count)
    return None if left else counts[::-1]
