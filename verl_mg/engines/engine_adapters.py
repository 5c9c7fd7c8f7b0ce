"""LoRA adapters that an engine computes with in addition to the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Linear layers that engines fuse: SGLang loads adapters of a part of them only together with the others.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(frozen=True)
class AdapterSettings:
    """Adapters that an engine receives."""

    rank: int  # rank of A and B
    targets: tuple[str, ...]  # names of the linear layers that have them


def fused_targets(targets: Sequence[str]) -> tuple[str, ...]:
    """Returns the targets, followed by all layers that engines fuse with one of them.

    ("o_proj", "q_proj") gives ("o_proj", "q_proj", "k_proj", "v_proj").
    """
    added = [name for group in FUSED if set(group) & set(targets) for name in group]
    return tuple(dict.fromkeys([*targets, *added]))
