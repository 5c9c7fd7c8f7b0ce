"""What the installed vLLM has of what engines on GPUs use: `python -m ...contract_probe ARGUMENTS`, in its environment.

ARGUMENTS is a list of keyword arguments of `AsyncEngineArgs` as JSON. Prints one JSON object, see `main`.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace as Object
from typing import Any, get_args

import torch
import vllm
from vllm.config import CacheConfig
from vllm.config.kernel import MoEBackend
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.attention import set_default_quant_scales
from vllm.utils.mem_utils import MemorySnapshot
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.worker import gpu_worker
from vllm.v1.worker.utils import request_memory

from verl_mg.engines.vllm import internals
from verl_mg.engines.vllm.arguments import WORKER_EXTENSION

SAMPLER, WORKER = "v1/worker/gpu/sample/sampler.py", "v1/worker/gpu_worker.py"
FLASHINFER = "v1/attention/backends/flashinfer.py"
METHODS = ("sleep", "wake_up", "release_kv_cache_memory", "pause_generation", "resume_generation", "reset_prefix_cache",
           "update_weight_version", "collective_rpc", "abort")  # fmt: skip


def tree(file: str) -> ast.Module:
    return ast.parse((Path(vllm.__file__).parent / file).read_text(encoding="utf-8"))


def sampler_contract() -> dict[str, Any]:
    """The method of the second model runner's sampler that is wrapped: parameters, result, and how it is called."""
    (sampler,) = (node for node in tree(SAMPLER).body if isinstance(node, ast.ClassDef) and node.name == "Sampler")
    methods = {node.name: node for node in sampler.body if isinstance(node, ast.FunctionDef)}
    wrapped = methods["_sample_random"]
    (returned,) = (node.value for node in ast.walk(wrapped) if isinstance(node, ast.Return))
    calls = [
        node for node in ast.walk(methods["sample"])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "_sample_random"
    ]  # fmt: skip
    return {
        "first": wrapped.args.args[1].arg,
        "returns": ast.unparse(returned),
        "keywords": [len(call.keywords) for call in calls],
    }


def requested(free: Sequence[int], fraction: float) -> dict[str, list[int | str]]:
    """The bytes that a worker takes with so much of 80 GiB free, by vLLM's function and as our workers have it."""

    def result(request: Callable[..., int], free: int) -> int | str:
        snapshot = MemorySnapshot(device="cuda:0", free_memory=free, total_memory=80 * 2**30, auto_measure=False)
        try:
            return request(snapshot, CacheConfig(gpu_memory_utilization=fraction))
        except ValueError as error:
            return str(error)

    importlib.import_module(WORKER_EXTENSION.rpartition(".")[0])  # as each worker does
    functions = {"of_vllm": request_memory, "of_workers": gpu_worker.request_memory}
    return {name: [result(function, size) for size in free] for name, function in functions.items()}


def derived() -> dict[str, Any]:
    """The sinks of FlashInfer's kernel after an update, by its method in the source: the package is for GPUs only."""
    (method,) = (
        node for kind in tree(FLASHINFER).body if isinstance(kind, ast.ClassDef) and kind.name == "FlashInferImpl"
        for node in kind.body if isinstance(node, ast.FunctionDef) and node.name == "process_weights_after_loading"
    )  # fmt: skip
    names: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module([method], []), FLASHINFER, "exec"), names)
    layer = Attention.__new__(Attention)
    torch.nn.Module.__init__(layer)
    set_default_quant_scales(layer, register_buffer=True)
    layer.sinks = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16), requires_grad=False)
    kernel = Object(sinks=layer.sinks, _sinks_source=layer.sinks)
    kernel.process_weights_after_loading = partial(names[method.name], kernel)
    layer.impl, layer.quant_config = kernel, None
    runner = Object(model=torch.nn.Sequential(layer), model_config=Object(dtype=torch.bfloat16))
    layer.process_weights_after_loading(torch.bfloat16)  # as vLLM does after loading
    place = kernel.sinks.data_ptr()
    layer.sinks.copy_(torch.tensor([1.0, 2.0]))
    internals.derive_weights(runner)
    return {"sinks": kernel.sinks.tolist(), "in_place": kernel.sinks.data_ptr() == place}


def main() -> None:
    """Prints unknown arguments, kinds of kernels, parameters of methods, tags of memory and contracts of functions."""
    fields = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    tags = {
        argument.value
        for node in ast.walk(tree(WORKER))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "self._maybe_get_memory_pool_context"
        for argument in [*node.args, *(keyword.value for keyword in node.keywords)]
        if isinstance(argument, ast.Constant)
    }
    print(
        json.dumps(
            {
                "unknown": sorted({name for one in json.loads(sys.argv[1]) for name in one} - fields),
                "moe_backends": get_args(MoEBackend),
                "methods": {name: list(inspect.signature(getattr(AsyncLLM, name)).parameters) for name in METHODS},
                "tags": sorted(tags),
                "sampler": sampler_contract(),
                "requested": requested(**json.loads(sys.argv[2])),
                "derived": derived(),
            }
        )
    )


if __name__ == "__main__":
    main()
