"""What of a job is run: all of it, its rollouts alone, or training alone on the rollouts of an earlier run."""

from __future__ import annotations

from dataclasses import dataclass

from verl_mg.config import Config
from verl_mg.errors import UserError


@dataclass(frozen=True)
class RunMode:
    """learns: whether roles have optimizers; without them an iteration ends where a recipe first asks for an update.

    replayed: RUN@ITERATION, whose rollouts stand in place of engines, see `verl_mg.run.replay`.
    """

    learns: bool = True
    replayed: str | None = None

    @property
    def whole(self) -> bool:
        """Whether it is all of the job, and another start can go on with it."""
        return self.learns and self.replayed is None

    def check(self, recipe: str, roles: set[str]) -> None:
        """UserError where the recipe has no such half."""
        if not self.whole and "rollout" not in roles:
            raise UserError(f"recipe {recipe}: draws no samples; leave --rollout-only and --replay out")

    def configured(self, config: Config) -> Config:
        """Without what this half does not leave: checkpoints, and models where nothing learns."""
        if self.whole:
            return config
        checkpoint = config.checkpoint.model_copy(update={"every": 0, "best": None})
        if self.learns:
            return config.model_copy(update={"checkpoint": checkpoint})
        checkpoint = checkpoint.model_copy(update={"export_every": 0})
        job = config.job.model_copy(update={"save": False})
        return config.model_copy(update={"checkpoint": checkpoint, "job": job})


FULL_RUN = RunMode()
