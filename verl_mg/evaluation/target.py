"""Target of an evaluation: a model, the model that a run has exported, or one of its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from verl_mg.errors import UserError
from verl_mg.run.checkpointer import newest_intact
from verl_mg.run.loop import EXPORTS, MODEL
from verl_mg.run.run_dir import CHECKPOINTS, CONFIG


@dataclass(frozen=True)
class Target:
    """A model directory or name, or a run."""

    text: str
    model: Path | None
    """Directory or name of the model; None for the model of the run's configuration, under a checkpoint."""
    run: Path | None = None
    """Folder of the run; None for a model."""
    iteration: int | None = None
    """Iteration of the run; None for its final model, or its newest checkpoint."""

    @classmethod
    def parse(cls, text: str) -> Target:
        """Returns the target of a model directory, a name on a hub, RUN or RUN@ITERATION."""
        # Of a run the exported model is used, or else its checkpoint: `model` or `checkpoints`, and with an iteration
        # `export/000012/model` or `checkpoints/000012`.
        folder, _, number = text.rpartition("@")
        run = Path(text)
        iteration = None
        if folder and number.isdecimal() and (Path(folder) / CONFIG).is_file():
            run, iteration = Path(folder), int(number)
        if not (run / CONFIG).is_file():
            return cls(text, Path(text))
        exported = run / MODEL if iteration is None else run / EXPORTS / f"{iteration:06d}" / MODEL
        return cls(text, exported if (exported / "config.json").is_file() else None, run, iteration)

    @property
    def output(self) -> Path:
        """Default folder of the evaluation."""
        if self.run is None:
            return Path("runs") / "evaluation" / Path(self.text).name
        return self.run / "evaluation" / ("final" if self.iteration is None else f"{self.iteration:06d}")

    def checkpoint(self) -> Path | None:
        """Returns the checkpoint to evaluate, None for a model; all ranks together. UserError without an intact one."""
        if self.model is not None or self.run is None:
            return None
        before = None if self.iteration is None else self.iteration + 1
        newest = newest_intact(self.run / CHECKPOINTS, before)
        if newest and self.iteration in (None, int(newest.name)):
            return newest
        written = sorted(
            {*(path.name for path in (self.run / CHECKPOINTS).glob("*") if path.name.isdecimal())}
            | {path.name for path in (self.run / EXPORTS).glob("*") if path.name.isdecimal()}
        )
        has = f"has iterations {', '.join(str(int(name)) for name in written)}" if written else "has none"
        what = "model" if self.iteration is None else f"intact checkpoint or export of iteration {self.iteration}"
        raise UserError(f"{self.text}: no {what}; the run {has}. Write RUN@ITERATION with one of them.")
