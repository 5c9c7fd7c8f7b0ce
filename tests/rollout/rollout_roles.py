"""Roles around a rollout on engines in the ranks' processes, for tests."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed import PrefixStore
from transformers import AutoTokenizer

from tests.helpers.rank_pool import job_store
from tests.helpers.roles import build_role
from verl_mg.config import OptimizerConfig
from verl_mg.data import Prompt, PromptFeed, PromptSet
from verl_mg.engines import Sampling
from verl_mg.engines.hf.engine import HFEngine
from verl_mg.rewards import AsyncScorer, load_reward
from verl_mg.roles.context import JobContext
from verl_mg.roles.models import Actor
from verl_mg.roles.reward import RewardRole, SampleTexts
from verl_mg.rollout.engine_group import HFEngineGroup
from verl_mg.rollout.rollout import RolloutSetup
from verl_mg.rollout.sync_rollout import SyncRollout

TEXTS = ["12+3=", "7*(8-2)=", "a b c", "(1)", "99-98+97="]


def make_prompts(model: Path) -> list[Prompt]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    return [Prompt(10 + i, tuple(tokenizer(t)["input_ids"]), t, str(i), {"n": i}) for i, t in enumerate(TEXTS)]


@dataclass(frozen=True)
class Roles:
    """The roles around a rollout on this rank."""

    actor: Actor
    rollout: SyncRollout
    reward: RewardRole | None
    feed: PromptFeed


def make_roles(
    model: Path,
    layout: str = "tp1",
    reward: str = "",
    max_running_requests: int = 256,
    job: str = "job",
    **options: object,
) -> Roles:
    """Roles on this rank; `reward` is MODULE:FUNCTION, `options` are those of `SyncRollout`."""
    # Several jobs on the same ranks must not share keys of the store.
    context = JobContext(PrefixStore(job, job_store()))
    actor = build_role(
        Actor, model, layout, context, temperature=0.9, tokens_per_micro_batch=60, optimizer=OptimizerConfig(lr=3e-3)
    )
    feed, records = PromptFeed(PromptSet(make_prompts(model))), []
    role = None
    if reward:
        scorer, tokenizer = AsyncScorer({"": load_reward(reward)}), AutoTokenizer.from_pretrained(model)
        texts = SampleTexts(feed, tokenizer, (tokenizer.eos_token_id,))
        role = RewardRole(scorer, texts, context, records)
    engine = HFEngine(model, "cpu", torch.float32, max_running_requests=max_running_requests, load_weights=False)
    sampling = Sampling(max_new_tokens=9, temperature=0.9, stop_token_ids=(1,))
    setup = RolloutSetup(sampling=sampling, seed=5, context=context, prompts=feed, records=records, reward=role)
    rollout = SyncRollout(HFEngineGroup(engine, context), setup, **options)
    rollout.update_weights(actor)
    return Roles(actor, rollout, role, feed)
