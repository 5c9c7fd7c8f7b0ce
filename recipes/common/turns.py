"""Rewards and states of the single turns of a sample, from the columns of a batch; a line of a table is a trajectory.

A reward function, or an agent, gives the k-th turn a reward by the part `turn_k`, from `turn_1` on. The value of the
reward is the outcome.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from verl_mg.algorithms.advantages import Turns
from verl_mg.batch import Batch
from verl_mg.lazy_import import lazy_import

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_import("torch")

PART = re.compile(r"reward\.turn_([1-9]\d*)")


def turn_rewards(batch: Batch) -> Tensor:
    """Returns (t, K) float, the parts `turn_1` to `turn_K` of each trajectory's reward; NaN where it has no such part.

    Args:
        batch: columns of the reward; K is the highest number among them, 0 without any.
    """
    numbers = [int(part[1]) for name in batch.names() if (part := PART.fullmatch(name))]
    table = torch.full((len(batch.first_rows), max(numbers, default=0)), float("nan"))
    for number in numbers:
        table[:, number - 1] = batch[f"reward.turn_{number}"][batch.first_rows]
    return table


def anchor_states(batch: Batch, turns: Turns) -> Tensor:
    """Returns (m,) int64, equal for turns of one group in front of which the same tokens are.

    These are the tokens since the turn before: the prompt for the first turn, then what tools or the environment
    answered. They identify the state in which the turn begins.

    Args:
        batch, turns: columns `tokens`, `group` and `loss_mask`, and the turns of the mask.
    """
    tokens, _ = batch.pad("tokens")
    written = torch.nn.functional.pad(turns.number >= 0, (1, 1))
    starts = (written[:, 1:-1] & ~written[:, :-2]).nonzero()[:, 1]
    ends = (written[:, 1:-1] & ~written[:, 2:]).nonzero()[:, 1] + 1
    since = torch.where(turns.place == 0, 0, ends.roll(1))
    groups = batch["group"][batch.first_rows][turns.line].tolist()
    known: dict[tuple[int, tuple[int, ...]], int] = {}
    states = []
    for group, line, start, stop in zip(groups, turns.line.tolist(), since.tolist(), starts.tolist(), strict=True):
        state = group, tuple(tokens[line, start:stop].tolist())
        states.append(known.setdefault(state, len(known)))
    return torch.tensor(states, dtype=torch.int64)
