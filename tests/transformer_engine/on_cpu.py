"""Transformer Engine without a GPU: its own Python, over the extension of `tests.transformer_engine.extension`.

    with SeparateRanks(load, installed()) as ranks:
        ranks.run(4, work, argument)          # as `RankPool.run`, in processes that have Transformer Engine

Real are its modules and megatron-core's on top of them: linear layers, norms, grouped products, attention by products
of matrices. Not covered: kernels of CUDA and Triton, and what only they have, such as FP8 and the fused permutation.
"""

import importlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
UV = Path(sys.prefix) / "bin" / "uv"
TRITON = ("triton", "triton.language", "triton.language.core", "triton.language.standard")
WITHOUT_ONNX = "transformer_engine.pytorch.onnx_extensions"


def pinned() -> str:
    """The version of GPU installations; with Python 3.11 the newest one that megatron-core 0.16.1 allows."""
    if sys.version_info < (3, 12):
        return "2.11.0"
    lines = (ROOT / "launch" / "requirements-gpu.txt").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("transformer-engine==")]
    return line.removeprefix("transformer-engine==")


def installed() -> Path:
    """Folder with the pinned version's Python, 1.2 MB; installed once on a machine, where the index can be reached."""
    folder = Path(tempfile.gettempdir()) / f"transformer-engine-{pinned()}-{os.getuid()}"
    if not folder.exists():
        if not UV.exists():
            pytest.skip("uv is not installed, which installs Transformer Engine's Python")
        partial = Path(tempfile.mkdtemp(dir=folder.parent))
        package = f"transformer-engine=={pinned()}"
        command = [UV, "pip", "install", "--quiet", "--no-deps", "--target", str(partial), package]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"{package} cannot be installed: {done.stderr.strip()}")
        partial.rename(folder)
    assert folder.stat().st_uid == os.getuid(), f"{folder} belongs to another user"
    return folder


def load(folder: Path) -> None:
    """Imports Transformer Engine from the folder and then megatron-core, in a process that has neither."""
    assert not {"transformer_engine", "megatron"} & sys.modules.keys()
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # it loads no library of CUDA
    os.environ["NVTE_UNFUSED_ATTN"] = "1"  # its products of matrices are here in place of cuDNN's kernels
    sys.path.insert(0, str(folder))
    import torch
    import torch._dynamo  # asks for the real Triton

    from tests.transformer_engine import extension

    absent = {name: _Absent(name) for name in (*TRITON, WITHOUT_ONNX)}
    sys.modules |= absent | {"transformer_engine_torch": extension.module(pinned())}
    common = importlib.import_module("transformer_engine.common")
    common.load_framework_extension = lambda framework: None
    importlib.import_module("transformer_engine.pytorch")
    for name in TRITON:
        del sys.modules[name]

    from verl_mg.training import packed_attention

    kernels: Any = packed_attention
    kernels.has_ragged_kernel = lambda *_: True
    # torch's own kernels need a GPU.
    kernels._with_ragged_kernel = kernels.attend_by_blocks = kernels._run_by_run

    _pass_for_a_gpu(torch)


class _Absent(ModuleType):
    """A module of which only decorators are used, which leave functions as they are."""

    __version__ = "3.0.0"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, _: object) -> Any:
        return self

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) and not options else self


class _Changed:
    """A module with other values of some names."""

    def __init__(self, module: Any, **values: Any) -> None:
        vars(self).update(values, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_module"], name)


def _pass_for_a_gpu(torch: Any) -> None:
    """Transformer Engine alone sees a GPU, on which all tensors are."""
    cuda = _Changed(
        torch.cuda,
        is_available=lambda: True,
        get_device_properties=lambda *_: SimpleNamespace(major=9, minor=0, multi_processor_count=1),
        is_current_stream_capturing=lambda: False,
        nvtx=SimpleNamespace(range_push=lambda *_: None, range_pop=lambda *_: None),
    )
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    seen = _Changed(torch, cuda=cuda)
    for name, module in list(sys.modules.items()):
        if name.startswith("transformer_engine.") and getattr(module, "torch", None) is torch:
            module.torch = seen  # type: ignore[attr-defined]
    torch.Tensor.is_cuda = property(lambda _: _called_by_transformer_engine())
    move = torch.Tensor.to

    def to(self: Any, *arguments: Any, **options: Any) -> Any:
        options |= {"device": "cpu"} if str(options.get("device")).startswith("cuda") else {}
        return move(self, *("cpu" if str(each).startswith("cuda") else each for each in arguments), **options)

    torch.Tensor.to = to


def _called_by_transformer_engine() -> bool:
    name: str = sys._getframe(2).f_globals["__name__"]
    return name.startswith("transformer_engine.")
