"""Images of rows on their way to the ranks that compute them: each image once to a rank, however many rows have it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from verl_mg.batch import Batch
from verl_mg.distributed.collectives import all_to_all_bytes
from verl_mg.images import Image, RowImages, distinct_images
from verl_mg.rows.index import RowIndex


def gather_images(
    batch: Batch, index: RowIndex, wanted: Sequence[Sequence[int]], takes: Sequence[bool] | None = None
) -> list[RowImages] | None:
    """Transfers the images of rows to the ranks that want the rows; all ranks call it together.

    A rank gets the encoded bytes of an image once from each owner of rows that have it. `wanted` has the row numbers
    of each rank, `takes` whether it takes images. The result has the images of `wanted[this rank]`, in that order; None
    where no rank has images, or this one takes none.
    """
    if not index.has_images:  # known on all ranks, so that batches without images need no exchange
        return None
    rank, ranks = dist.get_rank(), dist.get_world_size()
    takes = takes or [True] * ranks
    local = _Local(batch, index)
    outgoing = [local.pack(wanted[other] if takes[other] and other != rank else ()) for other in range(ranks)]
    received = all_to_all_bytes(outgoing)
    if not takes[rank]:
        return None
    images = local.of(wanted[rank])
    for data in received:
        images |= _unpack(data)
    return [images[row] for row in wanted[rank]]


class _Local:
    """Images of the rows that this rank owns, by their numbers in the index."""

    def __init__(self, batch: Batch, index: RowIndex) -> None:
        rows = index.rows_of(dist.get_rank())
        self._images = dict(zip(rows, batch.images or [()] * len(rows), strict=True))

    def of(self, rows: Iterable[int]) -> dict[int, RowImages]:
        return {row: self._images[row] for row in rows if row in self._images}

    def pack(self, rows: Iterable[int]) -> Tensor:
        """Returns uint8: the size of a JSON text, this text with the keys of each row, and the images one by one."""
        chosen = self.of(rows)
        images = distinct_images(chosen.values())
        keys = {row: [image.key for image in of_row] for row, of_row in chosen.items()}
        text = json.dumps({"rows": keys, "sizes": [len(image.data) for image in images.values()]}).encode()
        parts = [len(text).to_bytes(8, "little"), text, *(image.data for image in images.values())]
        return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8) if chosen else torch.empty(0).byte()


def _unpack(data: Tensor) -> dict[int, RowImages]:
    """Returns the images of each row that `_Local.pack` has packed."""
    if not data.numel():
        return {}
    content = data.numpy().tobytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    images = {}
    for size in header["sizes"]:
        image = Image(content[start : start + size])
        images[image.key] = image
        start += size
    return {int(row): tuple(images[key] for key in keys) for row, keys in header["rows"].items()}
