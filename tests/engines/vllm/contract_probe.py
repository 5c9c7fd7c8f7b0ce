"""What the installed vLLM has of what engines on GPUs use: `python -m ...contract_probe ARGUMENTS`, in its environment.

ARGUMENTS is a list of keyword arguments of `AsyncEngineArgs` as JSON. Prints one JSON object, see `main`.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import sys
from pathlib import Path
from typing import Any, get_args

import vllm
from vllm.config.kernel import MoEBackend
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

SAMPLER, WORKER = "v1/worker/gpu/sample/sampler.py", "v1/worker/gpu_worker.py"
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


def main() -> None:
    """Prints unknown arguments, kinds of kernels, parameters of methods, tags of memory and the sampler's contract."""
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
            }
        )
    )


if __name__ == "__main__":
    main()
