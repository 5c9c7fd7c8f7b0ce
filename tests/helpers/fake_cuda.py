"""A machine with a GPU that is a CPU: the code paths of CUDA in a process of their own, without a driver.

    with FakeCudaProcess() as process:
        process.run(function, argument)        # in a fork, inside `cuda_tensors.FakeCuda`, which it gets first

In that process `torch.cuda` reports one GPU, tensors on `cuda` are those of `cuda_tensors`, and process groups are
torch's `fake` ones, of any size. torch's own CUDA hooks and device guard, which ask the driver, are replaced: the
hooks before torch is imported, since torch keeps the first ones, and the guard after it, since torch registers its
own. So it works with torch for CPUs and for CUDA. Not covered: kernels and their accuracy, streams, NCCL, memory.
"""

import ctypes
import gc
import hashlib
import importlib
import importlib.util
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from unittest import mock

from tests.helpers.interpreted_triton import use_interpreter

ROOT = Path(__file__).parents[2]
ORDERING = ("synchronize", "empty_cache", "ipc_collect")
"""Functions of torch.cuda that wait for work or free memory."""
SOURCE = r"""
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
using c10::Device, c10::DeviceIndex, c10::Stream;
static const Device first_gpu(c10::kCUDA, 0);
struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::kCUDA> {
  Device exchangeDevice(Device) const override { return first_gpu; }
  Device getDevice() const override { return first_gpu; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, first_gpu); }
  Stream getNewStream(Device, int) const override { return Stream(Stream::DEFAULT, first_gpu); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, first_gpu); }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};
struct Hooks final : at::CUDAHooksInterface {
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};
extern "C" void register_hooks() {
  at::CUDAHooksRegistry()->Register("CUDAHooks", [](at::CUDAHooksArgs) -> std::unique_ptr<at::CUDAHooksInterface> {
    return std::make_unique<Hooks>();
  }, c10::REGISTRY_PREFERRED);
}
extern "C" void register_guard() { static c10::impl::DeviceGuardImplRegistrar registrar(c10::kCUDA, new Guard()); }
"""


class FakeCudaProcess:
    """Process with the fake GPU, in whose forks functions are run."""

    def __enter__(self) -> Self:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        # Kernels of Triton are interpreted, on the values that tensors have in host memory.
        options = {"TORCHDYNAMO_DISABLE": "1", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        environment = os.environ | {"PYTHONPATH": path} | options
        command = [sys.executable, "-m", "tests.helpers.fake_cuda"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate()

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function of a module with the `FakeCuda` mode and the arguments, and returns its result."""
        pipes = self._process.stdin, self._process.stdout
        assert pipes[0] and pipes[1]
        pickle.dump((function.__module__, function.__name__, arguments), pipes[0])
        pipes[0].flush()
        succeeded, value = pickle.load(pipes[1])
        assert succeeded, value
        return value


@contextmanager
def recorded_cuda_calls() -> Iterator[list[str]]:
    """Context manager: the list grows by the name of each call that orders work or memory of a GPU, in any process.

    Streams and events count as "stream.wait_event", "event.record" and so on. The calls themselves do nothing.
    """
    import torch

    calls: list[str] = []

    class Recorded(_Complete):
        kind = ""

        def __getattr__(self, name: str) -> Callable[..., Any]:
            return lambda *_, **__: calls.append(f"{self.kind}.{name}") or self

    stream, event = (type(kind, (Recorded,), {"kind": kind}) for kind in ("stream", "event"))
    replaced: dict[str, Any] = {name: lambda *_, name=name, **__: calls.append(name) for name in ORDERING}
    replaced |= {"Event": event} | dict.fromkeys(("Stream", "stream", "current_stream", "default_stream"), stream)
    with ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        yield calls


def library() -> ctypes.CDLL:
    """Compiles the replacement of torch's CUDA parts, once for each version of torch; torch is not imported."""
    spec = importlib.util.find_spec("torch")
    assert spec and spec.origin
    torch = Path(spec.origin).parent
    version = (torch / "version.py").read_text()
    name = hashlib.sha256((SOURCE + version + str(torch)).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"fake-cuda-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    assert folder.stat().st_uid == os.getuid(), f"{folder} belongs to another user"
    file = folder / f"{name}.so"
    if not file.exists():
        partial = file.with_suffix(f".{os.getpid()}")
        link = [f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}", "-lc10", "-ltorch_cpu"]
        options = ["-shared", "-fPIC", "-std=c++20", "-x", "c++", "-", f"-I{torch / 'include'}", "-o", str(partial)]
        subprocess.run(["g++", *options, *link], input=SOURCE.encode(), check=True)
        partial.rename(file)
    return ctypes.CDLL(str(file))


def main() -> None:
    """Serves `FakeCudaProcess.run`."""
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed goes to stderr
    built = library()
    built.register_hooks()
    import torch
    import torch._dynamo  # it refers to the real torch.compile

    built.register_guard()
    use_interpreter()
    torch.set_num_threads(1)
    torch.cuda.is_available = lambda: True
    torch.compile = importlib.import_module("tests.helpers.cuda_tensors").compiled
    # Processes that are forked import nothing again, and look through none of it for garbage.
    for module in ("verl_mg.training.vocabulary_kernels", "tests.megatron.fake_cuda_cases"):
        importlib.import_module(module)
    _replace_cuda_functions()
    gc.collect()
    gc.freeze()
    while True:
        try:
            call = pickle.load(requests)
        except EOFError:
            return
        child = os.fork()
        if child == 0:
            replies.write(pickle.dumps(_result(*call)))
            replies.flush()
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            pickle.dump((False, "the process died"), replies)
            replies.flush()


def _result(module: str, name: str, arguments: tuple[Any, ...]) -> tuple[bool, Any]:
    from tests.helpers.cuda_tensors import FakeCuda

    try:
        function = getattr(importlib.import_module(module), name)
        with FakeCuda() as mode:
            return True, function(mode, *arguments)
    except BaseException:
        return False, traceback.format_exc()


class _Complete:
    """Stream, event or context of a device whose work is always complete."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_, **__: self

    def query(self) -> bool:
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


def _replace_cuda_functions() -> None:
    import torch
    from torch import nn
    from torch.utils._pytree import tree_map

    cuda: Any = torch.cuda

    def nothing(*_: Any, **__: Any) -> None: ...

    cuda.device_count = lambda: 1
    cuda.current_device = lambda: torch.device("cuda", 0)
    cuda.get_device_capability, cuda.get_device_name = lambda *_: (9, 0), lambda *_: "fake GPU"
    for name in ("set_device", "synchronize", "empty_cache", "_lazy_init", "_lazy_call", "manual_seed"):
        setattr(cuda, name, nothing)
    for name in ("Stream", "Event", "current_stream", "default_stream", "stream", "device"):
        setattr(cuda, name, _Complete)
    cuda.get_rng_state, cuda.set_rng_state = lambda *_, **__: torch.get_rng_state(), nothing
    create = torch.tensor

    def tensor(data: Any, *arguments: Any, device: Any = None, **options: Any) -> Any:
        numbers = tree_map(lambda x: x.item() if isinstance(x, torch.Tensor) and x.is_cuda else x, data)
        created = create(numbers, *arguments, **options)
        return created if device is None else created.to(device)

    torch.tensor = tensor
    nn.Module.to = _module_to_cuda  # type: ignore[method-assign]

    from megatron.core.tensor_parallel import random

    generators: Any = random
    generators._get_cuda_rng_state, generators._set_cuda_rng_state = lambda *_, **__: torch.get_rng_state(), nothing


def _module_to_cuda(module: Any, *_: Any, **__: Any) -> Any:
    """Replaces parameters and buffers of the CPU: they cannot become tensors of another class in place."""
    from torch import nn

    for part in module.modules():
        for name, weight in part._parameters.items():
            if weight is not None and weight.is_cpu:
                moved = nn.Parameter(weight.detach().to("cuda"), requires_grad=weight.requires_grad)
                part._parameters[name] = moved
                vars(moved).update(vars(weight))
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_cpu:
                part._buffers[name] = buffer.to("cuda")
    return module


if __name__ == "__main__":
    main()
