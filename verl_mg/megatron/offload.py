"""What training keeps on the device, moved to the host while others need the room."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from verl_mg.megatron.trainer import Trainer


class HostCopy:
    """The storages of a trainer: parameters, optimizer state, gradient buffers. Tensors and views stay the same ones.

    Gradients are not kept: an update begins by clearing them.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._away: list[tuple[UntypedStorage, int, Tensor | None]] = []

    def leave(self) -> None:
        """Copy to the host, pinned where there is a GPU, and free the device; nothing where nothing is there."""
        if self._away or not self._trainer.network.present:
            return
        scratch = {storage.data_ptr() for storage in _storages(_gradients(self._trainer))}
        for storage in _storages(chain(_gradients(self._trainer), _kept(self._trainer))):
            host = None if storage.data_ptr() in scratch else _to_host(storage)
            self._away.append((storage, storage.nbytes(), host))
        torch.cuda.synchronize()
        for storage, _, _ in self._away:
            storage.resize_(0)
        torch.cuda.empty_cache()

    def come_back(self) -> None:
        """Take the device's memory again, with the values of before; gradients are zero."""
        away, self._away = self._away, []
        for storage, size, host in away:
            storage.resize_(size)
            place = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            if host is None:
                place.zero_()
            else:
                place.copy_(host, non_blocking=True)
        torch.cuda.synchronize()


def _to_host(storage: UntypedStorage) -> Tensor:
    place = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return torch.empty_like(place, device="cpu", pin_memory=storage.is_cuda).copy_(place, non_blocking=True)


def _kept(trainer: Trainer) -> Iterator[Tensor]:
    for chunk in trainer.network.chunks:
        yield from chunk.parameters()
        yield from chunk.buffers()
    for optimizer in getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer]):
        inner: Any = optimizer.optimizer
        for group in inner.param_groups:
            yield from group["params"]
        for state in inner.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _gradients(trainer: Trainer) -> Iterator[Tensor]:
    for chunk in trainer.network.runnable:
        model: Any = chunk
        for buffer in (*model.buffers, *model.expert_parallel_buffers):
            yield buffer.grad_data


def _storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """Each storage once, those of no byte left out."""
    found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return [storage for storage in found.values() if storage.nbytes()]
