"""Supervised fine-tuning: raise the log-probability of given answers, each token weighing the same."""

from pydantic import PositiveInt

from verl_mg.algorithms.losses import sft_loss
from verl_mg.config import Section


class Config(Section):
    examples_per_iteration: PositiveInt = 64


def roles(cfg):
    return {"actor"}


def imitation_loss(tokens):
    return sft_loss(tokens.logprobs, tokens.mask)


def iteration(job, cfg):
    batch = job.demonstrations(job.prompts.take(cfg.examples_per_iteration))
    return job.actor.update(batch, imitation_loss, aggregation="token-mean")
