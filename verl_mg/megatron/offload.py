"""What training keeps on the device, moved to the host while others need the room."""

from __future__ import annotations

import torch
from torch import Tensor, UntypedStorage

from verl_mg.megatron.state import as_bytes, gradient_buffers, kept_storages, storages, to_host
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
        network = self._trainer.network
        if self._away or not network.present:
            return
        scratch = storages(gradient_buffers(network))
        kept = kept_storages(network, self._trainer.optimizer)
        self._away = [(storage, storage.nbytes(), None) for storage in scratch]
        self._away += [(storage, storage.nbytes(), to_host(storage)) for storage in kept]
        torch.cuda.synchronize()
        for storage, _, _ in self._away:
            storage.resize_(0)
        torch.cuda.empty_cache()

    def come_back(self) -> None:
        """Take the device's memory again, with the values of before; gradients are zero."""
        away, self._away = self._away, []
        for storage, size, host in away:
            storage.resize_(size)
            if host is None:
                as_bytes(storage).zero_()
            else:
                as_bytes(storage).copy_(host, non_blocking=True)
        torch.cuda.synchronize()
