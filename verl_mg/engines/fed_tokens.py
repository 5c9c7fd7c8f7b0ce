"""Reports of engines about the tokens that were fed to the model: their experts, and the keys that they attended to.

They have an entry for each token from the first prompt token on, except the last one, which only the next would follow:

    prompt 5 8, response 2 7     fed 5 8 2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeVar

from verl_mg.engines.sampled_support import TokenEntries, join_entries
from verl_mg.lazy_import import lazy_import

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor
else:
    np = lazy_import("numpy")
    torch = lazy_import("torch")

CHUNK_BYTES = 2**27  # of the keys of some tokens as one byte each


@dataclass(frozen=True, eq=False)
class SelectedKeys(TokenEntries):
    """Keys that the fed tokens attended to, as bits, see `training.selected_keys`.

    `entries` are (sum(sizes), layers) uint8, `sizes` 0 for tokens that attended to all keys up to themselves.
    """

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, tokens: slice) -> Self:
        start, stop, _ = tokens.indices(len(self))
        return self.part(start, max(start, stop))

    @classmethod
    def of_ids(cls, ids: np.ndarray, layers: Sequence[int]) -> SelectedKeys:
        """Returns the selections of some of all layers (tokens, all layers, top_k) by position.

        ValueError where a token that has more than top_k keys does not have top_k different ones up to itself.
        """
        num_tokens, _, top_k = ids.shape
        sizes = np.arange(num_tokens, dtype=np.int32) // 8 + 1
        sizes[:top_k] = 0
        entries, start = [np.empty((0, len(layers)), dtype=np.uint8)], top_k
        while start < num_tokens:
            # In chunks: a byte for each key of all tokens would be the square of their number.
            stop = min(num_tokens, start + max(1, CHUNK_BYTES // (len(layers) * num_tokens)))
            chosen, positions = ids[start:stop, layers], np.arange(start, stop)[:, None, None]
            if ((chosen < 0) | (chosen > positions)).any():
                token = start + int(((chosen < 0) | (chosen > positions)).any((1, 2)).argmax())
                raise ValueError(f"the selected keys {ids[token].min()} to {ids[token].max()} of token {token}")
            is_key = np.zeros((stop - start, len(layers), 8 * int(sizes[stop - 1])), dtype=bool)
            np.put_along_axis(is_key, chosen, True, axis=2)
            if (equal := is_key.sum(2) != top_k).any():
                raise ValueError(f"the same selected key more than once for token {start + int(equal.any(1).argmax())}")
            packed = np.packbits(is_key, axis=2, bitorder="little").swapaxes(1, 2)
            entries.append(packed[np.arange(packed.shape[1]) < sizes[start:stop, None]])
            start = stop
        return cls(torch.from_numpy(sizes), torch.from_numpy(np.concatenate(entries)))


FedReport = TypeVar("FedReport", "Tensor", SelectedKeys)


def first_fed(report: FedReport | None, count: int) -> FedReport | None:
    """Returns what is reported of the first tokens."""
    return None if report is None else report[:count]


def without_last(report: FedReport | None, count: int) -> FedReport | None:
    """Returns what is reported of all but the last fed tokens."""
    return None if report is None else report[: max(len(report) - count, 0)]


def continued(before: FedReport | None, whole: FedReport | None) -> FedReport | None:
    """Returns the report of a continuation, of its whole context, with the earlier tokens as reported before.

    The weights may be newer now, and the earlier tokens were generated with the choices reported then.
    """
    if before is None or whole is None:  # None of a continuation: nothing more was fed
        return whole if before is None else before
    parts: Any = [before, whole[len(before) :]]
    joined: Any = join_entries([(0, part) for part in parts]) if isinstance(before, SelectedKeys) else torch.cat(parts)
    return joined
