"""`Job`: what a recipe is called with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store
from transformers import AutoTokenizer

from verl_mg.batch import Batch
from verl_mg.config import ActorConfig, Config, ReferenceConfig
from verl_mg.data.demonstrations import demonstration
from verl_mg.data.prompts import Prompt, PromptSet
from verl_mg.errors import UserError
from verl_mg.job.engines import build_fleet, check_engines, training_ranks
from verl_mg.layout import Layout, Placement
from verl_mg.megatron.collectives import sum_over_ranks
from verl_mg.megatron.groups import ParallelGroups
from verl_mg.megatron.network import check_layout
from verl_mg.rewards import load_reward
from verl_mg.roles.actor import Actor
from verl_mg.roles.fleet import Wrap
from verl_mg.roles.policy import Policy
from verl_mg.roles.rollout import Rollout
from verl_mg.roles.scorer import Scorer
from verl_mg.rollout import Sampling
from verl_mg.rollout.tools.dialogue import Dialogue
from verl_mg.rollout.tools.tool import load_tools
from verl_mg.rollout.tools.turns import Conversations
from verl_mg.weights import read_config, table

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

P = TypeVar("P", bound=Policy)


class Job:
    """The roles that a recipe asked for and the data they work on; built by all ranks together.

    `actor`, `reference`, `rollout`, `reward` are there when the recipe's `roles` names them; `prompts` always.
    """

    actor: Actor
    reference: Policy
    rollout: Rollout
    reward: Scorer

    def __init__(self, config: Config, roles: set[str], store: Store) -> None:
        self.config, self._store = config, store
        self._groups: dict[Placement, ParallelGroups] = {}
        self._next_demonstration = 0
        torch.manual_seed(config.job.seed)
        ranks = dist.get_world_size()
        self._training = training_ranks(config, ranks) if "rollout" in roles else ranks
        self._check_layouts(roles)
        self.tokenizer = _read_tokenizer(config.model.path)
        self._tools = load_tools(config.rollout.tools)
        self.prompts = self._read_prompts(config.data.train)
        self.test_prompts = self._read_prompts(config.data.test) if config.data.test else None
        if "reward" in roles:
            self.reward = Scorer(load_reward(config.reward.function), self.prompts, self.tokenizer)
        if "actor" in roles:
            self.actor = self.build_actor()
        if "reference" in roles:
            self.reference = self._build_policy(Policy, config.reference)
        if "rollout" in roles:
            self.rollout = self._build_rollout()
            self.rollout.sync(self.actor)

    def build_actor(self) -> Actor:
        """The policy under the layout of the configuration, with the weights of the model's directory."""
        actor = self.config.actor
        return self._build_policy(Actor, actor, recompute=actor.recompute, optimizer=actor.optimizer)

    def demonstrations(self, prompts: list[Prompt]) -> Batch:
        """Prompts with their answers as rows to imitate; this rank's share of them."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        mine = range(rank, len(prompts), ranks)
        limit = self.actor.network.table.config.max_positions
        rows = [demonstration(prompts[i], self.tokenizer, limit) for i in mine]
        batch = Batch.from_rows(tokens for tokens, _ in rows)
        batch["prompt_length"] = torch.tensor([length for _, length in rows], dtype=torch.int64)
        batch["loss_mask"] = batch.positions >= batch.spread(batch["prompt_length"])
        batch["prompt_id"] = torch.tensor([prompts[i].id for i in mine], dtype=torch.int64)
        batch["sample_id"] = torch.tensor([self._next_demonstration + i for i in mine], dtype=torch.int64)
        self._next_demonstration += len(prompts)
        return batch

    def evaluate(self) -> dict[str, float]:
        """The mean reward of greedy answers to the first `evaluation.prompts` prompts of `data.test`."""
        if self.test_prompts is None:
            return {}
        prompts = list(self.test_prompts)[: self.config.evaluation.prompts]
        batch = self.rollout.greedy(prompts)
        scores = self.reward.over(self.test_prompts)(batch)
        total = sum_over_ranks([{"eval/reward": scores.double().sum()}])
        return {"eval/reward": total["eval/reward"] / len(prompts)}

    # -- building

    def _check_layouts(self, roles: set[str]) -> None:
        """Before any group or model exists: each layout fits the ranks and the model."""
        model, ranks = read_config(self.config.model.path), dist.get_world_size()
        beside = f" beside rollout.ranks={ranks - self._training}" if self._training < ranks else ""
        for role in roles & {"actor", "reference"}:
            layout: str = getattr(self.config, role).layout
            try:
                check_layout(model, Layout.parse(layout).fit(self._training))
            except UserError as error:
                raise UserError(f"{role}.layout={layout}{beside}: {error}") from None
        if "rollout" in roles:
            check_engines(self.config, table(model), ranks)

    def _groups_of(self, layout: str) -> ParallelGroups:
        placement = Placement.on(Layout.parse(layout), self._training)
        if placement not in self._groups:
            self._groups[placement] = ParallelGroups(placement, self.config.job.seed)
        return self._groups[placement]

    def _build_policy(self, kind: type[P], section: ActorConfig | ReferenceConfig, **options: Any) -> P:
        return kind(
            self.config.model.path,
            self._groups_of(section.layout),
            dtype=self._dtype,
            temperature=self.config.rollout.temperature,
            tokens_per_micro_batch=section.tokens_per_micro_batch,
            **options,
        )

    def _build_rollout(self) -> Rollout:
        config, model = self.config.rollout, read_config(self.config.model.path)
        for path, prompts in ((self.config.data.train, self.prompts), (self.config.data.test, self.test_prompts)):
            if path is not None and prompts is not None:
                self._check_room_to_answer(path, prompts, model.max_positions)
        stops = {*model.eos_token_ids, self.tokenizer.eos_token_id} - {None}
        sampling = Sampling(
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            stop_token_ids=tuple(sorted(stops)),
        )
        store = PrefixStore("rollout", self._store)
        fleet = build_fleet(self.config, self._dtype, self.actor, store, self._with_tools())
        for policy in (getattr(self, role, None) for role in ("actor", "reference")):
            if policy is not None:
                policy.claim = fleet.rest
        return Rollout(fleet, sampling, self.config.job.seed, store, config.partial)

    def _with_tools(self) -> Wrap:
        """What puts tools around an engine, where the configuration names any."""
        config, tools = self.config.rollout, self._tools
        if not tools:
            return lambda engine: engine
        dialogue = Dialogue(self.tokenizer, tools, config.tool_format)
        turns, timeout = config.max_turns, config.tool_timeout
        return lambda engine: Conversations(engine, dialogue, tools, max_turns=turns, tool_timeout=timeout)

    def _check_room_to_answer(self, path: Path, prompts: PromptSet, positions: int) -> None:
        longest = max(len(prompt.tokens) for prompt in prompts)
        if longest + self.config.rollout.max_new_tokens > positions:
            raise UserError(
                f"{path}: its longest prompt has {longest} tokens, with rollout.max_new_tokens="
                f"{self.config.rollout.max_new_tokens} that is more than the {positions} positions of the model; lower "
                "it, or lower data.max_prompt_tokens with data.too_long=drop"
            )

    def _read_prompts(self, path: Path) -> PromptSet:
        data = self.config.data
        return PromptSet.from_file(
            path,
            self.tokenizer,
            prompt_field=data.prompt_field,
            answer_field=data.answer_field,
            chat_template=data.chat_template,
            instruction=data.instruction,
            max_prompt_tokens=data.max_prompt_tokens,
            too_long=data.too_long,
            seed=self.config.job.seed,
            tools=[tool.schema for tool in self._tools],
        )

    @property
    def _dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.config.model.dtype == "bfloat16" else torch.float32


def _read_tokenizer(model_dir: Path) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    except Exception as error:  # transformers raises many kinds for a broken folder
        reason = str(error).splitlines()[0]
        raise UserError(f"{model_dir}: no readable tokenizer ({reason}); add tokenizer.json to it") from error
