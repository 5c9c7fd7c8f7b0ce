"""Options of training that change memory or seconds: kernels, recomputation, precision, overlap.

The one place where a plan reads `model.kernels` and the section `megatron` of a configuration, whose fields have the
names of megatron-core.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from verl_mg.config import FsdpConfig
from verl_mg.config.roles import RecomputeModule
from verl_mg.errors import UserError

RECOMPUTABLE: tuple[str, ...] = get_args(RecomputeModule)
"""Modules of a layer that a plan can recompute, by megatron-core's names."""
OFFLOADABLE = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act")
"""Modules of a layer whose inputs a plan can keep on the host, by megatron-core's names."""

Recompute = bool | tuple[str, ...]
"""Parts of a layer computed again in the backward pass: all, none, or modules by name."""
EXCHANGED: dict[str, Literal["heads", "keys", "ring"]] = {"a2a": "heads", "all_gather": "keys", "p2p": "ring"}
"""Tensors that context-parallel ranks exchange, by the value of `transformer.cp_comm_type`."""
BYTES = {
    **dict.fromkeys(("fp32", "float32", "torch.float32"), 4),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16", "fp16", "float16", "torch.float16"), 2),
    **dict.fromkeys(("fp8", "uint8", "torch.uint8"), 1),
}
"""Bytes of a number, by the ways to write its type."""


@dataclass(frozen=True)
class TrainingOptions:
    """Options of training; the defaults are of a job without a section `megatron`."""

    fused: bool = True
    """Whether norms, rotary embedding and permutation are kernels of Transformer Engine (`model.kernels`)."""
    fp8: bool = False  # whether matrix products of layers are FP8 (`transformer.fp8`)
    flex_dispatch: bool = False
    """Whether a token is sent once to each rank and node with its experts (`transformer.moe_token_dispatcher_type:
    flex`), not once for each expert."""
    shared_expert_overlap: bool = False
    """Whether shared experts compute while tokens are dispatched (`transformer.moe_shared_expert_overlap`)."""
    expert_overlap: bool = False
    """Whether other micro-batches compute while tokens are dispatched
    (`transformer.overlap_moe_expert_parallel_comm`)."""
    exchanged: Literal["heads", "keys", "ring"] = "heads"
    """Tensors that context-parallel ranks exchange (`transformer.cp_comm_type`): tokens for heads (Ulysses), all keys
    and values (all_gather), or these around a ring while attention computes (p2p)."""
    tensor_overlap: bool = False
    """Whether collectives of tensor parallelism overlap with their matrix products (`transformer.tp_comm_overlap`)."""
    offload_modules: tuple[str, ...] = ()
    """Modules whose inputs wait on the host for the backward pass (`transformer.offload_modules`)."""
    weight_bytes: int = 2  # bytes of a weight, and of an element of activations (`dtype` of the role)
    gradient_bytes: int = 4  # bytes of a gradient in its buffer (`ddp.grad_reduce_in_fp32`)
    overlap_gradients: bool = False
    """Whether gradients are reduced during the last backward pass (`ddp.overlap_grad_reduce`)."""
    overlap_weights: bool = False
    """Whether weights are gathered during the first forward pass (`ddp.overlap_param_gather`)."""
    state_bytes: int = 12
    """Bytes of the optimizer's states of a parameter: main weight, moments, main gradient where it is a copy."""
    vocabulary_bytes: int = 0  # bytes of the second moment of embedding and output layer, where only these have one
    offloaded_states: float = 0.0  # fraction of the bytes of the optimizer's states that are in host memory
    host_steps: float = 0.0  # fraction of the parameters whose step the host computes
    sharded_states: bool = True  # whether the optimizer's states are sharded over data-parallel ranks
    muon: bool = False  # whether matrices of layers are trained with Muon (arXiv:2502.16982)
    fsdp: FsdpConfig | None = None  # options of the FSDP backend; None with Megatron


DEFAULT_OPTIONS = TrainingOptions()  # options of a job without a section `megatron`


def training_options(
    kernels: str,
    megatron: Mapping[str, Mapping[str, Any]],
    cpu_offload: bool = False,
    moments_dtype: str = "float32",
    kind: str = "adamw",
    dtype: str = "bfloat16",
) -> TrainingOptions:
    """Reads the options of a role from the sections `model`, `megatron` and the role's own."""
    transformer, optimizer, ddp = (dict(megatron.get(part) or {}) for part in ("transformer", "optimizer", "ddp"))
    weight_bytes = BYTES[dtype]
    gradient_bytes = 4 if ddp.get("grad_reduce_in_fp32", True) else weight_bytes
    offload = transformer.get("fine_grained_activation_offloading")
    fraction = float(optimizer.get("optimizer_offload_fraction", 1.0) if optimizer.get("optimizer_cpu_offload") else 0)
    muon = kind == "muon" or "muon" in str(optimizer.get("optimizer", "adam"))
    moments = _moment_bytes(optimizer, moments_dtype, muon)
    # Weights in float32 are updated in place, without main weights.
    states = moments + (_other_state_bytes(optimizer, gradient_bytes) if weight_bytes == 2 else 0)
    return TrainingOptions(
        fused=_is_fused(kernels, dtype),
        fp8=bool(transformer.get("fp8")),
        flex_dispatch=transformer.get("moe_token_dispatcher_type") == "flex"
        or bool(transformer.get("moe_enable_deepep")),
        shared_expert_overlap=bool(transformer.get("moe_shared_expert_overlap")),
        expert_overlap=bool(transformer.get("overlap_moe_expert_parallel_comm")),
        exchanged=EXCHANGED[str(transformer.get("cp_comm_type") or "a2a")],
        tensor_overlap=bool(transformer.get("tp_comm_overlap")),
        offload_modules=_offload_modules(transformer.get("offload_modules")) if offload else (),
        weight_bytes=weight_bytes,
        gradient_bytes=gradient_bytes,
        overlap_gradients=bool(ddp.get("overlap_grad_reduce")),
        overlap_weights=bool(ddp.get("overlap_param_gather")),
        state_bytes=states,
        # `optimizer.cpu_offload` of a role moves the moments, megatron-core's option a fraction of all states.
        offloaded_states=moments / states if cpu_offload else fraction,
        host_steps=1.0 if cpu_offload else fraction,
        # Muon has one moment; embedding and output layer are trained with Adam, which has two.
        vocabulary_bytes=BYTES[moments_dtype] if kind == "muon" else 0,
        # megatron-core's Muon keeps all states on every data-parallel rank, unless it distributes whole layers.
        sharded_states=not muon or kind == "muon" or _is_layer_wise(optimizer),
        muon=muon,
    )


def frozen_options(kernels: str, dtype: str) -> TrainingOptions:
    """Returns the options of a role that is not trained."""
    return TrainingOptions(fused=_is_fused(kernels, dtype), weight_bytes=BYTES[dtype])


def fsdp_options(config: FsdpConfig, dtype: str) -> TrainingOptions:
    """Returns the options of a role with the FSDP backend: float32 weights and moments, kernels of `transformers`."""
    on_host = 1.0 if config.cpu_offload else 0.0
    return TrainingOptions(
        fused=False,
        weight_bytes=BYTES[dtype],
        state_bytes=8,  # two float32 moments: the weights are the main weights
        offloaded_states=on_host,
        host_steps=on_host,
        fsdp=config,
    )


def _is_fused(kernels: str, dtype: str) -> bool:
    """Returns whether kernels are Transformer Engine's, which `auto` uses only for bf16."""
    return kernels == "transformer_engine" or (kernels == "auto" and dtype == "bfloat16")


def _is_layer_wise(optimizer: Mapping[str, Any]) -> bool:
    """Returns whether data-parallel ranks distribute the layers that they update; otherwise all ranks update all."""
    name = str(optimizer.get("optimizer", ""))
    return name.startswith("dist_") or bool(optimizer.get("use_layer_wise_distributed_optimizer"))


def recompute(value: bool | Sequence[str]) -> Recompute:
    """Returns what a role recomputes, in a form that plans compare: modules sorted, without repetitions."""
    return value if isinstance(value, bool) else tuple(sorted(set(value)))


def _offload_modules(names: Any) -> tuple[str, ...]:
    for name in names or ():
        if name not in OFFLOADABLE:
            raise UserError(
                f"megatron.transformer.offload_modules: {name!r} cannot be planned. Use {', '.join(OFFLOADABLE)}."
            )
    return tuple(sorted(set(names or ())))


def _moment_bytes(optimizer: Mapping[str, Any], moments_dtype: str, muon: bool) -> int:
    if not optimizer.get("use_precision_aware_optimizer"):
        return BYTES[moments_dtype] * (1 if muon else 2)
    return sum(BYTES[str(optimizer.get(name, "fp32"))] for name in ("exp_avg_dtype", "exp_avg_sq_dtype"))


def _other_state_bytes(optimizer: Mapping[str, Any], gradient_bytes: int) -> int:
    """Returns the bytes of a parameter's main weight, and of its gradient where that is copied to another type."""
    # Without the precision-aware optimizer both are float32. With it, a float32 main weight is stored as the 16 bits
    # that the bf16 weight does not have (megatron-core's `store_param_remainders`).
    if not optimizer.get("use_precision_aware_optimizer"):
        return 4 + (4 if gradient_bytes == 2 else 0)
    main = BYTES[str(optimizer.get("main_params_dtype", "fp32"))]
    if main == 4 and optimizer.get("store_param_remainders", True):
        main = 2
    copied = BYTES[str(optimizer.get("main_grads_dtype", "fp32"))]
    return main + (copied if copied != gradient_bytes else 0)
