"""Advantages and returns of tokens from their rewards or log-probs, over the tokens that the policy wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_mg.algorithms.advantages.group import rloo
from verl_mg.errors import UserError
from verl_mg.lazy_import import lazy_import

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_import("torch")

EPSILON = 1e-8  # avoids a division by 0 where all values are equal


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
    if not isinstance(lam, torch.Tensor):
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

    With the KL penalty in the rewards (`kl.in_reward`), REINFORCE++'s advantages (arXiv:2501.03262) before `whiten`.

    Args:
        rewards, mask, gamma: as in `gae`.
    """
    return gae(rewards, torch.zeros_like(rewards), mask, gamma, 1.0)[1]


def optimal_token_baseline(
    rewards: Tensor,
    mask: Tensor,
    groups: Tensor,
    logprobs: Tensor,
    squares: Tensor,
    weights: Tensor | None = None,
) -> Tensor:
    """Returns (n, T) rewards to come minus the baseline of least variance of each token: OTB, arXiv:2602.07078.

    G_t - B_t with B_t = sum(G_t W_t) / (sum(W_t) + 1e-8) over the samples of a prompt with a t-th token, t over masked
    tokens. W_t is the sum of w_1 to w_t, w = 1 - 2 p + sum over the vocabulary of p_v^2: the squared norm of the
    gradient of log p by the logits. Where a sample is the only one that is so long, B_t is 0, as in the authors' code,
    "tir_optimal_token_baseline" in verl. Rewards to come [1, 1] and [0] with w = [0.5, 0.5] and [1.5]:
    B = [0.25, 0], advantages [0.75, 1] and [-0.25].

    Args:
        rewards, mask: (n, T) float and bool, as in `gae`.
        groups: (n,) int64, equal for samples of one prompt, all of which are here.
        logprobs, squares: (n, T) log p in nats, and the sum of p_v^2, of the policy at the start of the iteration.
        weights: (n, T) off-policy weights, by whose square w is multiplied; None: all are 1.
    """
    counts = mask.sum(1)
    steps = torch.arange(int(counts.max()) if len(counts) else 0, device=mask.device) < counts[:, None]
    reward, p, square = (_compact(column, mask, steps) for column in (rewards, logprobs, squares))
    energy = torch.where(steps, 1 - 2 * p.exp() + square, 0.0)
    if weights is not None:
        energy = energy * _compact(weights, mask, steps).square()
    energy = torch.where(steps, energy.cumsum(1), 0.0)
    coming = reward.flip(1).cumsum(1).flip(1)
    advantages = torch.zeros_like(coming)
    for group in groups.unique():
        lines = (groups == group).nonzero()[:, 0]
        # In the order of the values: the order of a sum decides its rounding, and must not depend on that of the rows.
        weighted, total = (column.sort(0).values.sum(0) for column in ((coming * energy)[lines], energy[lines]))
        baseline = torch.where(steps[lines].sum(0) > 1, weighted / (total + EPSILON), 0.0)
        advantages[lines] = coming[lines] - baseline
    result = torch.zeros(mask.shape, dtype=rewards.dtype, device=rewards.device)
    result[mask] = advantages[steps].to(rewards.dtype)
    return result


def _compact(column: Tensor, mask: Tensor, steps: Tensor) -> Tensor:
    """Returns the masked entries of a column as the first ones of each row, where `steps` is true, in float64."""
    # float64: the recursion adds up the rounding of as many steps as a response has tokens.
    compact = torch.zeros(steps.shape, dtype=torch.float64, device=column.device)
    compact[steps] = column[mask].detach().double()
    return compact


def _check_fraction(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise UserError(f"{name} is {value}. Write a number from 0 to 1")


def moments(values: Tensor, mask: Tensor) -> Tensor:
    """Returns (3,) float64 count, sum and sum of squares of the masked values, which add up over parts and ranks.

    Args:
        values, mask: (...) float and bool.
    """
    # float64: the variance is the small difference of two large sums.
    kept = values[mask].detach().double()
    return torch.stack([kept.new_tensor(float(kept.numel())), kept.sum(), kept.square().sum()])


def whiten(values: Tensor, mask: Tensor, moments: Tensor) -> Tensor:
    """Returns (...) values with zero mean and unit (unbiased) variance over all ranks; 0 outside the mask.

    Args:
        values, mask: (...) float and bool.
        moments: (3,) float64, results of the function `moments` added over all ranks.
    """
    count, total, squares = moments.unbind()
    mean = total / count.clamp(min=1)
    variance = ((squares - mean * total) / (count - 1).clamp(min=1)).clamp(min=0)
    whitened = (values.detach().double() - mean) / (variance + EPSILON).sqrt()
    return torch.where(mask, whitened, 0.0).to(values.dtype)


def distillation_advantages(
    old_logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor, spans: Tensor | None = None
) -> Tensor:
    """Returns the log-ratio log p_teacher - log p_student of each masked token (...), in nats; 0 elsewhere.

    Minus the "k1" estimate of KL(student || teacher): a policy gradient with it descends the per-token reverse KL
    (on-policy distillation, arXiv:2306.13649).

    Args:
        old_logprobs, teacher_logprobs: (...) nats; the student's are from the start of the iteration.
        mask: (...) bool.
        spans: (...) int64, for teachers of another tokenizer, the span of each token, -1 for none; None: each is one.
    """
    ratios = torch.where(mask, teacher_logprobs - old_logprobs, 0.0).detach()
    if spans is None:
        return ratios
    # Every token of a span gets the span's log-ratio, because each has a part in its probability.
    counted = mask & (spans >= 0)
    totals = ratios.new_zeros(int(spans.max()) + 1 if spans.numel() else 0)
    totals.index_add_(0, spans[counted], ratios[counted])
    return torch.where(counted, totals[spans.clamp(min=0)] if len(totals) else ratios, 0.0)


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


def process_sums(process_rewards: Tensor, mask: Tensor) -> Tensor:
    """Returns (n, T) sums of the process rewards to come, without their signs; 0 outside the mask.

    PRIME's published code (arXiv:2502.01456) divides process rewards by the largest of them.

    Args:
        process_rewards, mask: (n, T) float and bool.
    """
    return discounted_returns(process_rewards, mask, 1.0).abs()


def prime_advantages(
    process_rewards: Tensor,
    scores: Tensor,
    mask: Tensor,
    groups: Tensor,
    gamma: float = 1.0,
    process_weight: float = 1.0,
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
        process_weight: factor of the part of the process rewards.
    """
    rewards = torch.where(mask, process_rewards, 0.0).double()
    means = rewards.sum(1) / mask.sum(1).clamp(min=1)
    samples = torch.arange(len(groups), device=groups.device)
    # The published code subtracts another baseline from single tokens, K / (K - 1) r_t minus the sum of all K means
    # over K - 1, which agrees with the equation only in the mean over a response; this is the equation.
    baseline = means - rloo(means, groups, samples)
    process = discounted_returns(rewards - baseline[:, None], mask, gamma)
    outcome = torch.where(mask, rloo(scores.double(), groups, samples)[:, None], 0.0)
    return (process_weight * process + outcome).to(process_rewards.dtype)
