"""All admissible layouts of a job, those nearest to one that does not hold, and the best ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import groupby

from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout, Layout
from verl_mg.layout.suggest import engine_layouts_on, is_valid, layouts_on, nearest, resolve_engine_layout
from verl_mg.planner.cost import inference_seconds, rollout_seconds, train_seconds
from verl_mg.planner.inputs import WEIGHT_BYTES, PlanInputs
from verl_mg.planner.iteration_time import Seconds, Sync, iteration_seconds, weight_sync
from verl_mg.planner.memory import (
    GRADIENT_BYTES,
    OPTIMIZER_BYTES,
    RolloutMemory,
    TrainMemory,
    micro_batches,
    rollout_memory,
    train_memory,
)
from verl_mg.planner.memory_phases import at_rest, engine_limit, problem
from verl_mg.planner.roles import check, fit_layout

PARTNERS = 4
"""So many rollout layouts are tried with each training layout, byte by byte."""
SHORTEST_RUN = 4096
"""Tokens that a context-parallel rank has at least, of the longest micro-batch, in a layout that a search tries."""
INTERLEAVINGS = (1, 2, 4)


@dataclass(frozen=True)
class TrainSide:
    """A layout of the actor with its memory and predicted seconds: of its updates, and of judging once."""

    layout: Layout
    memory: TrainMemory
    seconds: float
    judging: float


@dataclass(frozen=True)
class RolloutSide:
    """The same of a rollout engine, and of drawing samples."""

    layout: EngineLayout
    memory: RolloutMemory
    seconds: float


@dataclass(frozen=True)
class Pair:
    """Both sides of a job and the weight sync between them."""

    train: TrainSide
    rollout: RolloutSide
    sync: Sync
    parts: Seconds

    @property
    def seconds(self) -> float:
        """The score of a search: predicted seconds of one iteration."""
        return self.parts.all


def check_rollout(setting: PlanInputs, layout: EngineLayout) -> EngineLayout:
    """The layout itself. UserError naming what it does not divide, or what SGLang cannot do, and those that work."""
    ranks, experts = len(setting.engine_ranks), setting.weights.model_dims.experts
    return resolve_engine_layout(layout, ranks, experts, setting.weights.check_engine_layout)


def train_side(setting: PlanInputs, layout: Layout) -> TrainSide:
    """Everything about a checked layout that does not need the rollout's."""
    memory = train_memory(setting, layout)
    return TrainSide(layout, memory, train_seconds(setting, layout), inference_seconds(setting, layout))


def pair_of(setting: PlanInputs, train: TrainSide, rollout: RolloutSide) -> Pair:
    """Both sides, with the sync planned byte by byte."""
    sync = weight_sync(setting, train.layout, rollout.layout)
    parts = iteration_seconds(setting, train.memory, train.judging, train.seconds, rollout.seconds, sync.seconds)
    return Pair(train, rollout, sync, parts)


def rollout_side(setting: PlanInputs, layout: EngineLayout, train: TrainMemory | None = None) -> RolloutSide:
    """Everything about a checked layout; without training, as if no actor stood beside it."""
    return _with_limit(setting, rollout_memory(setting, layout), train)


def _with_limit(setting: PlanInputs, memory: RolloutMemory, train: TrainMemory | None) -> RolloutSide:
    limited = replace(memory, limit=engine_limit(setting, train))
    return RolloutSide(memory.layout, limited, rollout_seconds(setting, memory.layout, limited))


def train_layouts(setting: PlanInputs) -> Iterator[Layout]:
    """All that the model admits: tp within a node, etp 1 or tp.

    cp while a rank keeps SHORTEST_RUN tokens of a micro-batch; vpp where micro-batches come in whole rounds of the
    stages, as Megatron's interleaved schedule takes them.
    """
    cp_sizes = max(1, setting.longest_micro_batch // SHORTEST_RUN)
    for layout in _layouts(setting, Layout(pp=2, vpp=max(INTERLEAVINGS), cp=cp_sizes)):
        rounds = layout.vpp == 1 or micro_batches(setting, layout) % layout.pp == 0
        whole = layout.cp & (layout.cp - 1) == 0 and setting.node % layout.tp == 0
        if rounds and whole and layout.vpp in INTERLEAVINGS and is_valid(layout, partial(check, setting)):
            yield layout


def _layouts(setting: PlanInputs, up_to: Layout) -> Iterator[Layout]:
    return layouts_on(len(setting.standing), setting.weights.model_dims.experts, up_to)


def rollout_layouts(setting: PlanInputs, like: EngineLayout | None = None) -> Iterator[EngineLayout]:
    """All that the model admits: tp within a node or over whole nodes, adp 1 or tp, pp 1 or that of `like`."""
    for layout in engine_layouts_on(len(setting.engine_ranks), setting.weights.model_dims.experts, like):
        aligned = setting.node % layout.tp == 0 or layout.tp % setting.node == 0
        if aligned and is_valid(layout, setting.weights.check_engine_layout):
            yield layout


def nearest_train(setting: PlanInputs, layout: Layout, beside: RolloutMemory | None = None) -> list[Layout]:
    """The layouts nearest to this one that fit into memory, beside rollout weights where given; tp within a node."""

    def holds(near: Layout) -> bool:
        check(setting, near)
        within = setting.node % near.tp == 0 and _may_fit(setting, near)
        return within and not problem(setting, train_memory(setting, near), beside)

    return nearest(layout, _layouts(setting, layout), holds)


def nearest_rollout(setting: PlanInputs, layout: EngineLayout) -> list[EngineLayout]:
    """The same for a rollout layout."""
    return nearest(
        layout,
        rollout_layouts(setting, layout),
        lambda near: problem(setting, None, rollout_memory(setting, near)) is None,
    )


def search(setting: PlanInputs, train: Layout | None, rollout: EngineLayout | None, top: int) -> list[Pair]:
    """The best pairs of layouts that fit into memory, best first; a side that is given stays as it is.

    Each side is ranked by its own predicted seconds (`cost`), engines on as few nodes as hold the model and leave room
    for training. Bytes are planned for the best training layouts alone, each with some of the best rollout layouts, of
    which one is shown; all are where the training layout is given. UserError where nothing fits.
    """
    rollouts = [check_rollout(setting, rollout)] if rollout else rollout_layouts(setting)
    trains = [fit_layout(setting, train)] if train else list(train_layouts(setting))
    counted = cache(partial(train_side, setting))
    refused = "generation"
    for engines in _fitting_rollouts(setting, rollouts):
        if sides := _fitting_trains(setting, trains, counted, engines, top):
            return _pairs(setting, sides, engines, top if train else PARTNERS, all_of_them=train is not None)
        refused = "training"
    raise _nothing_fits(setting, refused)


def _pairs(
    setting: PlanInputs, trains: list[TrainSide], engines: list[RolloutSide], partners: int, all_of_them: bool
) -> list[Pair]:
    found: list[Pair] = []
    for side in trains:
        beside = [_with_limit(setting, other.memory, side.memory) for other in engines]
        fitting = [other for other in beside if not problem(setting, side.memory, other.memory)]
        best = sorted(fitting, key=lambda other: other.seconds)[:partners]
        pairs = [pair_of(setting, side, other) for other in best]
        found += pairs if all_of_them else [min(pairs, key=lambda pair: pair.seconds)]
    return sorted(found, key=lambda pair: pair.seconds)


def _fitting_rollouts(setting: PlanInputs, layouts: Iterable[EngineLayout]) -> Iterator[list[RolloutSide]]:
    """Those that fit, an engine on as few nodes as any of them, then on more: over nodes it waits for slow links."""

    def nodes(layout: EngineLayout) -> int:
        return -(-layout.ranks // setting.node)

    for _, equal in groupby(sorted(layouts, key=nodes), key=nodes):
        may_fit = [layout for layout in equal if setting.weight_bytes / layout.ranks <= setting.usable]
        sides = [rollout_side(setting, layout) for layout in may_fit]
        if fitting := [side for side in sides if not problem(setting, None, side.memory)]:
            yield fitting


def _fitting_trains(
    setting: PlanInputs,
    layouts: Iterable[Layout],
    counted: Callable[[Layout], TrainSide],
    rollouts: list[RolloutSide],
    count: int,
) -> list[TrainSide]:
    """The best `count` that fit, also beside the lightest rollout weights; memory is counted until they are found."""
    lightest = min(rollouts, key=lambda side: max(side.memory.weights))
    fitting: list[TrainSide] = []
    for layout in sorted(layouts, key=lambda layout: train_seconds(setting, layout)):
        if len(fitting) < count and _may_fit(setting, layout):
            side = counted(layout)
            if not problem(setting, side.memory, lightest.memory):
                fitting.append(side)
    return fitting


def _nothing_fits(setting: PlanInputs, phase: str) -> UserError:
    return UserError(
        f"no layout of {phase} fits {setting.memory - setting.reserve:g} GiB on {setting.ranks} ranks: "
        "give more --ranks or --memory, a smaller --micro-batch or --sequence, or leave --train and --rollout out"
    )


def _may_fit(setting: PlanInputs, layout: Layout) -> bool:
    """Whether weights, gradients and optimizer fit at all, by a bound from below, before anything is counted."""
    dense = (setting.elements - setting.expert_elements) / layout.tp
    experts = setting.expert_elements / (layout.ep * layout.etp)
    others = 0 if any(role.offload for role in setting.beside) else sum(at_rest(setting, None).values())
    states = OPTIMIZER_BYTES * setting.elements / layout.ranks
    return (WEIGHT_BYTES + GRADIENT_BYTES) * (dense + experts) / layout.pp + states + others <= setting.usable
