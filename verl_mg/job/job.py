"""The job that a recipe works on: its roles, data and state.

    RunningJob(...)  checks the configuration, reads the data, then builds models, teachers, rewards and engines
      |  a checkpoint is restored, if there is one
    start()          the engines get their first weights; samples in flight at the checkpoint are submitted again
      |
    begin(i)         refreshes the reference if due; then `iteration(job, cfg)` of the recipe, checkpoint, evaluation
      |  next iteration: begin(i + 1)
    close()          ends engines, tools and reward functions

All ranks take each step together.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store

from verl_mg.agents.tool_calls import unread_reasoning
from verl_mg.agents.tools.load import load_tools
from verl_mg.agents.tools.multi_turn import MultiTurnEngine
from verl_mg.batch import Batch
from verl_mg.choice import Choice
from verl_mg.config import Config
from verl_mg.config.effects import check_effects
from verl_mg.data import (
    Prompt,
    PromptFeed,
    Prompts,
    demonstrations_batch,
    longest_row,
    num_demonstrations,
    pairs_batch,
    read_prompts,
    reward_key,
)
from verl_mg.data.image_processor import ImageProcessor
from verl_mg.data.images import ImageLimits
from verl_mg.data.stop_tokens import read_stop_tokens
from verl_mg.data.template_options import check_options_are_used, set_template_options
from verl_mg.distributed import collectives
from verl_mg.engines import RolloutEngine
from verl_mg.engines.request_tracker import routed_shape
from verl_mg.engines.stop_strings import decoder
from verl_mg.errors import UserError
from verl_mg.job.build_agents import agent_wrapper, turns_wrapper
from verl_mg.job.build_engines import (
    build_engine_group,
    passed_choices,
    training_sampling,
    with_stop_strings,
)
from verl_mg.job.build_models import TEACHERS, ModelRoleBuilder
from verl_mg.job.build_teachers import build_teachers
from verl_mg.job.engine_checks import check_engines, check_job
from verl_mg.job.engine_tables import actor_table
from verl_mg.job.evaluation import SetResults, evaluate, evaluation_sets, metrics_of
from verl_mg.models.transformers_module import read_any_config, read_tokenizer
from verl_mg.phase_timer import PhaseTimer
from verl_mg.rewards import load_rewards
from verl_mg.roles.context import JobContext
from verl_mg.roles.models import Actor, Critic, Policy, Reference, RewardModel, TrainableRewardModel, TrainableRole
from verl_mg.roles.reward import RewardRole, SampleTexts
from verl_mg.roles.role import Role
from verl_mg.roles.teachers import Teachers
from verl_mg.rollout.async_rollout import AsyncRollout
from verl_mg.rollout.engine_group import EngineGroup, InFlightEngineGroup, WrapEngine
from verl_mg.rollout.groups import StalenessBound
from verl_mg.rollout.mismatch_check import MismatchCheck
from verl_mg.rollout.rollout import Rollout, RolloutSetup, RolloutSource
from verl_mg.rollout.sync_rollout import SyncRollout
from verl_mg.rows.samples import OptionalColumns, RolloutRecord
from verl_mg.training.runner import Runner
from verl_mg.weight_sync.kept_weights import KeptWeights

log = logging.getLogger(__name__)
R = TypeVar("R", bound=Role)


class RunningJob:
    """Roles that a recipe requests, and the data they work on; built by all ranks together.

    A role exists if the recipe's `roles` names it; `prompts` always exists.

    Attributes:
        iteration: number of the current iteration, from 1.
        state: numbers and batches by name that a recipe keeps between iterations; checkpoints contain them.
        next_row: number of the next row of data that is trained on without generation.
    """

    def __init__(
        self,
        config: Config,
        roles: set[str],
        store: Store,
        rollout: Callable[[], RolloutSource] | None = None,
        learns: bool = True,
        recipe: str = "",
        from_checkpoint: bool = False,
        evaluates_only: bool = False,
        starts_engines: bool = True,
    ) -> None:
        """Builds the requested roles.

        Args:
            config: configuration of the job.
            roles: names of the requested roles.
            store: store for the rendezvous of the ranks.
            rollout: builds the rollout of a job without engines, such as a replay.
            learns: whether roles have optimizers.
            recipe: name of the recipe, for messages.
            from_checkpoint: read no weights that a checkpoint restores before `start`.
            evaluates_only: `prompts` are the prompts of `data.test`, and `data.train` is not read.
            starts_engines: whether the engines are started, and not only checked.
        """
        self.config, self.requested, self._recipe = config, frozenset(roles), recipe
        self.context = JobContext(store, PhaseTimer(config.profile.synchronize))
        self.iteration = self.next_row = 0
        self.state: dict[str, float | Batch] = {}
        torch.manual_seed(config.job.seed)
        # Checks come first, because a wrong key should cost seconds, not the time of loading models.
        if not evaluates_only:  # a configuration of evaluations is that of the run, or has few keys
            check_effects(config, roles)
        models = self._checked_models(learns, from_checkpoint, has_engines="rollout" in roles and rollout is None)
        self._read_data(evaluates_only)
        models.check_images(roles, self.prompts)
        # Models before engines: an engine sizes its cache by the memory that is free when it starts.
        self._build_models(models)
        records: list[RolloutRecord] = []
        self._reward = self._build_reward(records) if "reward" in roles else None
        self._multi_turn: MultiTurnEngine | None = None
        self._rollout: RolloutSource | None = None
        self._engines: EngineGroup | None = None
        self._check: MismatchCheck | None = None
        if "rollout" in roles and starts_engines:
            self._rollout = self._build_rollout(records, learns) if rollout is None else rollout()

    # -- roles

    @property
    def actor(self) -> Actor:
        """The policy that is trained."""
        return self._role("actor", Actor)

    @property
    def reference(self) -> Policy:
        """The frozen reference policy or teacher."""
        return self._role("reference", Policy)

    @property
    def teachers(self) -> Teachers:
        """The teachers of the samples, each of which has its sources of data."""
        self._require(TEACHERS)
        assert self._teachers is not None
        return self._teachers

    @property
    def critic(self) -> Critic:
        """The value model that is trained."""
        return self._role("critic", Critic)

    @property
    def reward_model(self) -> TrainableRewardModel:
        """The reward model that is trained."""
        return self._role("reward_model", TrainableRewardModel)

    @property
    def frozen_reward_model(self) -> RewardModel:
        """The reward model that scores responses."""
        return self._role("frozen_reward_model", RewardModel)

    @property
    def process_reward(self) -> Actor:
        """The language model that is trained as an implicit process reward model."""
        return self._role("process_reward", Actor)

    @property
    def rollout(self) -> RolloutSource:
        """Generates responses with the rollout engines, or replays recorded ones."""
        self._require("rollout")
        assert self._rollout is not None
        return self._rollout

    @property
    def reward(self) -> RewardRole:
        """Scores responses with the reward functions of the configuration."""
        self._require("reward")
        assert self._reward is not None
        return self._reward

    def _role(self, name: str, kind: type[R]) -> R:
        self._require(name)
        role = self.roles[name]
        assert isinstance(role, kind)
        return role

    def _require(self, name: str) -> None:
        if name not in self.requested:
            raise UserError(f"recipe {self._recipe} did not request the role {name!r}: add it to roles(cfg)")

    def concurrent_roles(self) -> AbstractContextManager[None]:
        """Returns the block at whose end the role calls made inside run, roles on disjoint ranks at the same time."""
        return self.context.executor.concurrent()

    @property
    def trained(self) -> dict[str, TrainableRole]:
        """The roles that learn, by name."""
        return {name: role for name, role in self.roles.items() if isinstance(role, TrainableRole)}

    @property
    def refreshed(self) -> dict[str, Reference]:
        """The frozen roles whose weights have changed or will, by name."""
        return {name: role for name, role in self.roles.items() if isinstance(role, Reference) and role.is_refreshed}

    @property
    def trained_batches(self) -> list[Batch]:
        """Batches of this iteration's updates, each once."""
        every = [batch for role in self.trained.values() for batch in role.trained_batches]
        return list({id(batch): batch for batch in every}.values())

    @property
    def timer(self) -> PhaseTimer:
        """Phase timer of the job on this rank."""
        return self.context.timer

    def chosen(self) -> dict[str, list[Choice]]:
        """Returns what roles and this rank's engine compute with; of an engine that is not started, what it gets."""
        rows: dict[str, list[Choice]] = {}
        runners: dict[Runner, str] = {}
        for name, role in self.roles.items():
            runners.setdefault(role.runner, name)  # a reference without adapters has that of the actor
        for runner, name in runners.items():
            rows[f"{name}, {runner.layout}"] = runner.chosen()
        if "rollout" not in self.requested:
            return rows
        title = f"engine {self.config.rollout.engine}"
        if self._engines:
            of_engine = self._engines.chosen()
        else:
            title, of_engine = f"{title}, not started", passed_choices(self.config, self.actor)
        unused = () if self.actor.runner.table.config.experts else ("experts",)
        of_engine = of_engine | self._stops.described(self.tokenizer)
        return rows | {title: [Choice(part, how) for part, how in of_engine.items() if part not in unused]}

    # -- around an iteration

    def start(self) -> None:
        """Sends the initial or restored weights to the engines and submits the samples that were in flight again."""
        for name, role in self.roles.items():
            if role.runner.unrestored:  # with `from_checkpoint`, these weights were not read from the model directory
                raise RuntimeError(f"{name}: no checkpoint has restored {', '.join(sorted(role.runner.unrestored))}")
        if self._rollout is not None:
            self._rollout.update_weights(self.actor)
            if self._engines and self._check:
                self._check.probe(self._engines)
            self._rollout.start_generating()

    def kept_weights(self, version: int) -> KeptWeights | str:
        """Returns the actor's weights of a version that engines have kept, see `EngineGroup.take_back`."""
        return self._engines.take_back(self.actor.runner, version) if self._engines else ""

    def begin(self, iteration: int) -> dict[str, float]:
        """Prepares an iteration before the recipe is called.

        Args:
            iteration: number of the iteration, from 1.

        Returns:
            As metrics the current weights of the rewards, and whether the reference was refreshed.
        """
        self.iteration = iteration
        for role in self.trained.values():
            role.trained_batches = []
        metrics = self._refresh_reference()
        if self._rollout is not None:
            self._rollout.start_iteration(iteration, iteration == self.config.job.iterations)
        return metrics | (self._reward.start_iteration() if self._reward is not None else {})

    def _refresh_reference(self) -> dict[str, float]:
        every, reference = self.config.reference.refresh_every, self.roles.get("reference")
        if every is None or not isinstance(reference, Reference):
            return {}
        # Before an iteration, where no role call is pending. Before the first one there was no update.
        if is_due := self.iteration > 1 and (self.iteration - 1) % every == 0:
            reference.refresh()
        return {"reference/refreshed": float(is_due)}

    def observe(self, batch: Batch) -> dict[str, float]:
        """Passes the rewards of a batch to the curriculum and returns its metrics."""
        if not self.prompts.has_curriculum:
            return {}
        samples = batch.one_per_trajectory()  # all rows of a trajectory have its reward
        columns = (collectives.all_gather_column(samples, name).tolist() for name in ("prompt_id", "reward"))
        return self.prompts.observe(*columns)

    def close(self) -> None:
        """Stops the engines, and releases the tools and the reward functions."""
        for part in (self._rollout, self._multi_turn, self._reward):
            if part is not None:
                part.close()

    # -- collectives over all rows of all ranks

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Returns the sum over all ranks of a small tensor, in float64, bitwise identical on every rank."""
        return collectives.all_reduce_sum(values)

    def all_gather_column(self, batch: Batch, name: str) -> Tensor:
        """Gathers a sequence column.

        Args:
            batch: this rank's rows.
            name: a column with one entry for each row.

        Returns:
            The entries of all rows of all ranks, in the order of their sample ids.
        """
        return collectives.all_gather_column(batch, name)

    def global_kth_largest(self, values: Tensor, k: int) -> float:
        """Returns the k-th largest of the values of all ranks; the smallest if there are fewer than k.

        Args:
            values: this rank's values, (m,).
            k: rank of the result among all values, counted from 1.
        """
        return collectives.global_kth_largest(values, k)

    def reassign_sample_ids(self, batch: Batch) -> Batch:
        """Replaces the sample ids by 0, 1, ... over all ranks and returns the batch; see `collectives`."""
        return collectives.reassign_sample_ids(batch)

    def warn(self, text: str) -> None:
        """Logs a warning of the recipe, which all ranks give, once."""
        if dist.get_rank() == 0:
            log.warning("%s: %s", self._recipe, text)

    # -- data

    def sft_batch(self, prompts: Sequence[Prompt]) -> Batch:
        """Returns this rank's share of rows for supervised fine-tuning, which train what `data.loss_on` says."""
        first, self.next_row = self.next_row, self.next_row + num_demonstrations(prompts)
        return demonstrations_batch(prompts, self.tokenizer, self._model.max_positions, first, *self._place)

    def preference_batch(self, prompts: Sequence[Prompt]) -> Batch:
        """Returns this rank's share of rows for preference learning: a chosen and a rejected answer to each prompt."""
        first, self.next_row = self.next_row, self.next_row + len(prompts)
        fields = (self.config.data.chosen_field, self.config.data.rejected_field)
        return pairs_batch(prompts, self.tokenizer, self._model.max_positions, first, *fields, *self._place)

    def evaluate(self) -> dict[str, float]:
        """Evaluates the policy on the test prompts; returns {} without `data.test` or without engines."""
        if self.test_prompts is None or self.rollout.is_replay:
            return {}
        started = time.perf_counter()
        metrics = metrics_of(self.evaluate_sets())
        return metrics | {"time/evaluation_wait": time.perf_counter() - started}

    def evaluate_sets(self) -> list[SetResults]:
        """Evaluates the policy on the sets of `data.test`; all ranks call it together and have all results."""
        names = self.config.rollout.agent_names
        return evaluate(self.rollout, self.reward, self.test_prompts or (), self._sets, names)

    # -- building

    def _checked_models(self, learns: bool, from_checkpoint: bool, has_engines: bool) -> ModelRoleBuilder:
        """Checks what can be checked without data and models, and returns the builder of the models."""
        config, ranks = self.config, dist.get_world_size()
        training = ranks - check_job(config, ranks).separate_ranks if has_engines else ranks
        models = ModelRoleBuilder(config, training, self.context, learns, from_checkpoint)
        models.check(self.requested, f" with rollout.num_ranks={ranks - training}" if training < ranks else "")
        if has_engines:
            check_engines(config, actor_table(config), ranks)
        return models

    def _read_data(self, evaluates_only: bool) -> None:
        config, path = self.config, self.config.model.path
        self._sets, self._evaluates_only = evaluation_sets(config), evaluates_only
        self.tokenizer, self.processor = read_tokenizer(path), ImageProcessor.read(path)
        set_template_options(config.rollout.chat_template_options, self.tokenizer, self.processor)
        self._model, self._place = read_any_config(path), (dist.get_rank(), dist.get_world_size())
        self._stops = read_stop_tokens(path, self.tokenizer)
        self._tools = load_tools(config.rollout.tools)
        self._schemas = [tool.schema for tool in self._tools]
        report = print if config.job.console and dist.get_rank() == 0 else None
        if report and (warning := unread_reasoning(config.rollout, self.tokenizer)):
            report(warning)
        options: dict[str, Any] = {"seed": config.job.seed, "tools": self._schemas, "report": report}
        options["processor"] = self.processor
        self.test_prompts: Prompts | None = None
        if config.data.test is not None:
            self.test_prompts = read_prompts(config.data, "test", self.tokenizer, **options)
        if not evaluates_only:
            self.prompts = PromptFeed(read_prompts(config.data, "train", self.tokenizer, **options))
        else:
            assert self.test_prompts is not None
            self.prompts = PromptFeed(self.test_prompts)
        self.sample_texts = SampleTexts(self.prompts, self.tokenizer, self._stops.ids)
        if config.rollout.chat_template_options and not (config.rollout.has_agents or self._tools):
            check_options_are_used([*self.prompts, *(self.test_prompts or ())])

    def _build_models(self, models: ModelRoleBuilder) -> None:
        self.roles: Mapping[str, Role] = {name: models.build(name) for name in models.model_roles(self.requested)}
        if self.config.reference.refresh_every and "reference" in self.requested:
            self._follow_actor()
        self._teachers: Teachers | None = None
        if TEACHERS in self.requested:
            self._teachers = build_teachers(
                self.config, self.roles, self.prompts, self.tokenizer, self._schemas, self._stops.ids, self.context
            )

    def _follow_actor(self) -> None:
        try:
            self._role("reference", Reference).follow(self.actor)
        except UserError as error:
            raise UserError(
                f"reference.refresh_every: the weights of the actor do not fit the reference ({error}). "
                "Leave it out, or reference.path."
            ) from None

    def _build_reward(self, records: list[RolloutRecord]) -> RewardRole:
        config, model = self.config.reward, self.frozen_reward_model if self.config.reward.from_model else None
        scorer = None if config.from_model else load_rewards(config)
        has_agents = self.config.rollout.has_agents
        of_sources = {
            reward_key(which, name): load_rewards(source.reward)
            for which in ("train", "test")
            if isinstance(sources := getattr(self.config.data, which), dict)
            for name, source in sources.items()
            if source.reward
        }
        names = self.config.rollout.agent_names
        return RewardRole(scorer, self.sample_texts, self.context, records, model, has_agents, of_sources, names)

    def _build_rollout(self, records: list[RolloutRecord], learns: bool) -> Rollout:
        config, model, decode = self.config.rollout, self._model, decoder(self.tokenizer)
        prompts, new_tokens = () if self._evaluates_only else self.prompts, config.max_new_tokens
        longest = longest_row(prompts, {}, new_tokens, model.max_positions)
        of_test = {of_set.name: int(of_set.sampling["max_new_tokens"]) for of_set in self._sets}
        longest_test = longest_row(self.test_prompts or (), of_test, new_tokens, model.max_positions)
        excluded = self.processor.placeholder_ids if self.processor else ()
        sampling = training_sampling(self.config, model.vocab, self._stops.ids, excluded)
        if config.has_agents:
            limits = ImageLimits(self.config.data.max_image_pixels, self.config.data.max_images)
            wrap = agent_wrapper(config, self.tokenizer, self._stops.ids, model.max_positions, self.processor, limits)
        else:
            wrap = self._with_tools()
        if self.config.ends_at_strings:
            wrap = with_stop_strings(decode, wrap)
        self._engines = engines = build_engine_group(
            self.config, self.actor, self.context, wrap, self.processor, decode, longest or None
        )
        routed = routed_shape(self.config.model.path) if config.replay_routing else None
        selecting = len(model.indexer.selecting) if config.replay_selections and model.indexer else 0
        columns = OptionalColumns(routed, num_selecting=selecting, agent_names=config.agent_names)
        if learns:
            self._check = MismatchCheck.of(self.config, self.actor, self.prompts, longest, sampling, columns)
        setup = RolloutSetup(
            sampling=sampling,
            seed=self.config.job.seed,
            context=self.context,
            prompts=self.prompts,
            records=records,
            reward=self._reward,
            columns=columns,
            longest=max(longest, longest_test, 1) if config.fixed_requests is None else None,
            check=self._check,
        )
        if config.mode == "async":
            assert isinstance(engines, InFlightEngineGroup)  # `check_engines` has refused others
            return AsyncRollout(engines, setup, StalenessBound(config.max_staleness, config.stale))
        return SyncRollout(
            engines,
            setup,
            extra_prompts=config.extra_prompts,
            prefetch=config.mode == "one_step_off",
            partial_rollout=config.partial_rollout,
            deterministic=self.config.job.deterministic,
        )

    def _with_tools(self) -> WrapEngine:
        """Returns a function that adds tools to an engine if the configuration names any."""
        if not self._tools:
            return lambda engine: engine
        turns = turns_wrapper(self.config.rollout, self.tokenizer, self._tools, self.processor)

        def with_turns(engine: RolloutEngine) -> RolloutEngine:
            self._multi_turn = turns(engine)
            return self._multi_turn

        return with_turns
