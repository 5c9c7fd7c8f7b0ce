"""Whether a batch is as it was."""

from __future__ import annotations

from collections.abc import Iterable

from verl_mg.batch import Batch


class Fingerprint:
    """Columns and images of a batch as they are now; another one is equal as long as none is set or edited in place."""

    def __init__(self, batch: Batch, names: Iterable[str]) -> None:
        # The tensors themselves, not their addresses: a new tensor could get the address of one that is gone.
        # torch counts edits in place in `_version`.
        columns = {"": batch.lengths} | {name: batch[name] for name in names if name in batch}
        self._columns = {name: (tensor, tensor._version) for name, tensor in columns.items()}
        self._images = batch.images

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Fingerprint) or self._columns.keys() != other._columns.keys():
            return False
        if self._images is not other._images:
            return False
        pairs = ((column, other._columns[name]) for name, column in self._columns.items())
        return all(tensor is latest and version == now for (tensor, version), (latest, now) in pairs)

    __hash__ = None  # type: ignore[assignment]
