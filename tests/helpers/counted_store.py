"""Store that records the requests it gets."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import HashStore, Store


class CountedStore(Store):
    """Store of one process; `requests` are the names of the methods that were called, in order."""

    host, port = "here", 0

    def __init__(self, inner: Store | None = None) -> None:
        super().__init__()
        self._inner, self.requests = inner or HashStore(), []

    def has_extended_api(self) -> bool:
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        """The store answers at once."""

    def clone(self) -> CountedStore:
        return self


def _counted(name: str) -> Callable[..., Any]:
    def call(store: CountedStore, *arguments: Any) -> Any:
        store.requests.append(name)
        return getattr(store._inner, name)(*arguments)

    return call


for _name in ("set", "get", "add", "wait", "check", "multi_get", "multi_set", "delete_key"):
    setattr(CountedStore, _name, _counted(_name))
