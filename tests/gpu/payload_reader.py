"""Opens a payload from stdin as an engine does, saves the tensors to a file, and adds 1 to them where they are.

python -m tests.gpu.payload_reader tensors.safetensors < payload
"""

import sys

import torch
from safetensors.torch import save_file

from verl_mg.engines.payloads import named_views, open_payload


def main() -> None:
    index = torch.cuda.current_device() if torch.cuda.is_available() else None
    device = torch.device("cpu") if index is None else torch.device("cuda", index)
    places, memory = open_payload(sys.stdin.read(), device)
    tensors = dict(named_views(places, memory))
    save_file({name: tensor.cpu() for name, tensor in tensors.items()}, sys.argv[1])
    for tensor in tensors.values():
        tensor.add_(1)
    if memory.is_cuda:
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
