"""Replay of training on the samples of an earlier run, from its newest checkpoint before an iteration up to that one.

    verl-mg train recipes/grpo.py --config my.yaml job.output=runs/again --replay runs/first@12

On the layout of the run the metrics of training equal the run's bit by bit, so the cause of a problem in iteration 12
can be looked for again and again, without engines and on other ranks too.

    runs/first   checkpoints/000010   samples of iterations 1 ... 20
                      │                     11, 12
                      └─ weights ─▶ training ◀─┘    no checkpoints are written
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from verl_mg.batch import SUPPORT_IDS, Batch
from verl_mg.config import Config
from verl_mg.data.prompts import Prompt
from verl_mg.distributed.collectives import broadcast_json
from verl_mg.errors import UserError
from verl_mg.monitor.sample_reader import SampleReader
from verl_mg.monitor.sample_schema import ColumnSchema, fingerprint
from verl_mg.roles.models import Actor
from verl_mg.rollout.rollout import RolloutSource
from verl_mg.rollout.work_queue import GroupFilter
from verl_mg.rows.samples import GeneratedRows, RolloutRecord
from verl_mg.run.checkpointer import newest_intact
from verl_mg.stores.folders import LocalFolders, StoredFolder
from verl_mg.stores.records import CHECKPOINTS
from verl_mg.stores.url import require_local
from verl_mg.training.microbatch import SAMPLER_TOP


@dataclass(frozen=True)
class Replay:
    """A range of iterations of an earlier run."""

    recording: SampleReader
    checkpoint: StoredFolder | None  # of the run, that training resumes from; None: it starts from the model itself
    last: int

    @classmethod
    def open(cls, text: str, config: Config, recipe: str) -> Replay:
        """Returns the replay of RUN@ITERATION; all ranks call it together.

        UserError where samples are missing, were recorded by another recipe, model or other agents, have not what the
        configuration trains on, or `job.output` contains a run.
        """
        folder, _, number = text.rpartition("@")
        if not folder or not number.isdecimal() or not int(number):
            raise UserError(f"--replay {text}: it has no iteration. Write RUN@ITERATION, such as runs/first@12.")
        run, last = require_local(folder, "--replay"), int(number)
        output = config.job.folder
        if run.resolve() == output.resolve() or (output / CHECKPOINTS).exists():
            raise UserError(f"job.output={config.job.output}: it contains a run. Choose another folder for the replay.")
        # Samples of iteration 12 are trained by the weights after iteration 11: checkpoint 12 is too late.
        recording, checkpoint = SampleReader(run), newest_intact(LocalFolders(run / CHECKPOINTS), before=last)
        first = int(checkpoint.name) + 1 if checkpoint else 1
        model = broadcast_json(fingerprint(config.model.path) if dist.get_rank() == 0 else None)
        recording.check(range(first, last + 1), recipe, model, config.rollout.agent_names)
        for iteration in range(first, last + 1):
            for columns in recording.columns(iteration)[:1]:  # further batches may not be trained
                _check_columns(columns, config, text)
        return cls(recording, checkpoint, last)


def _check_columns(columns: Mapping[str, ColumnSchema], config: Config, text: str) -> None:
    if k := config.sampler_top:
        recorded = columns[SAMPLER_TOP].rest[-1] if SAMPLER_TOP in columns else 0
        if recorded != k:
            raise UserError(
                f"algorithm.off_policy.score_centering={k}: --replay {text} has {recorded} likeliest tokens for each "
                f"token. {f'Write {recorded}' if recorded else 'Leave it out'}."
            )
    if config.rollout.limits_draws and config.algorithm.support != "full" and SUPPORT_IDS not in columns:
        raise UserError(
            f"algorithm.support={config.algorithm.support}: --replay {text} has no candidates of its tokens. Write "
            "algorithm.support=full."
        )


class ReplayRollout(RolloutSource):
    """Returns recorded batches, with their rewards, in the order in which the recipe received them in the run."""

    # What the recipe requests is not compared: it gets the prompts and numbers of samples of the run.

    is_replay = True

    def __init__(self, recording: SampleReader) -> None:
        super().__init__([])
        self._recording, self._iteration = recording, 0
        self._remaining: list[GeneratedRows] = []

    def start_iteration(self, iteration: int, is_last: bool) -> None:
        """Reads the batches of an iteration."""
        super().start_iteration(iteration, is_last)
        self._iteration, self._remaining = iteration, self._recording.batches(iteration)

    def generate(self, prompts: Sequence[Prompt], num_samples: int = 1) -> Batch:
        """Returns the next recorded batch."""
        batch = self._next()
        self.train_batches.append(batch)
        return batch

    def generate_filtered(self, num_groups: int, num_samples: int, keep: GroupFilter, max_groups: int) -> Batch:
        """Returns the next recorded batch."""
        return self.generate([])

    def generate_for_eval(self, prompts: Sequence[Prompt], num_samples: int, **sampling: Any) -> Batch:
        """Returns the next recorded batch."""
        return self._next()

    def update_weights(self, actor: Actor) -> None:
        """Does nothing: there are no engines."""

    def _next(self) -> Batch:
        if not self._remaining:
            raise UserError(
                f"iteration {self._iteration}: the recipe requests more batches than were recorded. Replay with the "
                "settings of the run."
            )
        rows = self._remaining.pop(0)
        self.records.append(RolloutRecord.of(rows))
        return rows.batch
