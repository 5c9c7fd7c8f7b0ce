"""Real SGLang engines in tests: a checkpoint's weights brought into one."""

from __future__ import annotations

from pathlib import Path

import psutil

from tests import warm_start
from verl_mg import device
from verl_mg.checkpoint.hf_safetensors import CheckpointReader, load_shards
from verl_mg.checkpoint.model_directory import ModelDirectory
from verl_mg.models.hf_config import read_config
from verl_mg.rollout.ipc_payload import Staging
from verl_mg.rollout.sglang import SGLangEngine
from verl_mg.sharding.weight_table import weight_table


def process_of(engine: SGLangEngine) -> psutil.Process:
    """The process of an engine, of which SGLang's processes are children."""
    return psutil.Process(warm_start.sglang().program_of(engine.pid) or engine.pid)


def bring_weights(engine: SGLangEngine, model: Path, version: int) -> None:
    """As a sync does it, each rank's shard of the table read from the checkpoint."""
    layout, held = engine.settings.layout, []
    for rank in range(layout.ranks):
        shards = weight_table(read_config(model)).engine_shards(layout, rank)
        dtypes = dict.fromkeys(shards, engine.settings.dtype)
        held.append(Staging(shards, dtypes, device.current_device()))
        with CheckpointReader(ModelDirectory.find(model)) as reader:
            load_shards(reader, shards, held[-1].tensors)  # from memory that is not pinned: complete when it returns
    engine.begin_update()
    engine.loaded(engine.load([staging.payload() for staging in held], version))
    engine.end_update(version)
