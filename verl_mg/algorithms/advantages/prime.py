"""PRIME: dense rewards of a language model that was trained on outcomes only (arXiv:2502.01456)."""

import torch
from torch import Tensor

from verl_mg.algorithms.advantages.gae import discounted_returns
from verl_mg.algorithms.advantages.group import rloo
from verl_mg.errors import UserError


def implicit_rewards(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, beta: float) -> Tensor:
    """Returns (...) beta (log pi_phi - log pi_ref) of each token, 0 outside the mask: arXiv:2502.01456, equation 3.

    Args:
        logprobs, ref_logprobs: (...) nats, of the process reward model and of the one that its training began with.
        mask: (...) bool.
        beta: above 0; 0.05 in the paper.
    """
    if not beta > 0:
        raise UserError(f"beta is {beta}. Write a number above 0, as in 0.05")
    return torch.where(mask, beta * (logprobs - ref_logprobs), 0.0).detach()


def prime_advantages(
    process_rewards: Tensor,
    scores: Tensor,
    mask: Tensor,
    groups: Tensor,
    gamma: float = 1.0,
    process_weight: float = 1.0,
    outcome_weight: float = 1.0,
) -> Tensor:
    """Returns (n, T) advantages from process and outcome rewards, 0 outside the mask: arXiv:2502.01456, equation 5.

    From a token's process reward the leave-one-out baseline is subtracted, the mean over the other responses of a
    response's mean process reward; the differences are summed over the tokens to come. The `rloo` advantage of the
    score is added.

    Args:
        process_rewards, mask: (n, T) float and bool; a row without masked tokens counts with mean process reward 0.
        scores, groups: (n,) float outcomes, and int64 equal for responses to one prompt, all of which are here; a
            group of one is its own baseline.
        gamma: discount of process rewards from one masked token to the next.
        process_weight, outcome_weight: factors of the two parts.
    """
    rewards = torch.where(mask, process_rewards, 0.0).double()
    means = rewards.sum(1) / mask.sum(1).clamp(min=1)
    samples = torch.arange(len(groups), device=groups.device)
    # The published code subtracts another baseline from single tokens, K / (K - 1) r_t minus the sum of all K means
    # over K - 1, which agrees with the equation only in the mean over a response; this is the equation.
    baseline = means - rloo(means, groups, samples)
    process = discounted_returns(rewards - baseline[:, None], mask, gamma)
    outcome = torch.where(mask, rloo(scores.double(), groups, samples)[:, None], 0.0)
    return (process_weight * process + outcome_weight * outcome).to(process_rewards.dtype)
