"""Training alone, on the rollouts of an earlier run: from its newest checkpoint before an iteration up to that one.

    verl-mg train recipes/grpo.py --config my.yaml job.output=runs/again --replay runs/first@12

On the layout of the run the metrics of training are bitwise those of then, so what went wrong in iteration 12 can be
looked at again and again, with no engine and on other ranks too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from verl_mg.config import Config
from verl_mg.errors import UserError
from verl_mg.monitor.sample_reader import SampleReader
from verl_mg.monitor.sample_schema import fingerprint
from verl_mg.run.checkpoint_integrity import newest_intact
from verl_mg.run.run_dir import CHECKPOINTS


@dataclass(frozen=True)
class Replay:
    """checkpoint: what is gone on from; None: the model itself. last: the iteration that it ends with."""

    recording: SampleReader
    checkpoint: Path | None
    last: int

    @classmethod
    def open(cls, text: str, config: Config, recipe: str) -> Replay:
        """As RUN@ITERATION says; all ranks call it together.

        Raises:
            UserError: it says nothing of the kind, what is needed was not recorded, or job.output holds a run.
        """
        folder, _, number = text.rpartition("@")
        if not folder or not number.isdecimal() or not int(number):
            raise UserError(f"--replay {text}: write RUN@ITERATION, such as runs/first@12")
        run, last = Path(folder), int(number)
        output = config.job.output
        if run.resolve() == output.resolve() or (output / CHECKPOINTS).exists():
            raise UserError(f"job.output={output}: holds a run; a replay goes into a folder of its own")
        recording, checkpoint = SampleReader(run), newest_intact(run / CHECKPOINTS, before=last)
        first = int(checkpoint.name) + 1 if checkpoint else 1
        recording.check(range(first, last + 1), recipe, fingerprint(config.model.path))
        return cls(recording, checkpoint, last)
