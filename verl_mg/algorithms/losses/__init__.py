"""Per-token losses over flat (tokens,) tensors; `aggregation` turns them into one number.

A loss returns its value for each token, exactly 0 outside the mask, and a dictionary of detached per-token
metrics, also 0 outside it, of which the caller reports the mean over all masked tokens of all ranks.
Values outside the mask may be anything, NaN too: they reach neither value nor gradient.

Nothing but `mask` and `sequence_ids` says how the tokens are packed, and every statistic is of one token, one
sequence or one pair, which are whole in a micro-batch, or was made over all ranks before: so no split of the rows
changes the sum of a loss or its gradient.
"""

from verl_mg.algorithms.losses.covariance import (
    clip_cov_loss,
    covariances,
    kl_cov_loss,
    priorities,
    share_count,
    tokens_at_least,
    tokens_between,
)
from verl_mg.algorithms.losses.policy import Metrics, cispo_loss, clipped_policy_loss, dppo_loss, gpg_loss, sapo_loss
from verl_mg.algorithms.losses.preference import bradley_terry_loss, dpo_loss, prime_loss
from verl_mg.algorithms.losses.sequence import gmpo_loss, gspo_loss
from verl_mg.algorithms.losses.targets import explained_variance, imitation_loss, sft_loss, value_loss

__all__ = [
    "Metrics",
    "bradley_terry_loss",
    "cispo_loss",
    "clip_cov_loss",
    "clipped_policy_loss",
    "covariances",
    "dpo_loss",
    "dppo_loss",
    "explained_variance",
    "gmpo_loss",
    "gpg_loss",
    "gspo_loss",
    "imitation_loss",
    "kl_cov_loss",
    "prime_loss",
    "priorities",
    "sapo_loss",
    "sft_loss",
    "share_count",
    "tokens_at_least",
    "tokens_between",
    "value_loss",
]
