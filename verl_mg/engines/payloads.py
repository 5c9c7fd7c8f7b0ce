"""Passes tensors, or changes of parameters, to another process of the machine as one memory handle.

A message has the handle, whose size does not depend on the tensors; their places and values are in the memory:

    rank: Staging(shards) --> tensors are filled --> payload() ==base64 text==> engine: open_payload --> named_views

    memory    size of a JSON text in 8 bytes, the text, at the next multiple of ALIGNMENT the data

The handle is what `torch.multiprocessing` pickles: a name in shared memory on the CPU, a CUDA IPC handle on a GPU. It
is sent to the engine that this job has started, over a private socket; this side unpickles nothing, and the other side
(`open_payload`) nothing else.

torch keeps shared memory of a GPU until the other process has closed it, also when `Staging` is gone. Memory that a
process never opened, because it ended, stays allocated until this process ends.

Changes are patches, which the other process applies; it reports in the same memory.

    data      one int64 for each patch: 0, then APPLIED or REFUSED; then the codes of the patches

Two patches with codes of 40 and 24 bytes: reports in bytes 0 to 15, codes in 16 to 55 and in 56 to 79.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from math import prod
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from verl_mg.device import without_expandable_segments
from verl_mg.reshard.delta import Patch, apply_delta
from verl_mg.sharding.boxes import Shard, described, slices

# Offsets of tensors in the memory are multiples of this number of bytes, as torch's allocator aligns them.
ALIGNMENT = 256
APPLIED, REFUSED = 1, 2
REPORT_SECONDS = 600.0  # time limit of the other process; it has answered to the load before
_NUMBER_BYTES = 8


class Staging:
    """Memory in which a rank assembles the shards of an engine's rank; padding is zero, other values are undefined.

    Chunks of an update pass the same `min_bytes`, since torch's allocator gives memory of the same size again.
    """

    def __init__(
        self,
        shards: Mapping[str, Shard],
        dtypes: Mapping[str, torch.dtype],
        device: torch.device,
        min_bytes: int = 0,
    ) -> None:
        places, size = _places(shards, dtypes)
        self._memory = SharedMemory(places, size, device, min_bytes)
        # The other process copies whole parameters; tensors have the dimensions of the shards.
        self.tensors = {name: shards[name].described(view) for name, view in named_views(places, self._memory.data)}
        for name, shard in shards.items():
            if shard.padding:
                self.tensors[name].zero_()

    def payload(self) -> str:
        """Returns the handle of the memory, for `open_payload`."""
        return self._memory.payload()


class SharedMemory:
    """Memory that another process can open, with a JSON text and `data`, uint8 with undefined values."""

    def __init__(self, places: str, size: int, device: torch.device, min_bytes: int = 0) -> None:
        text, start = places.encode(), _data_start(len(places))
        # GPU: memory of the device outside of expandable segments, whose handle CUDA shares; on the CPU a file in
        # shared memory.
        # GPU-TEST: tests/engines/test_payloads.py::test_staging_on_a_gpu_is_allocated_without_expandable_segments,
        # tests/engines/test_payloads.py::test_open_payload_on_a_gpu_takes_the_index_of_this_process
        # GPU-RAN: h200-1, h100-1
        # A process that opens expandable segments needs a system call that containers refuse.
        with without_expandable_segments() if device.type == "cuda" else nullcontext():
            self._whole = torch.empty(max(start + size, min_bytes), dtype=torch.uint8, device=device)
        if device.type == "cpu":
            with _by_name():
                self._whole.share_memory_()
        head = bytearray(len(text).to_bytes(_NUMBER_BYTES, "little") + text)
        self._whole[: len(head)] = torch.frombuffer(head, dtype=torch.uint8)
        self.data = self._whole[start:]

    def payload(self) -> str:
        """Returns the handle in base64. It can be opened once, and the memory must exist until then."""
        buffer = io.BytesIO()
        with _by_name():
            ForkingPickler(buffer).dump(self._whole)
        return base64.b64encode(buffer.getvalue()).decode()


def open_payload(payload: str, device: torch.device) -> tuple[str, Tensor]:
    """Opens the memory of a payload in another process, and returns the arguments of `named_views`; called there.

    `device` is the memory's device under its index in that process.
    """
    memory: Tensor = _HandleUnpickler(io.BytesIO(base64.b64decode(payload)), device).load()
    size = int(memory[:_NUMBER_BYTES].view(torch.int64))
    text = memory[_NUMBER_BYTES : _NUMBER_BYTES + size].cpu().numpy().tobytes()
    return text.decode(), memory[_data_start(size) :]


def _data_start(text_bytes: int) -> int:
    return -(-(_NUMBER_BYTES + text_bytes) // ALIGNMENT) * ALIGNMENT


class _HandleUnpickler(pickle.Unpickler):
    """Unpickles a handle and nothing else: pickles name the functions that they call."""

    GLOBALS: Mapping[tuple[str, str], Any] = {
        (kind.__module__, kind.__name__): kind
        for kind in (
            torch.Size,
            torch.storage.TypedStorage,
            torch.storage.UntypedStorage,
            reductions.rebuild_storage_filename,
            reductions.rebuild_tensor,
            reductions.rebuild_typed_storage,
        )
    }
    DEVICE_ARGUMENT = 6  # position of the device's index among the arguments of `rebuild_cuda_tensor`

    def __init__(self, file: io.BytesIO, device: torch.device) -> None:
        super().__init__(file)
        self._device = device

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Tensor"):
            return Tensor
        if (module, name) == ("torch", "uint8"):
            return torch.uint8
        if (module, name) == (reductions.__name__, "rebuild_cuda_tensor"):
            return self._rebuild_on_device
        try:
            return self.GLOBALS[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a handle") from None

    def _rebuild_on_device(self, *arguments: Any) -> Tensor:
        # The handle has the device's index in the process that made it, which may see other devices.
        at = self.DEVICE_ARGUMENT
        rebuild: Callable[..., Tensor] = reductions.rebuild_cuda_tensor
        return rebuild(*arguments[:at], self._device.index, *arguments[at + 1 :])


def named_views(places: str, memory: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, view of the data) of each tensor.

    `places` is a JSON list of (name, dtype, shape, offset in bytes). Tensors a (2, 3) in float32 and b (4,) in bfloat16
    need 264 bytes: [["a", "float32", [2, 3], 0], ["b", "bfloat16", [4], 256]].
    """
    for name, dtype_name, shape, start in json.loads(places):
        dtype = getattr(torch, dtype_name)
        yield name, memory[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)


def staging_bytes(shards: Mapping[str, Shard], dtypes: Mapping[str, torch.dtype]) -> int:
    """Returns the size of the memory for shards."""
    places, size = _places(shards, dtypes)
    return _data_start(len(places)) + size


def _places(shards: Mapping[str, Shard], dtypes: Mapping[str, torch.dtype]) -> tuple[str, int]:
    """Returns the argument `places` of `named_views` for tensors one after the other, and the bytes of all."""
    places, end = [], 0
    for name, shard in shards.items():
        start = -(-end // ALIGNMENT) * ALIGNMENT
        places.append((name, str(dtypes[name]).removeprefix("torch."), shard.parameter_shape, start))
        end = start + prod(shard.shape) * dtypes[name].itemsize
    return json.dumps(places), end


@contextmanager
def _by_name() -> Iterator[None]:
    # Shares memory by file names inside this context: an unrelated process cannot open a file descriptor.
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


class PatchStaging:
    """Memory with the changes of an engine's rank."""

    def __init__(self, patches: Sequence[Patch], shards: Mapping[str, Shard], device: torch.device) -> None:
        places, end = [], _NUMBER_BYTES * len(patches)
        for patch in patches:
            places.append((patch.parameter, shards[patch.parameter].order, patch.box, end, len(patch.code)))
            end += len(patch.code)
        self._memory = SharedMemory(json.dumps({"patches": places}), end, device)
        data = self._memory.data
        self._reports = data[: _NUMBER_BYTES * len(patches)].view(torch.int64)
        self._reports.zero_()
        for patch, (*_, start, size) in zip(patches, places, strict=True):
            data[start : start + size] = patch.code

    def payload(self) -> str:
        """Returns the handle of the memory, for `open_payload`."""
        return self._memory.payload()

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
    for number, (name, order, box, start, size) in enumerate(patches):
        target = described(memory_of(name), order)[slices(tuple(map(tuple, box)))]
        # The result is read on the host, so the writes before it are complete.
        reports[number] = APPLIED if apply_delta(memory[start : start + size], target) else REFUSED
