"""Imports of libraries without what takes seconds and a job may never call.

    with quick_imports():
        import transformers.modeling_utils    # without accelerate, SciPy, torchvision and the compiler of torch

What is left out is imported when one of its functions is called.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

DEFERRED = (
    # transformers calls it to place a model on several devices.
    *("accelerate", "accelerate.hooks", "accelerate.utils", "accelerate.utils.modeling"),
    # Of torchvision transformers uses the transforms.
    *("torchvision.datasets", "torchvision.models", "torchvision.ops"),
    # Losses of other models than language models, which import SciPy.
    *(
        f"transformers.loss.loss_{kind}"
        for kind in (
            *("d_fine", "deformable_detr", "deimv2", "for_object_detection", "grounding_dino", "lw_detr"),
            *("rf_detr", "rnnt", "rt_detr", "tdt"),
        )
    ),
)
"""Modules of which libraries import functions that a job may never call."""
COMPILER = ("torch._dynamo", "torch._dynamo._trace_wrapped_higher_order_op", "torch._dynamo.utils")
"""Modules of torch's compiler from which libraries take decorators; deferred where there is no GPU."""
DECORATORS = ("allow_in_graph", "assume_constant_result", "disable")
UNUSED = ("wandb", "torch.utils.tensorboard")  # trackers of megatron-core's timers, which nothing starts


@contextmanager
def quick_imports() -> Iterator[None]:
    """Context manager: what is imported leaves out DEFERRED until it is called, and UNUSED."""
    import torch

    compiles = torch.cuda.is_available()
    deferred = DEFERRED if compiles else (*DEFERRED, *COMPILER)
    replaced: dict[str, _Deferred | None] = {name: _Deferred(name) for name in deferred} | dict.fromkeys(UNUSED)
    replaced = {name: module for name, module in replaced.items() if name not in sys.modules}
    patches: list[tuple[Any, str, Any]] = [(importlib.metadata, "packages_distributions", _packages_distributions)]
    # GPU: functions of libraries are compiled when they are first called, or excluded from that.
    # GPU-TEST: tests/megatron/test_cpu_shim.py::test_torch_compile_imported_after_the_cpu_platform_compiles,
    # tests/megatron/test_fake_cuda.py::test_compiled_functions_equal_themselves_and_are_compiled_once_for_all_sizes
    # GPU-RAN: h200-1
    # Functions are left as they are written, because to decorate them torch imports its compiler.
    if not compiles:
        patches += [(torch, "compile", _undecorated), (torch.compiler, "disable", _undecorated)]
        _call_without_compiler()
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    sys.modules.update(replaced)  # type: ignore[arg-type]  # None: an import raises ImportError
    for owner, name, value in patches:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
        for name, module in replaced.items():
            if sys.modules.get(name) is module:
                sys.modules.pop(name, None)
            if module:
                module.is_closed = True


def _call_without_compiler() -> None:
    """Lets functions that torch excludes from compilation run without an import of the compiler at their first call."""
    from torch.optim import Adam, AdamW, Optimizer
    from torch.utils import checkpoint

    # Names that a version of torch has not, or does not exclude, need nothing.
    excluded = [vars(Optimizer).get(name) for name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad")]
    for function in (*excluded, checkpoint.checkpoint):
        if plain := getattr(function, "__wrapped__", None):
            setattr(plain, "__dynamo_disable", plain)
    for kind in (Adam, AdamW):
        if plain := getattr(vars(kind).get("step"), "__wrapped__", None):
            kind.step = _as_differentiable(plain)  # type: ignore[method-assign]


def _as_differentiable(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an optimizer's step with gradients as its option says; torch's wrapper interrupts compilation too."""
    import torch

    @wraps(plain)
    def step(self: Any, *arguments: Any, **options: Any) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return plain(self, *arguments, **options)

    return step


class _Deferred(ModuleType):
    """A module whose functions import it when they are called; after the block any use imports it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.is_closed = False  # whether the block has ended
        self.__spec__ = ModuleSpec(name, None)  # by which libraries see that it is installed

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self.is_closed:
            return getattr(importlib.import_module(self.__name__), name)
        if name in DECORATORS:
            return _undecorated
        return partial(_call, self.__name__, name)


def _call(module: str, function: str, *arguments: Any, **options: Any) -> Any:
    return getattr(importlib.import_module(module), function)(*arguments, **options)


def _undecorated(function: Callable[..., Any] | None = None, **_: Any) -> Any:
    """Decorator that changes nothing, with and without options."""
    return function if function is not None else _undecorated


def _packages_distributions() -> Mapping[str, list[str]]:
    """Returns the distributions of each package, as `importlib.metadata` does; without a look at each of its files."""
    result: dict[str, list[str]] = {}
    for distribution in importlib.metadata.distributions():
        names = (distribution.read_text("top_level.txt") or "").split()
        if not names:  # RECORD: PATH,HASH,SIZE in each line
            paths = (distribution.read_text("RECORD") or "").splitlines()
            tops = {path.split(",", 1)[0].split("/", 1)[0] for path in paths}
            names = sorted(top.removesuffix(".py") for top in tops if "." not in top.removesuffix(".py"))
        for name in names:
            result.setdefault(name, []).append(distribution.metadata["Name"])
    return result
