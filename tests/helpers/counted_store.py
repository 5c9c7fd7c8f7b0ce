"""Store that records the requests it gets."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import HashStore, Store


class CountedStore(Store):
    """Store of one process; `requests` are the names of the methods that were called, in order."""

    host, port = "here", 0

    def __init__(self, inner: Store | None = None) -> None:
        super().__init__()
        self._inner, self.requests = inner or HashStore(), []

    def set(self, key: str, value: str) -> None:
        self.requests.append("set")
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        self.requests.append("get")
        return self._inner.get(key)

    def add(self, key: str, amount: int) -> int:
        self.requests.append("add")
        return self._inner.add(key, amount)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self.requests.append("wait")
        self._inner.wait(keys, timeout or timedelta(minutes=1))

    def check(self, keys: list[str]) -> bool:
        self.requests.append("check")
        return self._inner.check(keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.requests.append("multi_get")
        return self._inner.multi_get(keys)

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        self.requests.append("multi_set")
        self._inner.multi_set(keys, values)

    def delete_key(self, key: str) -> bool:
        self.requests.append("delete_key")
        return self._inner.delete_key(key)

    def has_extended_api(self) -> bool:
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        """The store answers at once."""

    def clone(self) -> CountedStore:
        return self
