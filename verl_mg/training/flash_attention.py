"""FlashAttention-3 in place of torch's FlashAttention-2, where it can run.

FlashAttention-3 (arXiv:2407.08608) is for Hopper GPUs, in a separate package, `flash_attn_interface`. torch registers
its kernels for the whole process. Neither version has a softcap in torch, see `flex_attention`.
"""

from __future__ import annotations

import importlib.util

import torch
from torch.nn import attention

IMPLEMENTATION = "FA3"
PACKAGE = "flash_attn_interface"
HOPPER = (9, 0)


def use_fastest_kernels() -> None:
    """Activates FlashAttention-3 in this process where the GPU is a Hopper and the package is installed."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != HOPPER:
        return
    known = IMPLEMENTATION in attention.list_flash_attention_impls()
    if known and _active() is None and importlib.util.find_spec(PACKAGE):
        attention.activate_flash_attention_impl(IMPLEMENTATION)


def takes_value_width(width: int, value_width: int) -> bool:
    """Returns whether the kernel takes values of another width than queries and keys."""
    # FlashAttention-2 requires one width; FlashAttention-3 has kernels for the widths of DeepSeek's latent attention.
    if width == value_width:
        return True
    # The condition of its forward pass; its backward pass takes any widths up to its maximum.
    has_kernel = (128 < width <= 192 and 96 < value_width <= 128) or (width <= 64 and value_width <= 512)
    return has_kernel and _active() == IMPLEMENTATION


def _active() -> str | None:
    return attention.current_flash_attention_impl()
