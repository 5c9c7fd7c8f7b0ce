"""Models of a job that are names on a hub: the first rank of each node downloads them before the job begins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import psutil
import torch.distributed as dist

from verl_mg import device
from verl_mg.config import Config
from verl_mg.distributed.collectives import broadcast_json
from verl_mg.distributed.world import World
from verl_mg.hub import HubName, fetch
from verl_mg.models.named_models import CONFIG_FILES, MODEL_FILES, hub_models, with_folders


def with_fetched_models(config: Config, world: World) -> Config:
    """Returns the configuration with local folders of the models, all ranks together; UserError where a fetch fails."""
    # Rank 0 asks the hub which commit a name means now, so that all nodes have the same one. Then the first rank of
    # each node downloads the files that its cache does not have. The others find them there, or download into their own
    # cache.
    names = hub_models(config)
    if not names:
        return config
    if world.watchdog:
        # A download may take longer than `stall_timeout_s`; bytes that ranks write to files count as progress.
        world.watchdog.watch_progress(lambda: psutil.Process().io_counters().write_chars)
    commits = broadcast_json({key: _commit(name, key) for key, name in names.items()} if world.rank == 0 else None)
    names = {key: replace(name, revision=commits[key]) for key, name in names.items()}
    reports = config.job.console and world.rank == 0
    if reports:
        for key, name in names.items():
            print(
                f"{key}.path: fetching {name.text}" + (f", commit {name.revision}" if name.revision else ""), flush=True
            )
    folders: dict[str, Path] = {}
    # A commit that the cache has needs no network, so only the first rank of a node asks the site.
    is_first = world.rank % device.ranks_of_a_node(world.size) == 0
    for turn in (True, False):
        if turn is is_first:
            folders = {key: fetch(name, "model", MODEL_FILES, f"{key}.path") for key, name in names.items()}
        dist.barrier()
    if reports:
        for key, folder in folders.items():
            print(f"{key}.path: {names[key].text} is {folder}", flush=True)
    return with_folders(config, folders)


def _commit(name: HubName, key: str) -> str | None:
    """Returns the commit of a name: that of the hub, or that of the cache where the hub cannot be reached."""
    folder = fetch(name, "model", CONFIG_FILES, f"{key}.path")
    return folder.name if name.site == "hf" else name.revision  # the folders of ModelScope's cache are no commits
