"""Weight loader of a pipeline stage, called inside SGLang's schedulers.

SGLang gives all stages the same payload for a tensor-parallel rank, and its format "direct" does not support stages.
"""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

LOADER = f"{__name__}.load_stage"
"""Name of the loader, for the server argument `custom_weight_loader` and as load format."""


def stage_payload(payloads: Sequence[str]) -> str:
    """Merges the payloads of one tensor-parallel rank on all stages into one, in base64."""
    text = torch.frombuffer(bytearray(json.dumps(list(payloads)).encode()), dtype=torch.uint8)
    # By value: all stages read it, and a handle can be opened only once.
    return base64.b64encode(pickle.dumps([("payloads of the stages", text)])).decode()


def load_stage(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Copies this stage's tensors into the parameters of the same names.

    Args:
        model: SGLang's model of this stage.
        named_tensors: the merged payload of all stages.
    """
    from sglang.srt.model_loader.weight_utils import default_weight_loader
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.utils import MultiprocessingSerializer

    ((_, text),) = named_tensors
    payloads = json.loads(bytes(text.tolist()))
    parameters = dict(model.named_parameters())
    for name, tensor in MultiprocessingSerializer.deserialize(payloads[get_parallel().pp_rank]):
        default_weight_loader(parameters[name], tensor)
