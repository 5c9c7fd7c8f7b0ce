"""Target parameters that can use the memory of a source parameter, because their shards coincide."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from verl_mg.reshard.plan import Copy, Plan
from verl_mg.sharding.boxes import Shard, full_box


@dataclass(frozen=True)
class Alias:
    """A target parameter that consists of consecutive rows of a source parameter."""

    source: str  # the source parameter
    rows: tuple[int, int]  # its first row, and the row after the last one


def aliases(plan: Plan, rank: int) -> dict[str, Alias]:
    """Finds the target parameters of a rank that are rows of a source parameter: same elements, same order."""
    # Such targets need no memory, and nothing is copied into them.
    moves = plan.rank_plan(rank)
    received = {move.parameter for move in moves.receives}
    copied: dict[str, list[Copy]] = defaultdict(list)
    for copy in moves.copies:
        copied[copy.target].append(copy)
    sources, targets = plan.source.shards(rank), plan.target.shards(rank)
    candidates = {
        name: _alias(targets[name], copies, sources.get(copies[0].source))
        for name, copies in copied.items()
        if name not in received
    }
    return {name: alias for name, alias in candidates.items() if alias}


def aliased_parameters(alias_of: Mapping[str, Alias], source: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the target parameters as views of the source's tensors; `execute` leaves such targets unchanged."""
    return {name: source[alias.source].detach()[slice(*alias.rows)] for name, alias in alias_of.items()}


def _alias(target: Shard, copies: list[Copy], source: Shard | None) -> Alias | None:
    first = copies[0]
    if source is None or len(source.shape) != len(target.shape) or source.shape[1:] != target.shape[1:]:
        return None
    # All copies must shift rows by the same distance: then they are one run, in the order of the source.
    offset = first.source_box[0][0] - first.target_box[0][0]
    for copy in copies:
        rows = tuple(edge + offset for edge in copy.target_box[0])
        whole_rows = copy.target_box[1:] == copy.source_box[1:] == full_box(target.shape[1:])
        if copy.from_target or copy.source != first.source or copy.source_box[0] != rows or not whole_rows:
            return None
    if offset < 0 or offset + target.shape[0] > source.shape[0]:
        return None
    return Alias(first.source, (offset, offset + target.shape[0]))
