"""Looks into the parameters of a running SGLang server, as a further custom loader inside its schedulers."""

import json
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from verl_mg.engines.sglang.weight_loader import message_for_loader

PROBE = f"{__name__}.probe"
"""Name of the loader, for the server argument `custom_weight_loader`."""


def probe(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Writes the parameters of this rank to a folder; changes a bit of one first where the request names one."""
    from sglang.srt.runtime_context import get_parallel

    request = json.loads(bytes(named_tensors[0][1].tolist()))
    parameters, rank = dict(model.named_parameters()), get_parallel().tp_rank
    if request["damage"] and rank == 0:
        parameters[request["damage"]].data.view(torch.uint8).view(-1)[3] ^= 1
    if not request["folder"]:
        return
    # Clones: parameters that SGLang transposes are no contiguous memory, and tied ones share it.
    held = {name: parameter.data.clone(memory_format=torch.contiguous_format) for name, parameter in parameters.items()}
    save_file(held, Path(request["folder"]) / f"{rank}.safetensors")


def parameters_of(url: str, tp: int, folder: Path, damage: str = "") -> list[Mapping[str, Tensor]]:
    """The parameters of each rank of a server, by way of a folder; of `damage` on rank 0 one bit is changed first."""
    folder.mkdir(parents=True, exist_ok=True)
    for request in ({"folder": str(folder), "damage": damage}, {"folder": "", "damage": ""}):
        # Twice, because SGLang transposes some parameters at the end of each session.
        payload = message_for_loader(request)
        body = {"serialized_named_tensors": [payload] * tp, "load_format": PROBE, "selector": "target"}
        post(f"{url}/begin_weight_update", {"selector": "target"})
        post(f"{url}/update_weights_from_tensor", body)
        post(f"{url}/end_weight_update", {})
    return [load_file(folder / f"{rank}.safetensors") for rank in range(tp)]


def post(url: str, body: Mapping[str, Any]) -> None:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as response:
        answer = json.load(response)
    assert answer["success"], answer
