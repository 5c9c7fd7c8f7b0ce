"""Parts of engines on the nodes of a job: which rank starts which part."""

from __future__ import annotations

from dataclasses import dataclass

from verl_mg.engines.engine_nodes import EngineNodes
from verl_mg.layout import EnginePlacement


@dataclass(frozen=True)
class EnginePart:
    """A part of an engine, all of it or that on one node, and the rank that starts it."""

    number: int
    nodes: EngineNodes
    """Nodes of the engine, and this one among them."""


def engine_part(placement: EnginePlacement, rank: int, node: int) -> EnginePart | None:
    """Returns the part of an engine that a rank starts, if any: the first rank of an engine on each node."""
    # Engines of 4 ranks on 8 ranks, 2 ranks a node: ranks 0 and 2 start the two parts of engine 0, ranks 4 and 6 the
    # parts of engine 1.
    for number, ranks in placement.members().items():
        # Reversed, so that of the ranks of a node the first one remains in the dict.
        firsts = list({member // node: member for member in reversed(ranks)}.values())[::-1]
        if rank in firsts:
            return EnginePart(number, EngineNodes(len(firsts), firsts.index(rank)))
    return None
