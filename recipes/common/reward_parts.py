"""The parts of a reward as several rewards with weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from verl_mg.batch import Batch
from verl_mg.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

PREFIX = "reward."


def weighted_parts(batch: Batch, weights: Mapping[str, float]) -> tuple[list[Tensor], list[float]]:
    """Returns (n,) parts of the reward, NaN where a row has no such part, and the weight of each.

    Args:
        batch: columns `reward.PART`, the same on all ranks.
        weights: weight of each part by name, UserError for an unknown one; empty: all parts, each with the weight 1.
    """
    parts = [name.removeprefix(PREFIX) for name in batch.names() if name.startswith(PREFIX)]
    if not parts:
        raise UserError(
            "algorithm.rewards: the reward has no parts. "
            "Return Reward(value, {'NAME': number, ...}), or write several functions into reward.mixture"
        )
    for name in weights:
        if name not in parts:
            raise UserError(f"algorithm.rewards.{name}: the reward has no such part. Write one of {', '.join(parts)}")
    chosen = dict(weights) or dict.fromkeys(parts, 1.0)
    return [batch[f"{PREFIX}{name}"] for name in chosen], list(chosen.values())
