"""Output folder of a run: an empty folder, or the folder of a run to resume."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from verl_mg.config import Config, dump_config
from verl_mg.config.reading import read_tree
from verl_mg.errors import UserError
from verl_mg.monitor.status import METRICS
from verl_mg.run.checkpointer import newest_intact
from verl_mg.run.run_store import RunStore
from verl_mg.stores.folders import StoredFolder

CONFIG = "config.yaml"

log = logging.getLogger(__name__)


def open_run_dir(config: Config, store: RunStore) -> StoredFolder | None:
    """Returns the checkpoint in job.output to resume from, or None for a new run; all ranks call it together.

    A run of the same configuration that ended before its first checkpoint starts again from the beginning. UserError
    for a folder with another run that has no checkpoint, and for one that cannot be written.
    """
    output = config.job.folder
    store.open()
    checkpoint = newest_intact(store.checkpoints)
    if dist.get_rank() == 0:
        try:
            _check(config, checkpoint)
            output.mkdir(parents=True, exist_ok=True)
            (output / CONFIG).write_text(dump_config(config), encoding="utf-8")
        except OSError as error:
            raise UserError(f"{output}: job.output cannot be written ({error.strerror})") from None
    dist.barrier()  # the other ranks write nothing until the folder is checked
    return checkpoint


def _check(config: Config, checkpoint: StoredFolder | None) -> None:
    """Checks the folder on rank 0 and logs changed settings of a run that is resumed."""
    output, place = config.job.folder, config.job.output
    # A start that failed before its first iteration leaves nothing worth keeping.
    last = _last_step(output / METRICS) if checkpoint is None else 0
    if last is None:
        return
    # Compared as YAML has them: paths and tuples of the configuration are texts and lists there.
    before: dict[str, Any] = {}
    now = config.model_dump(mode="json")
    with suppress(UserError):
        before = read_tree(output / CONFIG)
    if checkpoint is None:
        if before != now or last >= config.job.iterations:
            raise UserError(f"{place}: holds an earlier run; choose another job.output or move the folder away")
        return
    changes = [text for text in _changes(before, now) if text]
    new = f", with other settings than before: {'; '.join(changes)}" if changes else ""
    log.warning("%s: resumes after iteration %d%s", place, int(checkpoint.name), new)


def _last_step(path: Path) -> int | None:
    """Returns the last step of a metrics file; None if it is missing or empty, 0 if its format is unknown."""
    if not path.exists() or not path.stat().st_size:
        return None
    try:
        return int(json.loads(path.read_text(encoding="utf-8").splitlines()[-1])["step"])
    except (ValueError, KeyError, TypeError):
        return 0


def _changes(before: Any, now: Any, name: str = "") -> Iterator[str]:
    """Yields `key=value instead of value` for every changed setting."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in now:
            yield from _changes(before.get(key), now[key], f"{name}.{key}" if name else key)
    elif before != now:
        yield f"{name}={now} instead of {before}"
