"""Engines that were started anew, told from rank to rank: all bring the weights, since all hold some."""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed import Store


class EngineRestarts:
    """Counted in a store that all ranks share, so that all see the same ones in the same order."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen = 0

    def announce(self, engine: int) -> None:
        """Engine number `engine` is there, without weights."""
        number = self._store.add("revived", 1)
        self._store.set(f"revived/{number}", str(engine))

    def unseen(self) -> Iterator[int]:
        """The engines that were announced since this rank saw the last one; each is seen once."""
        while self._seen < self._store.add("revived", 0):
            self._seen += 1
            yield int(self._store.get(f"revived/{self._seen}"))
