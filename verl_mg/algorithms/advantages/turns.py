"""Advantages of the single turns of a sample that calls tools or acts in an environment: MT-GRPO, GiGPO.

A turn is a run of tokens that the policy wrote; results of tools and observations separate turns. Tables (n, T) have
a line for each sample, all rows of a trajectory one after another, as `Batch.pad` puts them; columns (m,) have an entry
for each turn, line after line. All samples of a group must be here. Two samples of three turns (. is not written):

    tokens   . a a . b     number  -1  0  0 -1  1     line   0 0 1
             . c c c .             -1  2  2  2 -1     place  0 1 0
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_mg.algorithms.advantages.group import group_relative
from verl_mg.algorithms.advantages.tokens import discounted_returns
from verl_mg.errors import UserError
from verl_mg.lazy_import import lazy_import

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_import("torch")


@dataclass(frozen=True)
class Turns:
    """Turns of some samples, see the drawing above."""

    number: Tensor  # (n, T) int64: the turn of each token that the policy wrote, from 0 to m - 1; -1 for other tokens
    line: Tensor  # (m,) int64: the line of each turn
    place: Tensor  # (m,) int64: number of each turn in its line, from 0

    @classmethod
    def of(cls, mask: Tensor) -> Turns:
        """Returns the turns of a (n, T) bool mask of the tokens that the policy wrote."""
        starts = mask & ~torch.nn.functional.pad(mask, (1, 0))[:, :-1]
        number = starts.flatten().cumsum(0).view(mask.shape) - 1
        counts = starts.sum(1)
        line = torch.repeat_interleave(torch.arange(len(mask), device=mask.device), counts)
        first = (counts.cumsum(0) - counts)[line]
        place = torch.arange(len(line), device=mask.device) - first
        return cls(torch.where(mask, number, -1), line, place)

    def to_tokens(self, values: Tensor) -> Tensor:
        """Returns a column (m,) as a table (n, T), 0 on tokens of no turn."""
        padded = torch.nn.functional.pad(values, (1, 0))  # entry 0 is for the tokens of no turn
        return padded[self.number + 1]


def mt_grpo(
    scores: Tensor,
    turn_rewards: Tensor,
    turns: Turns,
    groups: Tensor,
    turn_weight: float,
    normalize_by_std: bool = True,
) -> Tensor:
    """Returns (n, T) the advantage of the outcome plus the advantage of each turn: MT-GRPO, arXiv:2505.11821.

    A_i + turn_weight A_{i,k} for the tokens of turn k, 0 on other tokens: A_i is GRPO's advantage of the score,
    A_{i,k} GRPO's advantage of the turn's reward among the k-th turns of the prompt that have one. A turn without a
    reward, in the paper the answer after the last observation, has only A_i. The paper's two turns are K = 1.

    Args:
        scores: (n,) float, of the outcomes.
        turn_rewards: (n, K) float, of the first K turns; NaN where a turn has no reward. UserError if K = 0.
        turns: the turns of the samples.
        groups: (n,) int64, equal for samples of one prompt.
        turn_weight: 1 in the paper; `turn_advantage_coef` in its code.
        normalize_by_std: as in `group_relative`.
    """
    if not turn_rewards.shape[1]:
        raise UserError("reward: it has no part turn_1. Return Reward(value, {'turn_1': number}), a part for each turn")
    advantages = group_relative(scores, groups, _each(groups), normalize_by_std)[turns.line]
    rewards = _of_turns(turn_rewards.to(scores.dtype), turns)
    for place in range(turn_rewards.shape[1]):
        chosen = ((turns.place == place) & ~rewards.isnan()).nonzero()[:, 0]
        peers = groups[turns.line[chosen]]
        advantages[chosen] += turn_weight * group_relative(rewards[chosen], peers, _each(chosen), normalize_by_std)
    return turns.to_tokens(advantages)


def gigpo(
    scores: Tensor,
    turn_rewards: Tensor,
    turns: Turns,
    groups: Tensor,
    states: Tensor,
    gamma: float,
    step_weight: float,
    normalize_by_std: bool = True,
) -> Tensor:
    """Returns (n, T) advantages of episodes plus advantages of steps from the same state: GiGPO, arXiv:2505.10978.

    A step is a turn; its reward r_k is that of the turn, and the last one has the score too. The tokens of a turn
    have A_E + step_weight A_S (equation 8), other tokens 0: A_E is GRPO's advantage of the sum of all rewards of the
    sample (equation 3), A_S that of the return sum_l gamma^l r_{k+l} (equation 5) among all steps of the prompt with
    the same state (equations 6 and 7).

    Args:
        scores: (n,) float, of the outcomes.
        turn_rewards: (n, K) float, of the first K turns; NaN counts as 0.
        turns: the turns of the samples.
        groups: (n,) int64, equal for samples of one prompt.
        states: (m,) int64, equal for turns of one prompt that begin in the same state, and for no others.
        gamma: discount from one turn to the next, from 0 to 1; 0.95 in the paper.
        step_weight: factor of A_S; 1 in the paper.
        normalize_by_std: divides by the standard deviation of the group of samples or steps; the paper has both.
    """
    rewards = _of_turns(turn_rewards.to(scores.dtype), turns).nan_to_num(0.0)
    count = int(turns.place.max()) + 1 if len(turns.place) else 0
    table, mask = scores.new_zeros(len(scores), count), torch.zeros(len(scores), count, dtype=torch.bool)
    table[turns.line, turns.place], mask[turns.line, turns.place] = rewards, True
    lengths = mask.sum(1)
    written = lengths > 0
    table[written, lengths[written] - 1] += scores[written]
    totals = torch.where(written, table.sum(1), scores)
    episode = group_relative(totals, groups, _each(groups), normalize_by_std)
    returns = discounted_returns(table, mask, gamma)[turns.line, turns.place]
    step = group_relative(returns, states, _each(states), normalize_by_std)
    return turns.to_tokens(episode[turns.line] + step_weight * step)


def _of_turns(turn_rewards: Tensor, turns: Turns) -> Tensor:
    """Returns (m,) the reward of each turn, NaN where it has none."""
    width = turn_rewards.shape[1]
    with_none = torch.nn.functional.pad(turn_rewards, (0, 1), value=float("nan"))
    return with_none[turns.line, turns.place.clamp(max=width)]


def _each(column: Tensor) -> Tensor:
    # Ids by which each entry is a separate sample.
    return torch.arange(len(column), device=column.device)
