"""Which attention vLLM has on GPUs of each generation: `python -m ...selection_probe`, in vLLM's environment.

Prints a JSON list of [compute capability, dtype, kind of attention, names of the backends that vLLM calls valid].
Backends whose compiled code is not installed here are never valid; those of Triton and torch need none.
"""

import json
import sys
import types
from unittest import mock

import torch

COMPILED = ("vllm._C_stable_libtorch", "vllm._C", "vllm._moe_C")
"""What the platform for CUDA imports and only a build for CUDA has."""
KINDS = {
    "heads of 64": {"head_size": 64},
    "heads of 128": {"head_size": 128},
    "heads of 256": {"head_size": 256},
    "sinks": {"head_size": 64, "has_sink": True},
    "latent": {"head_size": 576, "use_mla": True},
}


def valid(capability: tuple[int, int], dtype: torch.dtype, kind: str) -> list[str]:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.platforms.cuda import NvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.selector import AttentionSelectorConfig

    config = AttentionSelectorConfig(dtype=dtype, kv_cache_dtype="auto", block_size=16, **KINDS[kind])
    empty = torch.empty
    on_cpu = mock.patch.object(torch, "empty", lambda *size, device=None, **options: empty(*size, **options))
    with on_cpu, set_current_vllm_config(VllmConfig()):
        found, _ = NvmlCudaPlatform.get_valid_backends(DeviceCapability(*capability), config, num_heads=32)
    return [candidate.backend.name for candidate in found]


def main() -> None:
    sys.modules.update({name: types.ModuleType(name) for name in COMPILED})
    print(
        json.dumps(
            [
                [capability, str(dtype), kind, valid(capability, dtype, kind)]
                for capability in ((8, 0), (9, 0), (10, 0))
                for dtype in (torch.float32, torch.bfloat16)
                for kind in KINDS
            ]
        )
    )


if __name__ == "__main__":
    main()
