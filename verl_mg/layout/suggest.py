"""Layouts that are valid on a number of ranks, and the nearest ones to a layout that is not."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import TypeVar

from verl_mg.errors import UserError
from verl_mg.layout.engine_layout import EngineLayout
from verl_mg.layout.layout import Layout, divisors

NEAREST = 3
KEYS = {Layout: ("tp", "pp", "vpp", "cp", "ep", "etp"), EngineLayout: ("tp", "pp", "ep", "adp")}
AnyLayout = TypeVar("AnyLayout", Layout, EngineLayout)


def resolve_layout(layout: Layout, ranks: int, experts: int, check: Callable[[Layout], object]) -> Layout:
    """Returns a layout that `check` admits on exactly `ranks` ranks, by dp; the UserError names the nearest ones."""
    try:
        fitted = layout.fit(ranks)
        check(fitted)
    except UserError as error:
        suggestions = nearest(layout, layouts_on(ranks, experts, layout), check)
        raise UserError(f"{str(error).rstrip('.')}. {format_suggestions(suggestions, ranks)}") from None
    return fitted


def resolve_engine_layout(
    layout: EngineLayout, ranks: int, experts: int, check: Callable[[EngineLayout], object]
) -> EngineLayout:
    """Returns an engine layout after checking that a whole number of engines uses `ranks` ranks."""
    try:
        check(layout)
        if ranks % layout.ranks:
            raise UserError(f"rollout.layout={layout} requires a multiple of {layout.ranks} ranks, not {ranks}.")
    except UserError as error:
        suggestions = nearest(layout, engine_layouts_on(ranks, experts, layout), check)
        raise UserError(f"{str(error).rstrip('.')}. {format_suggestions(suggestions, ranks)}") from None
    return layout


def format_suggestions(layouts: Collection[Layout | EngineLayout], ranks: int) -> str:
    """Returns the sentence of an error that names layouts which are valid."""
    if not layouts:
        return f"No other layout is valid on {ranks} ranks."
    return f"Nearest valid layouts on {ranks} ranks: {', '.join(map(format_layout, layouts))}."


def format_layout(layout: Layout | EngineLayout) -> str:
    """Returns a layout as users write it: Megatron's without the dp, which follows from the ranks."""
    return str(replace(layout, dp=0)) if isinstance(layout, Layout) else str(layout)


def nearest(
    layout: AnyLayout, candidates: Iterable[AnyLayout], check: Callable[[AnyLayout], object], count: int = NEAREST
) -> list[AnyLayout]:
    """Returns the valid candidates that are nearest to a layout."""
    result: list[AnyLayout] = []
    # Only the nearest candidates are checked, because a check may compute the memory of a plan. Distances are rounded,
    # so that equal ones are equal despite the logarithms' errors, and the text decides.
    for candidate in sorted(candidates, key=lambda other: (round(distance(layout, other), 6), str(other))):
        if len(result) == count:
            break
        if is_valid(candidate, check):
            result.append(candidate)
    return result


def is_valid(layout: AnyLayout, check: Callable[[AnyLayout], object]) -> bool:
    """Returns whether a check accepts a layout."""
    try:
        return check(layout) is not False
    except UserError:
        return False


def distance(a: AnyLayout, b: AnyLayout) -> float:
    """Returns how often a size must be doubled or halved to get from one layout to the other, over all sizes but dp."""
    # An etp that follows tp does not count in addition to it.
    changes = {key: getattr(a, key) / getattr(b, key) for key in KEYS[type(a)]}
    if "etp" in changes:
        changes["etp"] /= changes["tp"]
    return sum(abs(math.log2(change)) for change in changes.values())


def layouts_on(ranks: int, experts: int, up_to: Layout | None = None) -> Iterator[Layout]:
    """Yields all layouts on exactly `ranks` ranks, with cp and vpp at most as in `up_to`, and etp 1, tp or as there."""
    extra_etp = [up_to.etp] if up_to and up_to.etp != up_to.tp else []
    cp_sizes = [size for size in divisors(ranks) if size <= (up_to.cp if up_to else 1)]
    for tp, pp, cp in product(divisors(ranks), divisors(ranks), cp_sizes):
        if ranks % (tp * pp * cp):
            continue
        stage = ranks // pp
        cuts = sorted({1, tp, *extra_etp}) if experts else [tp]
        interleavings = range(1, 1 + (up_to.vpp if up_to and pp > 1 else 1))
        for etp, vpp in product((size for size in cuts if stage % size == 0), interleavings):
            for ep in divisors(math.gcd(stage // etp, max(experts, 1))):
                yield Layout(tp, pp, vpp, cp, ep, etp, dp=stage // (tp * cp))


def engine_layouts_on(ranks: int, experts: int, like: EngineLayout | None = None) -> Iterator[EngineLayout]:
    """Yields all engine layouts of which a whole number of engines uses `ranks` ranks."""
    # Pipeline stages wait for each other in every decoding step, so pp is suggested only where it was requested.
    for tp in divisors(ranks):
        for pp in sorted({1} | ({like.pp} if like else set())):
            for ep in divisors(math.gcd(tp, max(experts, 1))) if ranks % (tp * pp) == 0 else ():
                for adp in sorted({1, tp} | ({like.adp} if like and tp % like.adp == 0 else set())):
                    yield EngineLayout(tp, pp, ep, adp)
