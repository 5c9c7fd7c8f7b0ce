"""Advantages from process rewards and outcomes, with the scaling of PRIME's published code (arXiv:2502.01456)."""

from collections.abc import Callable

from torch import Tensor

from verl_mg.algorithms.advantages import discounted_returns, moments, whiten

EPSILON = 1e-6  # of the published code: process rewards of an untrained model are 0


def bounded(process_rewards: Tensor, mask: Tensor, kth_largest: Callable[[Tensor, int], float]) -> Tensor:
    """Returns (n, T) process rewards over the largest sum of them, from a token of a response on, without its sign.

    Args:
        process_rewards, mask: (n, T) float and bool.
        kth_largest: the k-th largest of the values of all ranks, as of the job.
    """
    sums = discounted_returns(process_rewards, mask, 1.0).abs().flatten()
    return process_rewards / (kth_largest(sums, 1) + EPSILON)


def whitened(advantages: Tensor, mask: Tensor, all_reduce_sum: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns (n, T) advantages with mean 0 and standard deviation 1 over the tokens of all ranks.

    Args:
        advantages, mask: (n, T) float and bool.
        all_reduce_sum: sum over all ranks, as of the job.
    """
    return whiten(advantages, mask, all_reduce_sum(moments(advantages, mask)))
