from __future__ import annotations

from dataclasses import dataclass

from verl_mg.config import Config
from verl_mg.errors import UserError


@dataclass(frozen=True)
class RunMode:
    """The part of a job that is run: all of it, only its rollouts, or only training on samples of an earlier run."""

    learns: bool = True
    """Whether roles have optimizers; without them an iteration ends where the recipe first requests an update."""
    replayed: str | None = None
    """RUN@ITERATION, whose samples are used in place of generated ones; see `verl_mg.run.replay`."""

    @property
    def is_full(self) -> bool:
        """Whether the whole job is run, so that another start can resume it."""
        return self.learns and self.replayed is None

    def check(self, recipe: str, roles: set[str]) -> None:
        """Raises a UserError for a part of a recipe that generates no samples."""
        if not self.is_full and "rollout" not in roles:
            raise UserError(f"recipe {recipe}: it generates no samples. Leave --rollout-only and --replay out.")

    def apply_to(self, config: Config) -> Config:
        """Returns the configuration without what this part does not write: checkpoints, models that nothing trains."""
        if self.is_full:
            return config
        checkpoint = config.checkpoint.model_copy(update={"every": 0, "best": None})
        if self.learns:
            return config.model_copy(update={"checkpoint": checkpoint})
        checkpoint = checkpoint.model_copy(update={"export_every": 0})
        job = config.job.model_copy(update={"save": False})
        return config.model_copy(update={"checkpoint": checkpoint, "job": job})


FULL_RUN = RunMode()
