"""Passes changes of parameters to another process of the machine, which applies them and reports in the same memory.

    memory    one int64 for each patch: 0, then APPLIED or REFUSED; then the codes of the patches

Two patches with codes of 40 and 24 bytes: reports in bytes 0 to 15, codes in 16 to 55 and in 56 to 79.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from verl_mg.engines.ipc_payload import payload_of, shared_memory
from verl_mg.reshard.delta import apply_delta
from verl_mg.reshard.delta_transfer import Patch
from verl_mg.sharding.boxes import slices

APPLIED, REFUSED = 1, 2
REPORT_SECONDS = 600.0  # time limit of the other process; it has answered to the load before
_NUMBER_BYTES = 8


class PatchStaging:
    """Memory with the changes of an engine's rank."""

    def __init__(self, patches: Sequence[Patch], device: torch.device) -> None:
        places, end = [], _NUMBER_BYTES * len(patches)
        for patch in patches:
            places.append((patch.parameter, patch.box, end, len(patch.code)))
            end += len(patch.code)
        self._memory = shared_memory(max(end, _NUMBER_BYTES), device)
        self._reports = self._memory[: _NUMBER_BYTES * len(patches)].view(torch.int64)
        self._reports.zero_()
        for patch, (_, _, start, size) in zip(patches, places, strict=True):
            self._memory[start : start + size] = patch.code
        self._places = json.dumps({"patches": places})

    def payload(self) -> str:
        """Returns the handle of the memory, for `open_payload`."""
        return payload_of(self._places, self._memory)

    def intact(self) -> bool:
        """Returns whether all patches gave the values of their senders; waits for the other process."""
        deadline = time.monotonic() + REPORT_SECONDS
        # The answer of the engine is not enough: its other pipeline stages may still be applying patches.
        while time.monotonic() < deadline:
            reports = self._reports.cpu()
            if bool((reports != 0).all()):
                return bool((reports == APPLIED).all())
            time.sleep(0.001)
        return False


def has_patches(places: str) -> bool:
    """Returns whether the memory of a payload contains patches, and not tensors."""
    return places.startswith('{"patches"')


def apply_payload(places: str, memory: Tensor, memory_of: Callable[[str], Tensor]) -> None:
    """Applies the patches of a payload to parameters and reports on each; called in the other process."""
    patches = json.loads(places)["patches"]
    reports = memory[: _NUMBER_BYTES * len(patches)].view(torch.int64)
    for number, (name, box, start, size) in enumerate(patches):
        target = memory_of(name)[slices(tuple(map(tuple, box)))]
        # The result is read on the host, so the writes before it are complete.
        reports[number] = APPLIED if apply_delta(memory[start : start + size], target) else REFUSED
