"""Weight table of the rollout engines: built in, from a file, or traced from the engine's loader as the job begins."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

import torch.distributed as dist

from verl_mg.config import Config
from verl_mg.distributed.collectives import broadcast_bytes
from verl_mg.engines.kinds import ENGINES, ProcessKind
from verl_mg.job.backends import BACKENDS
from verl_mg.layout import EngineLayout
from verl_mg.sharding.model_table import ModelTable
from verl_mg.sharding.traced_table import parse_traced_table
from verl_mg.tracing.tracer import TracedEngine, write_trace

FOLDER = "sharding_tables"
"""Folder of a run with the tables that were traced for it."""


def actor_table(config: Config) -> ModelTable:
    """Returns the weight table of the actor, by its backend; UserError if that does not have the architecture."""
    return BACKENDS[config.actor.backend].table(config.model.path)


def with_engine_table(config: Config, table: ModelTable) -> ModelTable:
    """Returns a table with the shards of the engines of a job; all ranks call it together.

    An architecture without a built-in table is traced by rank 0, once for each run, version of the engine and layout.
    UserError if the file of `rollout.sharding_table` does not fit, or the engine cannot load the model.
    """
    rollout, kind = config.rollout, ENGINES[config.rollout.engine]
    assert kind.process is not None
    table = table.for_engine(kind.process.name).with_traced_table(rollout.sharding_table)
    if kind.abilities.has_draft(rollout.engine_arguments):
        return table.with_draft_model()
    if table.traced or table.has_engine_rules:
        return table
    content, folder = b"", config.job.folder / FOLDER
    if dist.get_rank() == 0:
        # In the run's folder, so that a resumed run does not trace again.
        path = folder / _file_name(config, kind.process)
        if not path.exists():
            _trace(config, table, path)
        content = path.read_bytes()
    return table.with_traced(parse_traced_table(broadcast_bytes(content), folder), folder)


def _file_name(config: Config, kind: ProcessKind) -> str:
    """Returns the name of the table's file, which has all that the table depends on."""
    content = (config.model.path / "config.json").read_bytes()
    version, digest = kind.version(config.rollout.python), hashlib.sha256(content).hexdigest()[:12]
    return f"{kind.name}-{version}-{config.rollout.layout}-{digest}.json"


def _trace(config: Config, table: ModelTable, path: Path) -> None:
    rollout, begin = config.rollout, time.monotonic()
    shapes = {name: shard.shape for name, shard in table.huggingface().items()}
    engine = TracedEngine(table.engine, rollout.python)
    write_trace(config.model.path, path, EngineLayout.parse(rollout.layout), engine, shapes)
    if config.job.console:
        print(
            f"rollout.engine={table.engine}: there is no built-in table for {table.config.architecture!r}, so the "
            f"engine's loader was traced in {time.monotonic() - begin:.0f} s: {path}"
        )
