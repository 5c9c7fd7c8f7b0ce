"""Default device of torch in SGLang's processes."""

from __future__ import annotations

import torch


def default_to_the_cpu() -> None:
    """Makes the CPU's module torch's default, for machines without a GPU.

    A torch that is built for CUDA returns CUDA's module there too, whose calls raise.
    """
    module_of = torch.get_device_module
    torch.get_device_module = lambda device=None: module_of(device or "cpu")  # type: ignore[assignment]
