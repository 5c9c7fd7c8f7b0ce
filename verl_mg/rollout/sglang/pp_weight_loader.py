"""The loader of a pipeline stage, called inside SGLang's schedulers: each takes what is its own.

SGLang hands all stages the payload of their tensor-parallel rank, and its format "direct" knows no stages.
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
"""Under which SGLang finds it: the server argument `custom_weight_loader` and the load format."""


def stage_payload(payloads: Sequence[str]) -> str:
    """The payloads of one tensor-parallel rank on all stages as one payload, in base64."""
    text = torch.frombuffer(bytearray(json.dumps(list(payloads)).encode()), dtype=torch.uint8)
    # By value: all stages read it, and a handle could be opened once.
    return base64.b64encode(pickle.dumps([("payloads of the stages", text)])).decode()


def load_stage(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Copy this stage's tensors into the parameters of their names."""
    from sglang.srt.model_loader.weight_utils import default_weight_loader
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.utils import MultiprocessingSerializer

    ((_, text),) = named_tensors
    payloads = json.loads(bytes(text.tolist()))
    parameters = dict(model.named_parameters())
    for name, tensor in MultiprocessingSerializer.deserialize(payloads[get_parallel().pp_rank]):
        default_weight_loader(parameters[name], tensor)
