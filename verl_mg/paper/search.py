"""All admissible layouts of a job, those nearest to one that does not hold, and the best ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import groupby
from typing import TypeVar

from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout, EnginePlacement, Layout
from verl_mg.paper.cost import rollout_seconds, train_seconds
from verl_mg.paper.memory import GRADIENT_BYTES, RolloutMemory, TrainMemory, rollout_memory, train_memory
from verl_mg.paper.phases import at_rest, engine_limit, problem
from verl_mg.paper.roles import fitted
from verl_mg.paper.setting import WEIGHT_BYTES, Setting
from verl_mg.paper.sync import Sync, weight_sync

NEAREST = 3
PARTNERS = 4
"""So many rollout layouts are tried with each training layout, byte by byte."""
TRAIN_KEYS, ROLLOUT_KEYS = ("tp", "pp", "vpp", "cp", "ep", "etp"), ("tp", "pp", "ep", "adp")
AnyLayout = TypeVar("AnyLayout", Layout, EngineLayout)


@dataclass(frozen=True)
class TrainSide:
    """A layout of training with its memory and predicted seconds of an iteration."""

    layout: Layout
    memory: TrainMemory
    seconds: float


@dataclass(frozen=True)
class RolloutSide:
    """The same of a rollout engine."""

    layout: EngineLayout
    memory: RolloutMemory
    seconds: float


@dataclass(frozen=True)
class Pair:
    """Both sides of a job and the weight sync between them."""

    train: TrainSide
    rollout: RolloutSide
    sync: Sync

    @property
    def seconds(self) -> float:
        """The score of a search: predicted seconds of training, generation and weight sync of one iteration."""
        return self.train.seconds + self.rollout.seconds + self.sync.seconds


def check_train(setting: Setting, layout: Layout) -> Layout:
    """The layout on all ranks. UserError naming what it does not divide."""
    return fitted(setting, layout)


def check_rollout(setting: Setting, layout: EngineLayout) -> EngineLayout:
    """The layout itself. UserError naming what it does not divide, or what SGLang cannot do."""
    setting.weights.check_engine(layout)
    EnginePlacement(layout, setting.engine_ranks)
    return layout


def train_side(setting: Setting, layout: Layout) -> TrainSide:
    """Everything about a checked layout that does not need the rollout's."""
    return TrainSide(layout, train_memory(setting, layout), train_seconds(setting, layout))


def rollout_side(setting: Setting, layout: EngineLayout, train: TrainMemory | None = None) -> RolloutSide:
    """Everything about a checked layout; without training, as if no actor stood beside it."""
    return _with_limit(setting, rollout_memory(setting, layout), train)


def _with_limit(setting: Setting, memory: RolloutMemory, train: TrainMemory | None) -> RolloutSide:
    limited = replace(memory, limit=engine_limit(setting, train))
    return RolloutSide(memory.layout, limited, rollout_seconds(setting, memory.layout, limited))


def train_layouts(setting: Setting, like: Layout | None = None) -> Iterator[Layout]:
    """All admissible ones: tp within a node, etp 1 or tp, cp and vpp 1 or those of `like`."""
    c = setting.weights.config
    contexts, interleavings = ({1, like.cp}, {1, like.vpp}) if like else ({1}, {1})
    for tp in _divisors(math.gcd(setting.node, setting.training_ranks)):
        for pp in _divisors(setting.training_ranks // tp):
            for ep in _divisors(c.experts.count if c.experts else 1):
                for etp in sorted({1, tp} if c.experts else {tp}):
                    for cp in sorted(contexts):
                        for vpp in sorted(interleavings if pp > 1 else {1}):
                            if layout := _admissible(check_train, setting, Layout(tp, pp, vpp, cp, ep, etp)):
                                yield layout


def rollout_layouts(setting: Setting, like: EngineLayout | None = None) -> Iterator[EngineLayout]:
    """All admissible ones: tp within a node or over whole nodes, adp 1 or tp, pp 1 or that of `like`.

    Pipeline stages wait for each other while one token is decoded, so a search leaves them out.
    """
    c = setting.weights.config
    for tp in _divisors(len(setting.engine_ranks)):
        if setting.node % tp and tp % setting.node:
            continue
        for ep in _divisors(math.gcd(tp, c.experts.count) if c.experts else 1):
            for adp in sorted({1, tp} | ({like.adp} if like and tp % like.adp == 0 else set())):
                for pp in sorted({1, like.pp} if like else {1}):
                    if layout := _admissible(check_rollout, setting, EngineLayout(tp, pp, ep, adp)):
                        yield layout


def nearest_train(setting: Setting, layout: Layout, beside: RolloutMemory | None = None) -> list[str]:
    """The admissible layouts that are nearest to this one and fit into memory, beside rollout weights where given."""
    candidates = _by_distance(layout, train_layouts(setting, layout), TRAIN_KEYS)
    return _first(
        candidates,
        lambda near: _may_fit(setting, near) and not problem(setting, train_memory(setting, near), beside),
    )


def nearest_rollout(setting: Setting, layout: EngineLayout) -> list[str]:
    """The same for a rollout layout."""
    candidates = _by_distance(layout, rollout_layouts(setting, layout), ROLLOUT_KEYS)
    return _first(candidates, lambda near: problem(setting, None, rollout_memory(setting, near)) is None)


def written(layout: Layout | EngineLayout) -> str:
    """A layout as one writes it: Megatron's without the dp that the ranks decide."""
    return str(replace(layout, dp=0)) if isinstance(layout, Layout) else str(layout)


def search(setting: Setting, train: Layout | None, rollout: EngineLayout | None, top: int) -> list[Pair]:
    """The best pairs of layouts that fit into memory, best first; a side that is given stays as it is.

    Each side is ranked by its own predicted seconds (`cost`), engines on as few nodes as hold the model and leave room
    for training. Bytes are planned for the best training layouts alone, each with some of the best rollout layouts, of
    which one is shown; all are where the training layout is given. UserError where nothing fits.
    """
    rollouts = [check_rollout(setting, rollout)] if rollout else rollout_layouts(setting)
    trains = [check_train(setting, train)] if train else list(train_layouts(setting))
    counted = cache(partial(train_side, setting))
    refused = "generation"
    for engines in _fitting_rollouts(setting, rollouts):
        if sides := _fitting_trains(setting, trains, counted, engines, top):
            return _pairs(setting, sides, engines, top if train else PARTNERS, all_of_them=train is not None)
        refused = "training"
    raise _nothing_fits(setting, refused)


def _pairs(
    setting: Setting, trains: list[TrainSide], engines: list[RolloutSide], partners: int, all_of_them: bool
) -> list[Pair]:
    found: list[Pair] = []
    for side in trains:
        beside = [_with_limit(setting, other.memory, side.memory) for other in engines]
        fitting = [other for other in beside if not problem(setting, side.memory, other.memory)]
        best = sorted(fitting, key=lambda other: other.seconds)[:partners]
        pairs = [Pair(side, other, weight_sync(setting, side.layout, other.layout)) for other in best]
        found += pairs if all_of_them else [min(pairs, key=lambda pair: pair.seconds)]
    return sorted(found, key=lambda pair: pair.seconds)


def _fitting_rollouts(setting: Setting, layouts: Iterable[EngineLayout]) -> Iterator[list[RolloutSide]]:
    """Those that fit, an engine on as few nodes as any of them, then on more: over nodes it waits for slow links."""

    def nodes(layout: EngineLayout) -> int:
        return -(-layout.ranks // setting.node)

    for _, equal in groupby(sorted(layouts, key=nodes), key=nodes):
        may_fit = [layout for layout in equal if setting.weight_bytes / layout.ranks <= setting.usable]
        sides = [rollout_side(setting, layout) for layout in may_fit]
        if fitting := [side for side in sides if not problem(setting, None, side.memory)]:
            yield fitting


def _fitting_trains(
    setting: Setting,
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


def _nothing_fits(setting: Setting, phase: str) -> UserError:
    return UserError(
        f"no layout of {phase} fits {setting.memory - setting.reserve:g} GiB on {setting.ranks} ranks: "
        "give more --ranks or --memory, a smaller --micro-batch or --sequence, or leave --train and --rollout out"
    )


def _may_fit(setting: Setting, layout: Layout) -> bool:
    """Whether weights and gradients fit at all, by a bound from below, before anything is counted."""
    dense = (setting.elements - setting.expert_elements) / layout.tp
    experts = setting.expert_elements / (layout.ep * layout.etp)
    others = sum(at_rest(setting, None).values())
    return (WEIGHT_BYTES + GRADIENT_BYTES) * (dense + experts) / layout.pp + others <= setting.usable


def _admissible(
    check: Callable[[Setting, AnyLayout], AnyLayout], setting: Setting, layout: AnyLayout
) -> AnyLayout | None:
    try:
        return check(setting, layout)
    except UserError:
        return None


def _by_distance(layout: AnyLayout, candidates: Iterator[AnyLayout], keys: tuple[str, ...]) -> list[AnyLayout]:
    """Nearest first: the sum over all sizes of how often one must be doubled or halved."""

    def distance(candidate: AnyLayout) -> float:
        return sum(abs(math.log2(getattr(candidate, key) / getattr(layout, key))) for key in keys)

    return sorted(candidates, key=distance)


def _first(candidates: list[AnyLayout], holds: Callable[[AnyLayout], bool]) -> list[str]:
    found: list[str] = []
    for candidate in candidates:
        if len(found) == NEAREST:
            break
        if holds(candidate):
            found.append(written(candidate))
    return found


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
