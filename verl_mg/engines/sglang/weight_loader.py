"""Weight loader of an engine, called inside SGLang's schedulers.

SGLang passes one payload to each tensor-parallel rank, and the same to all pipeline stages, so it contains the handles
of all stages. SGLang's own formats need one memory handle for each parameter, or call the model's `load_weights`, which
takes tensors of the checkpoint and not shards.
"""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from verl_mg.engines.payloads import apply_payload, has_patches, named_views, open_payload
from verl_mg.engines.sglang import internals
from verl_mg.sharding.engine_table import DRAFT

CASTABLE = {"float32", "bfloat16", "float16"}  # dtypes of weights that are not quantized


def merge_stages(payloads: Sequence[str], is_last: bool, for_draft: bool = False, reads: bool = False) -> str:
    """Merges the payloads of one tensor-parallel rank, by pipeline stage, into one in base64.

    `is_last`: all weights are complete after them. `for_draft`: they fill the draft model, not the policy. `reads`:
    they are filled by the model.
    """
    return message_for_loader({"payloads": list(payloads), "is_last": is_last, "for_draft": for_draft, "reads": reads})


def message_for_loader(message: dict[str, Any]) -> str:
    """Returns a message to a loader as SGLang passes it on: a named tensor with the text, in base64."""
    text = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
    return pickled_by_value([("message", text)])


def pickled_by_value(tensors: Any) -> str:
    """Returns tensors as SGLang reads them, in base64; several ranks can read them, unlike a handle of memory."""
    # megatron-core, which SGLang imports for some models and only when it needs it, replaces this function by its own:
    # pickles would name that one, and SGLang refuses names that it does not know.
    load_from_bytes: Any = torch.storage._load_from_bytes
    load_from_bytes.__module__, load_from_bytes.__qualname__ = "torch.storage", "_load_from_bytes"
    load_from_bytes.__name__ = load_from_bytes.__qualname__
    return base64.b64encode(pickle.dumps(tensors)).decode()


def load_chunk(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Copies the tensors of this stage's payload into the parameters of the same names, or back, or applies patches.

    The last one is followed by what SGLang's own loading ends with: weights are derived from others (MLA's w_kc, w_vc).
    """
    ((_, text),) = named_tensors
    message = json.loads(bytes(text.tolist()))
    parameters = tensors_by_name(model)
    device = next(iter(parameters.values())).device
    places, memory = open_payload(message["payloads"][internals.position().stage], device)
    if has_patches(places):
        apply_payload(places, memory, lambda name: as_loaded(parameters[name]))
    else:
        # The tensors of the draft model, by their names in it, or the tensors of the policy.
        tensors = {
            name.removeprefix(DRAFT): tensor
            for name, tensor in named_views(places, memory)
            if name.startswith(DRAFT) == message["for_draft"]
        }
        if message["reads"]:
            read(parameters, tensors)
        else:
            _write(model, parameters, tensors)
    if message["is_last"]:
        # SGLang processes weights at the end of the update, and expects the shapes with which it has created them.
        restore_shapes(model)
        internals.finish_load(model)


def _write(model: Any, parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    # In place: SGLang's graphs and kernels keep the addresses of parameters.
    layers = internals.marlin_layers(model)
    if layers:
        internals.keep_order(model)
    for name, tensor in tensors.items():
        if name in layers:
            internals.write_marlin(layers[name], name, tensor)
        elif name not in parameters:
            raise RuntimeError(f"the engine's model has no parameter {name}")
        else:
            internals.write(as_loaded(parameters[name]), tensor)


def read(parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copies parameters into tensors of the same names."""
    for name, tensor in tensors.items():
        # A cast would be believed to be the value that was sent.
        if name not in parameters or parameters[name].dtype is not tensor.dtype:
            raise RuntimeError(f"the engine's model has no parameter {name} in {tensor.dtype}")
        tensor.copy_(as_loaded(parameters[name]))
    # GPU: a wait before the rank reads the memory.
    # GPU-TEST: none
    # GPU-RAN: not yet
    if any(tensor.is_cuda for tensor in tensors.values()):
        torch.cuda.synchronize()


def restore_shapes(model: Any) -> None:
    """Gives matrices of FP8 with scales of rows the shape in which SGLang creates them.

    SGLang transposes them whenever it processes weights, also at the end of an update, and its kernels need them so.
    """
    for module in model.modules():
        if internals.is_transposed(module):
            module.weight.data = as_loaded(module.weight)


def tensors_by_name(model: Any) -> dict[str, Tensor]:
    """Returns what a table may name: a model's parameters, and buffers, of which a loader may fill some too."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def loaded_parameters(model: Any) -> dict[str, Tensor]:
    """Returns the memory of what a table may name, as `as_loaded`."""
    return {name: as_loaded(tensor) for name, tensor in tensors_by_name(model).items()}


def check_dtypes(parameters: Mapping[str, Tensor], dtypes: Mapping[str, str], exact: bool) -> None:
    """Checks that parameters have the dtypes that the job sends, or dtypes that can be cast to them if not `exact`."""
    for name, dtype in dtypes.items():
        actual = str(parameters[name].dtype).removeprefix("torch.") if name in parameters else "missing"
        if actual != dtype and (exact or not {actual, dtype} <= CASTABLE):
            raise TypeError(
                f"{name} is {actual}, and the job sends {dtype}: the server's --dtype and quantization_config have to "
                "follow actor.dtype and rollout.wire"
            )


def as_loaded(parameter: Tensor) -> Tensor:
    """Returns the memory of a parameter in the shape in which SGLang creates it.

    When FP8 matrices with scales of rows are loaded, SGLang transposes them, in the same memory.
    """
    values = parameter.data
    transposed = values.dim() == 2 and not values.is_contiguous() and values.t().is_contiguous()
    return values.t() if transposed else values
