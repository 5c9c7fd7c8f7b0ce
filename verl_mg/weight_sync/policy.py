"""Interface of the model whose weights are transferred."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from verl_mg.training.runner import Runner


class Policy(Protocol):
    """Model with a version; the actor is one."""

    @property
    def runner(self) -> Runner:
        """Shards of this rank and their map."""

    @property
    def num_updates(self) -> int:
        """Version of the weights: updates since the start of the job."""

    def __hash__(self) -> int:
        """Plans are kept by policy."""

    def save(self, folder: Path, model_dir: Path) -> None:
        """Writes a Hugging Face model directory; all ranks call it together.

        Args:
            folder: the directory to write.
            model_dir: model directory from which everything else is copied.
        """
