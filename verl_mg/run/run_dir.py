"""The folder of a run: free, or that of a run to go on with."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
import yaml

from verl_mg.config import Config, dump_config
from verl_mg.errors import UserError
from verl_mg.monitor.progress import METRICS
from verl_mg.run.checkpointer import newest_intact

CHECKPOINTS, CONFIG = "checkpoints", "config.yaml"

log = logging.getLogger(__name__)


def open_run_dir(config: Config) -> Path | None:
    """The checkpoint in job.output to go on from; None where the run begins. All ranks call it together.

    A run of the same configuration that was ended before its first checkpoint begins anew. UserError where the folder
    holds anything else, or cannot be written.
    """
    output = config.job.output
    checkpoint = newest_intact(output / CHECKPOINTS)
    if dist.get_rank() == 0:
        try:
            _check(output, config, checkpoint)
            output.mkdir(parents=True, exist_ok=True)
            (output / CONFIG).write_text(dump_config(config), encoding="utf-8")
        except OSError as error:
            raise UserError(f"{output}: job.output cannot be written ({error.strerror})") from None
    dist.barrier()  # the other ranks write nothing until the folder is known to be ours
    return checkpoint


def _check(output: Path, config: Config, checkpoint: Path | None) -> None:
    """Rank 0's part: what is new in the configuration is told."""
    before = _earlier(output / CONFIG)
    now = yaml.safe_load(dump_config(config))
    if checkpoint is None:
        # A start that failed before its first iteration leaves nothing worth keeping.
        last = _last_step(output / METRICS)
        if last is not None and (before != now or last >= config.job.iterations):
            raise UserError(f"{output}: holds an earlier run; choose another job.output or move the folder away")
        return
    changes = [text for text in _changes(before, now) if text]
    new = f", with other settings than before: {'; '.join(changes)}" if changes else ""
    log.warning("%s: goes on after iteration %d%s", output, int(checkpoint.name), new)


def _earlier(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}


def _last_step(path: Path) -> int | None:
    """Of the metrics; None where there are none, 0 where they are not ours."""
    if not path.exists() or not path.stat().st_size:
        return None
    try:
        return int(json.loads(path.read_text(encoding="utf-8").splitlines()[-1])["step"])
    except (ValueError, KeyError, TypeError):
        return 0


def _changes(before: Any, now: Any, name: str = "") -> Iterator[str]:
    """`key=value instead of value` for what is not as before."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in now:
            yield from _changes(before.get(key), now[key], f"{name}.{key}" if name else key)
    elif before != now:
        yield f"{name}={now} instead of {before}"
