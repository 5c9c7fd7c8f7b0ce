"""Advantages and returns of tokens from rewards of tokens, over the tokens that the policy wrote."""

import torch
from torch import Tensor

from verl_mg.errors import UserError


def token_rewards(scores: Tensor, mask: Tensor) -> Tensor:
    """Returns (n, T) rewards of tokens: the score on the last masked token of each row, 0 elsewhere.

    Args:
        scores: (n,) float.
        mask: (n, T) bool, true on tokens that the policy wrote; the score of a row without any is ignored.
    """
    # The last masked token, not the last one: a response may end in an observation, which is not trained.
    after = mask.flip(1).cumsum(1).flip(1)  # masked tokens from here on
    return torch.where(mask & (after == 1), scores[:, None], 0.0)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float | Tensor) -> tuple[Tensor, Tensor]:
    """Returns (n, T) generalized advantage estimates (arXiv:1506.02438, equation 16) and returns; 0 outside the mask.

    A_t = r_t + gamma V_{t+1} - V_t + gamma lam A_{t+1}, and the return is A_t + V_t, where t runs over masked tokens
    only and value and advantage after the last are 0. Not whitened. Decoupled GAE (VC-PPO, arXiv:2503.01491; VAPO,
    arXiv:2504.05118) is two calls: returns with lam 1 for the critic, advantages with another lam for the policy.
    With rewards [0, 0, 1], values 0, gamma 1, lam 0.5: advantages [0.25, 0.5, 1].

    Args:
        rewards, values: (n, T) float; a value is the critic's prediction before its token.
        mask: (n, T) bool, true on tokens that the policy wrote.
        gamma, lam: discount, and decay of the advantage, between masked tokens, from 0 to 1; `lam` also (n,).
    """
    _check_fraction("gamma", gamma)
    if not isinstance(lam, Tensor):
        _check_fraction("lam", lam)
    # The loop runs over the longest answer instead of the longest trajectory, which is mostly context.
    counts = mask.sum(1)
    steps = torch.arange(int(counts.max()) if len(counts) else 0, device=mask.device) < counts[:, None]
    reward, value = (_compact(column, mask, steps) for column in (rewards, values))
    advantages = torch.zeros_like(value)
    advantage = next_value = value.new_zeros(len(value))
    for t in range(steps.shape[1] - 1, -1, -1):
        here = steps[:, t]
        estimate = reward[:, t] + gamma * next_value - value[:, t] + gamma * lam * advantage
        advantage = torch.where(here, estimate, advantage)
        next_value = torch.where(here, value[:, t], next_value)
        advantages[:, t] = torch.where(here, estimate, 0.0)
    result = torch.zeros(2, *mask.shape, dtype=values.dtype, device=values.device)
    result[:, mask] = torch.stack([advantages[steps], (advantages + value)[steps]]).to(values.dtype)
    return result[0], result[1]


def length_adaptive_lambda(lengths: Tensor, alpha: float) -> Tensor:
    """Returns (n,) float64 1 - 1 / (alpha l), at least 0: lam of the policy's advantages in VAPO, arXiv:2504.05118.

    The weights lam^k of a long response's TD errors then add up to about alpha l.

    Args:
        lengths: (n,) l, tokens that the policy wrote.
        alpha: above 0; 0.05 in the paper.
    """
    if not alpha > 0:
        raise UserError(f"alpha is {alpha}. Write a number above 0, as in 0.05")
    return (1 - 1 / (alpha * lengths.double())).clamp(min=0)


def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Returns (n, T) rewards to come, G_t = r_t + gamma G_{t+1} with t over masked tokens only; 0 outside the mask.

    Args:
        rewards, mask, gamma: as in `gae`.
    """
    return gae(rewards, torch.zeros_like(rewards), mask, gamma, 1.0)[1]


def reinforce_plus_plus(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Returns (n, T) advantages of REINFORCE++ (arXiv:2501.03262) before `whiten`, which takes the whole batch.

    Args:
        rewards, mask, gamma: as in `gae`; the rewards contain the KL penalty already (`kl.in_reward`).
    """
    return discounted_returns(rewards, mask, gamma)


def _compact(column: Tensor, mask: Tensor, steps: Tensor) -> Tensor:
    """Returns the masked entries of a column as the first ones of each row, where `steps` is true, in float64."""
    # float64: the recursion adds up the rounding of as many steps as a response has tokens.
    compact = torch.zeros(steps.shape, dtype=torch.float64, device=column.device)
    compact[steps] = column[mask].detach().double()
    return compact


def _check_fraction(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise UserError(f"{name} is {value}. Write a number from 0 to 1")
