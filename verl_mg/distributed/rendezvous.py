"""A part of a shared store that is new, though ranks of an earlier start may have left things in it."""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

from torch.distributed import PrefixStore, Store

EVERY = 0.05
"""Seconds between two looks."""


def wait_for_fresh_store(store: Store, rank: int, size: int, patience: timedelta = timedelta(minutes=30)) -> Store:
    """The same new part of the store on all ranks of this start; torchrun's store outlives its restarts.

    Each rank shows a token that nobody has seen before; rank 0 answers tokens with its own, which names the part, until
    each rank has said that name: answers to tokens of earlier starts help nobody.

    Raises:
        TimeoutError: a rank did not come.
    """
    own, deadline = uuid.uuid4().hex, time.monotonic() + patience.total_seconds()
    if rank == 0:
        missing = set(range(1, size))
        while missing:
            for other in missing:
                if token := _read(store, f"token/{other}"):
                    store.set(f"answer/{other}", f"{token} {own}")
            missing = {other for other in missing if _read(store, f"heard/{other}") != own}
            _wait(deadline, f"ranks {sorted(missing)}")
        return PrefixStore(own, store)
    store.set(f"token/{rank}", own)
    while True:
        token, _, name = _read(store, f"answer/{rank}").partition(" ")
        if token == own:
            store.set(f"heard/{rank}", name)
            return PrefixStore(name, store)
        _wait(deadline, "rank 0")


def _read(store: Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


def _wait(deadline: float, whom: str) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError(f"{whom} did not come to the job's store")
    time.sleep(EVERY)
