"""Parts of engines on the nodes of a job: which rank starts which part."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from verl_mg.errors import UserError
from verl_mg.layout import EnginePlacement
from verl_mg.roles.weight_sync import engine_ranks
from verl_mg.rollout.engine_nodes import EngineNodes


@dataclass(frozen=True)
class EnginePart:
    """A part of an engine, all of it or that on one node, and the rank that starts it."""

    number: int
    """Number of the engine in the job."""
    nodes: EngineNodes
    """Nodes of the engine, and this one among them."""


def engine_part(placement: EnginePlacement, rank: int, node: int) -> EnginePart | None:
    """Returns the part of an engine that a rank starts, if any: the first rank of an engine on each node.

    Args:
        placement: ranks and layout of the engines.
        rank: the rank.
        node: ranks of a node.
    """
    for number, ranks in engine_ranks(placement).items():
        firsts = list({member // node: member for member in reversed(ranks)}.values())[::-1]
        if rank in firsts:
            return EnginePart(number, EngineNodes(len(firsts), firsts.index(rank)))
    return None


def check_nodes(placement: EnginePlacement, node: int, engine: str) -> None:
    """Checks that an engine over several nodes has as many ranks on each of them.

    Args:
        placement: ranks and layout of the engines.
        node: ranks of a node.
        engine: kind of engine.

    Raises:
        UserError: it has not, or this kind of engine stays on one node.
    """
    key = f"rollout.layout={placement.layout}"
    for ranks in engine_ranks(placement).values():
        counts = Counter(rank // node for rank in ranks)
        if len(counts) > 1 and engine != "sglang":
            raise UserError(
                f"{key}: an engine of {engine} cannot span nodes, which have {node} ranks. Write a smaller layout, or "
                "rollout.engine=sglang."
            )
        sizes = sorted((len(counts), placement.layout.pp))
        if len(set(counts.values())) > 1 or (len(counts) > 1 and sizes[1] % sizes[0]):
            raise UserError(
                f"{key}: an engine over {len(counts)} nodes of {node} ranks needs as many ranks on each of them, and "
                "pipeline stages of whole nodes or within them. Write other sizes, or another rollout.num_ranks."
            )
