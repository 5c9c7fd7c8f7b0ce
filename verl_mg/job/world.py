"""Joining the ranks of the job, and leaving together when a user's mistake ends it."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, rendezvous

from verl_mg import platform
from verl_mg.errors import EXIT_CODE, UserError


@dataclass(frozen=True)
class World:
    """This process among the ranks."""

    rank: int
    size: int
    store: Store

    @classmethod
    def join(cls) -> World:
        """Meet the ranks that torchrun started, or be the only one; the default process group exists afterwards."""
        if "RANK" in os.environ:
            store, rank, size = next(rendezvous("env://"))
        else:
            store, rank, size = HashStore(), 0, 1
        if torch.cuda.is_available():
            torch.cuda.set_device(platform.device())
        else:
            local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local))
        dist.init_process_group(platform.backend(), store=PrefixStore("job", store), rank=rank, world_size=size)
        return cls(rank, size, store)

    def leave(self) -> None:
        """The regular end: all ranks together."""
        dist.barrier()
        dist.destroy_process_group()

    def leave_with(self, error: UserError) -> NoReturn:
        """End this process with code 2; the first rank to come here prints the error. The launcher ends the others."""
        if self.store.add("user errors", 1) == 1:
            print(f"error: {error}", file=sys.stderr, flush=True)
        self.follow()

    def someone_erred(self) -> bool:
        """Whether a rank has left with a user's mistake: what else goes wrong here is only its consequence."""
        return self.store.add("user errors", 0) > 0

    def follow(self) -> NoReturn:
        """End this process with code 2 and say nothing."""
        sys.stdout.flush()
        # Threads of the process groups may still wait for ranks that have left.
        os._exit(EXIT_CODE)
