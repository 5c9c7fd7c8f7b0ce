"""Which layouts stand on so many ranks, and those nearest to one that does not work."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import TypeVar

from verl_mg.errors import UserError
from verl_mg.layout.engine_layout import EngineLayout
from verl_mg.layout.layout import Layout

NEAREST = 3
KEYS = {Layout: ("tp", "pp", "vpp", "cp", "ep", "etp"), EngineLayout: ("tp", "pp", "ep", "adp")}
AnyLayout = TypeVar("AnyLayout", Layout, EngineLayout)


def resolve_layout(layout: Layout, ranks: int, experts: int, check: Callable[[Layout], object]) -> Layout:
    """The layout with dp filled in so that it stands on exactly `ranks` ranks.

    experts: of the model, 0 without. check: raises UserError for a layout on these ranks that the model refuses.
    UserError, in one line, for what does not divide and the nearest layouts that work.
    """
    try:
        fitted = layout.fit(ranks)
        check(fitted)
    except UserError as error:
        found = nearest(layout, layouts_on(ranks, experts, layout), check)
        raise UserError(f"{error}; {format_suggestions(found, ranks)}") from None
    return fitted


def resolve_engine_layout(
    layout: EngineLayout, ranks: int, experts: int, check: Callable[[EngineLayout], object]
) -> EngineLayout:
    """The same for engines, of which a whole number stands on `ranks` ranks."""
    try:
        check(layout)
        if ranks % layout.ranks:
            raise UserError(f"rollout layout {layout} stands on a multiple of {layout.ranks} ranks, not on {ranks}")
    except UserError as error:
        found = nearest(layout, engine_layouts_on(ranks, experts, layout), check)
        raise UserError(f"{error}; {format_suggestions(found, ranks)}") from None
    return layout


def format_suggestions(found: Collection[Layout | EngineLayout], ranks: int) -> str:
    """What an error ends with."""
    if not found:
        return f"no other layout works on {ranks} ranks"
    return f"nearest that work on {ranks} ranks: {', '.join(map(format_layout, found))}"


def format_layout(layout: Layout | EngineLayout) -> str:
    """A layout as one writes it: Megatron's without the dp that the ranks decide."""
    return str(replace(layout, dp=0)) if isinstance(layout, Layout) else str(layout)


def nearest(
    layout: AnyLayout, candidates: Iterable[AnyLayout], check: Callable[[AnyLayout], object], count: int = NEAREST
) -> list[AnyLayout]:
    """The first `count` candidates, nearest first, that `check` does not refuse with a UserError or with False."""
    found: list[AnyLayout] = []
    for candidate in sorted(candidates, key=lambda other: (round(distance(layout, other), 6), str(other))):
        if len(found) == count:
            break
        if is_valid(candidate, check):
            found.append(candidate)
    return found


def is_valid(layout: AnyLayout, check: Callable[[AnyLayout], object]) -> bool:
    """Whether `check` refuses the layout neither with a UserError nor with False."""
    try:
        return check(layout) is not False
    except UserError:
        return False


def distance(a: AnyLayout, b: AnyLayout) -> float:
    """How often a size must be doubled or halved to come from one to the other, over all sizes but dp.

    An etp that follows tp does not count beside it.
    """
    changes = {key: getattr(a, key) / getattr(b, key) for key in KEYS[type(a)]}
    if "etp" in changes:
        changes["etp"] /= changes["tp"]
    return sum(abs(math.log2(change)) for change in changes.values())


def layouts_on(ranks: int, experts: int, up_to: Layout | None = None) -> Iterator[Layout]:
    """All layouts on exactly so many ranks: etp is 1 or tp, cp and vpp are 1, or go up to those of `up_to`.

    Without experts, ep is 1 and etp is tp. `up_to` adds its own etp.
    """
    own = [up_to.etp] if up_to and up_to.etp != up_to.tp else []
    cp_sizes = [size for size in _divisors(ranks) if size <= (up_to.cp if up_to else 1)]
    for tp, pp, cp in product(_divisors(ranks), _divisors(ranks), cp_sizes):
        if ranks % (tp * pp * cp):
            continue
        stage = ranks // pp
        cuts = sorted({1, tp, *own}) if experts else [tp]
        interleavings = range(1, 1 + (up_to.vpp if up_to and pp > 1 else 1))
        for etp, vpp in product((size for size in cuts if stage % size == 0), interleavings):
            for ep in _divisors(math.gcd(stage // etp, max(experts, 1))):
                yield Layout(tp, pp, vpp, cp, ep, etp, dp=stage // (tp * cp))


def engine_layouts_on(ranks: int, experts: int, like: EngineLayout | None = None) -> Iterator[EngineLayout]:
    """All engine layouts of which a whole number stands on so many ranks: adp is 1 or tp, pp is 1, or those of `like`.

    Pipeline stages wait for each other while one token is decoded, so only who has them is offered them.
    """
    for tp in _divisors(ranks):
        for pp in sorted({1} | ({like.pp} if like else set())):
            for ep in _divisors(math.gcd(tp, max(experts, 1))) if ranks % (tp * pp) == 0 else ():
                for adp in sorted({1, tp} | ({like.adp} if like and tp % like.adp == 0 else set())):
                    yield EngineLayout(tp, pp, ep, adp)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
