"""What the installed SGLang makes of our server arguments and environment: `python -m ...contract_probe ARGUMENTS`.

ARGUMENTS is a list of keyword arguments of `sglang.Engine` as JSON. Prints one JSON object, see `main`.
"""

import argparse
import json
import os
import sys
from typing import Any

import msgspec
import torch
from sglang.kernels.fused_op import BaseFusedOp, get_fused_op_backend
from sglang.kernels.spec import KernelBackend
from sglang.srt import constants, utils
from sglang.srt.environ import envs
from sglang.srt.layers.activation import GeluAndMul, SiluAndMul
from sglang.srt.layers.layernorm import Gemma3RMSNorm, GemmaRMSNorm, RMSNorm
from sglang.srt.layers.rotary_embedding import RotaryEmbedding
from sglang.srt.server_args import PortArgs, ServerArgs
from triton import knobs

from verl_mg.engines.sglang.internals import compute_buffers

FUSED = (GeluAndMul, SiluAndMul, Gemma3RMSNorm, GemmaRMSNorm, RMSNorm, RotaryEmbedding)
"""Operators of dense models whose compiled kernels have 16 bits only."""


def refused(arguments: dict[str, Any]) -> list[str]:
    """Arguments that SGLang does not have, or whose type or choices do not include our value."""
    fields = {field.name: field.type for field in msgspec.structs.fields(ServerArgs)}
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    choices = {action.dest: action.choices for action in parser._actions if action.choices is not None}
    found = []
    for name, value in arguments.items():
        try:
            msgspec.convert(value, fields[name])
        except (KeyError, msgspec.ValidationError) as error:
            found.append(f"{name}={value!r}: {error}")
        except TypeError:  # a type with two kinds of collections, which msgspec cannot check
            assert isinstance(value, list)
        values = value if isinstance(value, list) else [value]
        if not all(one in choices.get(name, values) for one in values):
            found.append(f"{name}={value!r}: not in {choices[name]}")
    return found


def ports_of(arguments: dict[str, Any]) -> dict[str, Any]:
    """Addresses and ports of an engine, as its processes get them."""
    ports = PortArgs.init_new(ServerArgs(**arguments))
    addresses = {name: value for name, value in vars(ports).items() if name.endswith("_name") and value}
    return {"addresses": list(addresses.values()), "nccl_port": ports.nccl_port}


def resolved(arguments: dict[str, Any]) -> dict[str, Any]:
    server = ServerArgs(**arguments)
    server.resolve_once()
    values = server.resolved_dict()
    graphs = {phase: values["cuda_graph_config"][phase]["backend"] for phase in ("decode", "prefill")}
    return {name: values[name] for name in arguments} | {"graphs": graphs}


def in_float32() -> dict[str, Any]:
    """Precision of products in Triton, and the operators that the environment does not make torch's."""
    assert get_fused_op_backend() is KernelBackend.TORCH
    others = [kind.__name__ for kind in FUSED if not issubclass(kind, BaseFusedOp)]
    return {"triton": knobs.language.fp32_default, "others": others}


def derived() -> dict[str, list[float]]:
    """Buffers of a norm whose weight was written in place."""
    model = torch.nn.ModuleDict({"norm": GemmaRMSNorm(2)})
    model["norm"].weight.data.fill_(3)
    compute_buffers(model)
    return {name: buffer.tolist() for name, buffer in model.named_buffers()}


def main() -> None:
    """Prints tags of memory, parsed SGLANG_ variables, and the functions above, some by engine."""
    engines = json.loads(sys.argv[1])
    utils.is_cuda = lambda: True  # which default graphs depend on
    variables = {name: getattr(envs, name).get() for name in os.environ if name in os.environ["CHECKED"].split()}
    print(
        json.dumps(
            {
                "tags": constants.GPU_MEMORY_ALL_TYPES,
                "variables": variables,
                "float32": in_float32(),
                "derived": derived(),
                "refused": [refused(arguments) for arguments in engines],
                "ports": [ports_of(arguments) for arguments in engines],
                "resolved": [resolved(arguments) for arguments in engines],
            }
        )
    )


if __name__ == "__main__":
    main()
