"""Advantage estimators: rewards of samples or tokens in, advantages out.

A line of an (n, T) table is a sample: all rows of an agent's trajectory, one after another, as `Batch.pad` puts
them. Tokens outside an (n, T) mask are no step of the policy: they are skipped, and nothing decays over them. Values
there may be anything, NaN too; every result is 0 there.
"""

from verl_mg.algorithms.advantages.group import (
    differ,
    gdpo,
    group_means,
    group_relative,
    informative,
    maxrl,
    opo,
    pass_at_k,
    remax,
    rloo,
    soft_overlong_penalty,
)
from verl_mg.algorithms.advantages.resampling import resampling_weights, select
from verl_mg.algorithms.advantages.tokens import (
    discounted_returns,
    distillation_advantages,
    gae,
    implicit_rewards,
    length_adaptive_lambda,
    moments,
    optimal_token_baseline,
    prime_advantages,
    process_sums,
    token_rewards,
    whiten,
)
from verl_mg.algorithms.advantages.turns import Turns, gigpo, mt_grpo

__all__ = [
    "Turns",
    "differ",
    "discounted_returns",
    "distillation_advantages",
    "gae",
    "gdpo",
    "gigpo",
    "group_means",
    "group_relative",
    "implicit_rewards",
    "informative",
    "length_adaptive_lambda",
    "maxrl",
    "moments",
    "mt_grpo",
    "opo",
    "optimal_token_baseline",
    "pass_at_k",
    "prime_advantages",
    "process_sums",
    "remax",
    "resampling_weights",
    "rloo",
    "select",
    "soft_overlong_penalty",
    "token_rewards",
    "whiten",
]
