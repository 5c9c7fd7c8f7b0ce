"""A layout and a device as SGLang's server arguments."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout, ModelDims
from verl_mg.rollout.sglang.pp_weight_loader import LOADER

CPU_TILE = 32
"""Widths of matrices are padded to multiples of it, on each rank, where SGLang runs on the CPU."""
CPU_KEY_VALUE_TOKENS = 2**16
"""At most so many tokens has the key-value cache of an engine on the CPU."""


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What an engine is started with. `extra`: further server arguments by their own names; they win.

    deterministic: a sample depends on its seed alone, and not on what is answered beside it, on GPUs.
    """

    layout: EngineLayout
    dtype: torch.dtype
    max_running: int
    max_positions: int
    memory_fraction: float = 0.6
    first_gpu: int = 0
    gpu_step: int = 1
    seed: int = 0
    routed_experts: bool = False
    deterministic: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)


def engine_arguments(model: Path, settings: EngineSettings) -> dict[str, Any]:
    """Keyword arguments of `sglang.Engine`. Weights are not loaded: the first sync brings them."""
    layout = settings.layout
    common: dict[str, Any] = {
        "model_path": str(model),
        "load_format": "dummy",
        "dtype": str(settings.dtype).removeprefix("torch."),
        "tp_size": layout.tp,
        "pp_size": layout.pp,
        "ep_size": layout.ep,
        "max_running_requests": settings.max_running,
        "random_seed": settings.seed,
        # Tokens in, tokens out: nothing is made text and back.
        "skip_tokenizer_init": True,
        # A layer of its own, as the weight table has it.
        "disable_shared_experts_fusion": True,
        "skip_server_warmup": True,
        "log_level": "warning",
    }
    if layout.pp > 1:
        common["custom_weight_loader"] = [LOADER]
    if layout.adp > 1:
        common["attn_dp_size"] = layout.adp
    if settings.routed_experts:
        common["enable_return_routed_experts"] = True
    place = _on_gpus(settings) if torch.cuda.is_available() else _on_cpu(settings)
    return common | place | dict(settings.extra)


def check_on_cpu(model: ModelDims, layout: EngineLayout) -> None:
    """UserError where SGLang would pad the model on the CPU: the weight table knows the shards of GPUs."""
    if torch.cuda.is_available():
        return
    if layout.ep > 1 or layout.adp > 1:
        raise UserError(f"rollout.layout={layout}: on the CPU SGLang has neither ep nor adp; leave them out")
    widths = {"columns of the feed-forward layer": model.ffn, "columns of an expert": model.expert_ffn}
    for what, width in widths.items():
        if width % (CPU_TILE * layout.tp):
            raise UserError(
                f"rollout.layout={layout}: on the CPU SGLang pads the {width} {what} to a multiple of "
                f"{CPU_TILE} * tp; take rollout.engine=hf, or a model with a multiple of {CPU_TILE * layout.tp}"
            )
    if model.kv_heads % layout.tp:
        raise UserError(
            f"rollout.layout={layout}: on the CPU SGLang pads {model.kv_heads} key-value heads to a multiple of tp; "
            "write a tp that divides them"
        )


def environment(layout: EngineLayout) -> dict[str, str]:
    """The environment of a host process: this one's, without what torchrun says of this rank."""
    launcher = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK"}
    launcher |= {"MASTER_ADDR", "MASTER_PORT"}
    own = {
        name: value
        for name, value in os.environ.items()
        if name not in launcher and not name.startswith(("TORCHELASTIC", "OMPI_", "PMIX_"))
    }
    if torch.cuda.is_available():
        return own
    cores = sorted(os.sched_getaffinity(0))
    binding = "|".join(str(cores[rank % len(cores)]) for rank in range(layout.ranks))
    return own | {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_CPU_OMP_THREADS_BIND": binding, "OMP_NUM_THREADS": "1"}


def _on_gpus(settings: EngineSettings) -> dict[str, Any]:
    return {
        "device": "cuda",
        "base_gpu_id": settings.first_gpu,
        "gpu_id_step": settings.gpu_step,
        "enable_memory_saver": True,
        "mem_fraction_static": settings.memory_fraction,
        # None of the attention kernels for the CPU is among those that SGLang lets it have.
        "enable_deterministic_inference": settings.deterministic,
    }


def _on_cpu(settings: EngineSettings) -> dict[str, Any]:
    return {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "mem_fraction_static": 0.1,
        "max_total_tokens": min(settings.max_running * settings.max_positions, CPU_KEY_VALUE_TOKENS),
        # Idle engines share the cores with the training.
        "sleep_on_idle": True,
    }
