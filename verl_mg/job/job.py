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
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from verl_mg.choice import Choice
from verl_mg.data import demonstrations_batch, num_demonstrations, pairs_batch
from verl_mg.errors import UserError
from verl_mg.lazy_import import lazy_import
from verl_mg.phase_timer import PhaseTimer

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor
    from torch.distributed import Store

    from verl_mg.batch import Batch
    from verl_mg.config import Config
    from verl_mg.data import Prompt
    from verl_mg.distributed import collectives
    from verl_mg.job import build_engines, build_job, evaluation
    from verl_mg.roles import models
    from verl_mg.roles.models import Actor, Critic, Policy, Reference, RewardModel, TrainableRewardModel, TrainableRole
    from verl_mg.roles.reward import RewardRole
    from verl_mg.roles.teachers import Teachers
    from verl_mg.rollout.rollout import RolloutSource
    from verl_mg.training.runner import Runner
    from verl_mg.weight_sync.kept_weights import KeptWeights
else:  # a recipe names the job, and is read where none is built
    dist = lazy_import("torch.distributed")
    collectives = lazy_import("verl_mg.distributed.collectives")
    build_engines = lazy_import("verl_mg.job.build_engines")
    build_job = lazy_import("verl_mg.job.build_job")
    evaluation = lazy_import("verl_mg.job.evaluation")
    models = lazy_import("verl_mg.roles.models")

log = logging.getLogger(__name__)


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
        timer: PhaseTimer | None = None,
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
            timer: timer of this rank, which may have measured phases before.
        """
        self.config, self.requested, self._recipe = config, frozenset(roles), recipe
        self.iteration = self.next_row = 0
        self.state: dict[str, float | Batch] = {}
        timer = timer or PhaseTimer()
        timer.exact = config.profile.synchronize
        self._parts = build_job.build_job(
            config,
            self.requested,
            store,
            timer,
            rollout,
            learns=learns,
            from_checkpoint=from_checkpoint,
            evaluates_only=evaluates_only,
            starts_engines=starts_engines,
        )
        self.context, self.roles = self._parts.context, self._parts.roles
        data = self._parts.data
        self.tokenizer, self.processor, self.sample_texts = data.tokenizer, data.processor, data.sample_texts
        self.prompts, self.test_prompts = data.prompts, data.test_prompts
        self._max_positions = data.model.max_positions

    # -- roles

    @property
    def actor(self) -> Actor:
        """The policy that is trained."""
        return self._role("actor")

    @property
    def reference(self) -> Policy:
        """The frozen reference policy or teacher."""
        return self._role("reference")

    @property
    def teachers(self) -> Teachers:
        """The teachers of the samples, each of which has its sources of data."""
        self._require("teachers")
        assert self._parts.teachers is not None
        return self._parts.teachers

    @property
    def critic(self) -> Critic:
        """The value model that is trained."""
        return self._role("critic")

    @property
    def reward_model(self) -> TrainableRewardModel:
        """The reward model that is trained."""
        return self._role("reward_model")

    @property
    def frozen_reward_model(self) -> RewardModel:
        """The reward model that scores responses."""
        return self._role("frozen_reward_model")

    @property
    def process_reward(self) -> Actor:
        """The language model that is trained as an implicit process reward model."""
        return self._role("process_reward")

    @property
    def rollout(self) -> RolloutSource:
        """Generates responses with the rollout engines, or replays recorded ones."""
        self._require("rollout")
        assert self._parts.rollout is not None
        return self._parts.rollout

    @property
    def reward(self) -> RewardRole:
        """Scores responses with the reward functions of the configuration."""
        self._require("reward")
        assert self._parts.reward is not None
        return self._parts.reward

    def _role(self, name: str) -> Any:
        self._require(name)
        return self.roles[name]

    def _require(self, name: str) -> None:
        if name not in self.requested:
            raise UserError(f"recipe {self._recipe} did not request the role {name!r}: add it to roles(cfg)")

    def concurrent_roles(self) -> AbstractContextManager[None]:
        """Returns the block at whose end the role calls made inside run, roles on disjoint ranks at the same time."""
        return self.context.executor.concurrent()

    @property
    def trained(self) -> dict[str, TrainableRole]:
        """The roles that learn, by name."""
        return {name: role for name, role in self.roles.items() if isinstance(role, models.TrainableRole)}

    @property
    def refreshed(self) -> dict[str, Reference]:
        """The frozen roles whose weights have changed or will, by name."""
        frozen = {name: role for name, role in self.roles.items() if isinstance(role, models.Reference)}
        return {name: role for name, role in frozen.items() if role.is_refreshed}

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
        if self._parts.engines:
            of_engine = self._parts.engines.chosen()
        else:
            title, of_engine = f"{title}, not started", build_engines.passed_choices(self.config, self.actor)
        unused = () if self.actor.runner.table.config.experts else ("experts",)
        of_engine = of_engine | self._parts.data.stops.described(self.tokenizer)
        return rows | {title: [Choice(part, how) for part, how in of_engine.items() if part not in unused]}

    # -- around an iteration

    def start(self) -> None:
        """Sends the initial or restored weights to the engines and submits the samples that were in flight again."""
        for name, role in self.roles.items():
            if role.runner.unrestored:  # with `from_checkpoint`, these weights were not read from the model directory
                raise RuntimeError(f"{name}: no checkpoint has restored {', '.join(sorted(role.runner.unrestored))}")
        if self._parts.rollout is not None:
            self._parts.rollout.update_weights(self.actor)
            if self._parts.engines and self._parts.check:
                self._parts.check.probe(self._parts.engines)
            self._parts.rollout.start_generating()

    def kept_weights(self, version: int) -> KeptWeights | str:
        """Returns the actor's weights of a version that engines have kept, see `EngineGroup.take_back`."""
        return self._parts.engines.take_back(self.actor.runner, version) if self._parts.engines else ""

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
        if self._parts.rollout is not None:
            self._parts.rollout.start_iteration(iteration, iteration == self.config.job.iterations)
        return metrics | (self._parts.reward.start_iteration() if self._parts.reward is not None else {})

    def _refresh_reference(self) -> dict[str, float]:
        every, reference = self.config.reference.refresh_every, self.roles.get("reference")
        if every is None or not isinstance(reference, models.Reference):
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
        self._parts.close()

    # -- collectives over all rows of all ranks

    def all_reduce_sum(self, values: Tensor | Sequence[float | Tensor]) -> Tensor:
        """Returns the sums over all ranks of some numbers, in float64, bitwise identical on every rank."""
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
        return demonstrations_batch(prompts, self.tokenizer, self._max_positions, first, *_place())

    def preference_batch(self, prompts: Sequence[Prompt]) -> Batch:
        """Returns this rank's share of rows for preference learning: a chosen and a rejected answer to each prompt."""
        first, self.next_row = self.next_row, self.next_row + len(prompts)
        fields = (self.config.data.chosen_field, self.config.data.rejected_field)
        return pairs_batch(prompts, self.tokenizer, self._max_positions, first, *fields, *_place())

    def evaluate(self) -> dict[str, float]:
        """Evaluates the policy on the test prompts; returns {} without `data.test` or without engines."""
        if self.test_prompts is None or self.rollout.is_replay:
            return {}
        started = time.perf_counter()
        metrics = evaluation.metrics_of(self.evaluate_sets())
        return metrics | {"time/evaluation_wait": time.perf_counter() - started}

    def evaluate_sets(self) -> list[evaluation.SetResults]:
        """Evaluates the policy on the sets of `data.test`; all ranks call it together and have all results."""
        names = self.config.rollout.agent_names
        return evaluation.evaluate(self.rollout, self.reward, self.test_prompts or (), self._parts.data.sets, names)


def _place() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()
