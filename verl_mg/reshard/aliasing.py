"""Where source and target shards coincide, the target can be the source's own memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from verl_mg.reshard.plan import Copy, Plan
from verl_mg.sharding.boxes import Shard, full_box


@dataclass(frozen=True)
class Alias:
    """A target parameter that is `rows` of a source parameter, from the first to before the last."""

    source: str
    rows: tuple[int, int]


def aliases(plan: Plan, rank: int) -> dict[str, Alias]:
    """{target parameter: rows of a source parameter of the same rank that hold just its elements, in its order}."""
    part = plan.of(rank)
    received = {move.parameter for move in part.receives}
    copied: dict[str, list[Copy]] = defaultdict(list)
    for copy in part.copies:
        copied[copy.target].append(copy)
    sources, targets = plan.source.shards(rank), plan.target.shards(rank)
    found = {
        name: _alias(targets[name], copies, sources.get(copies[0].source))
        for name, copies in copied.items()
        if name not in received
    }
    return {name: alias for name, alias in found.items() if alias}


def aliased_parameters(found: Mapping[str, Alias], source: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The target parameters as views of the source's tensors; `execute` leaves such targets as they are."""
    return {name: source[alias.source].detach()[slice(*alias.rows)] for name, alias in found.items()}


def _alias(target: Shard, copies: list[Copy], source: Shard | None) -> Alias | None:
    first = copies[0]
    if source is None or len(source.shape) != len(target.shape) or source.shape[1:] != target.shape[1:]:
        return None
    offset = first.source_at[0][0] - first.target_at[0][0]
    for copy in copies:
        rows = tuple(edge + offset for edge in copy.target_at[0])
        whole_rows = copy.target_at[1:] == copy.source_at[1:] == full_box(target.shape[1:])
        if copy.of_target or copy.source != first.source or copy.source_at[0] != rows or not whole_rows:
            return None
    if offset < 0 or offset + target.shape[0] > source.shape[0]:
        return None
    return Alias(first.source, (offset, offset + target.shape[0]))
