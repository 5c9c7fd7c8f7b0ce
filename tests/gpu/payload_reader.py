"""Opens a payload from stdin as an engine does, saves the tensors to a file, and adds 1 to them where they are.

python -m tests.gpu.payload_reader tensors.safetensors < payload
"""

from __future__ import annotations

import base64
import importlib.util
import pickle
import sys
from typing import Any

import torch
from safetensors.torch import save_file

from verl_mg.rollout.ipc_payload import named_views


def main() -> None:
    ((places, memory),) = opened(sys.stdin.read())
    tensors = dict(named_views(places, memory))
    save_file({name: tensor.cpu() for name, tensor in tensors.items()}, sys.argv[1])
    for tensor in tensors.values():
        tensor.add_(1)
    if memory.is_cuda:
        torch.cuda.synchronize()


def opened(payload: str) -> Any:
    """By SGLang where it is installed, which on GPUs it must be."""
    if importlib.util.find_spec("sglang") is None:
        return pickle.loads(base64.b64decode(payload))
    from sglang.srt.utils import MultiprocessingSerializer

    return MultiprocessingSerializer.deserialize(payload)


if __name__ == "__main__":
    main()
