"""The compiled extension of Transformer Engine, `transformer_engine_torch`, in torch on the CPU.

Only what linear layers, norms, grouped products, rotary embeddings and attention without fused kernels call, in high
precision. Transformer Engine's own Python is real. A function that is not here raises when it is called.
"""

import enum
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor

DType = enum.IntEnum(
    "DType",
    {
        **{"kByte": 0, "kInt32": 2, "kFloat32": 4, "kFloat16": 5, "kBFloat16": 6},
        **{"kFloat8E4M3": 7, "kFloat8E5M2": 8, "kFloat4E2M1": 10},
    },
)
"""Data types, by the names of the extension."""
CUDNN = {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2}  # kernels of cuDNN
FORMER = {"NVTE_F16_max512_seqlen": 0}  # kernels of cuDNN in versions below 2.12
IMPORTED = ("layernorm_fwd", "layernorm_bwd")  # further names that Transformer Engine imports by `*`
TORCH = {DType.kFloat32: torch.float32, DType.kFloat16: torch.float16, DType.kBFloat16: torch.bfloat16}


def missing(name: str) -> Any:
    """A class that has any member, and raises when it is called."""

    class Named:
        def __init__(self, *_: Any, **__: Any) -> None:
            raise NotImplementedError(f"transformer_engine_torch.{name}")

    kind = type(name, (type,), {"__getattr__": _member})
    return kind(name, (Named,), {"members": {}})


def _member(cls: Any, name: str) -> int:
    if name.startswith("__"):
        raise AttributeError(name)
    number: int = vars(cls)["members"].setdefault(name, len(vars(cls)["members"]))
    return number


def generic_gemm(
    a: Tensor, transposed_a: bool, b: Tensor, transposed_b: bool, *others: Any, **options: Any
) -> tuple[Tensor, Tensor | None, None, None]:
    """out (+)= op(b) @ op(a) with row-major tensors, as BLAS has it with column-major ones."""
    out, quantizer, out_dtype, bias, _, gelu, _, grad, _, _, accumulate, _ = others
    assert quantizer is None and not gelu
    assert options["comm_overlap"] is None and options["alpha"] == 1
    left, right = b.reshape(-1, b.shape[-1]), a.reshape(-1, a.shape[-1])
    product = (left.T if transposed_b else left) @ (right.T if transposed_a else right)
    if not transposed_b:
        product = product.view(*b.shape[:-1], product.shape[-1])
    bias_gradient = None
    if bias is not None and bias.numel() and not grad:
        product = product + bias
    elif bias is not None and bias.numel():
        bias_gradient = left.sum(0).to(bias.dtype)
    if out is None:
        return product.to(TORCH[DType(out_dtype)] if out_dtype is not None else a.dtype), bias_gradient, None, None
    out.copy_(out + product if accumulate else product)
    return out, bias_gradient, None, None


def te_general_grouped_gemm(
    a: Sequence[Tensor], transposed_a: bool, b: Sequence[Tensor], transposed_b: bool, *others: Any
) -> Sequence[Tensor]:
    """A product for each expert; with a single output its rows are those of all experts."""
    out, _, splits, bias, _, single_output, _, _, _, _, accumulate, *_ = others
    outputs = out[0].split(list(splits)) if single_output else out
    for left, right, target in zip(b, a, outputs, strict=True):
        product = (left.T if transposed_b else left) @ (right.T if transposed_a else right)
        target.copy_(target + product if accumulate else product)
    return bias


def rmsnorm_fwd(x: Tensor, weight: Tensor, eps: float, *others: Any) -> tuple[Tensor, None, Tensor]:
    """Normalizes in float32; returns the inverse root mean squares for the backward pass."""
    out, quantizer, out_dtype, _, zero_centered = others
    assert quantizer is None
    inverse = torch.rsqrt(x.float().square().mean(-1) + eps)
    gamma = weight.float() + float(zero_centered)
    result = (x.float() * inverse[:, None] * gamma).to(TORCH[DType(out_dtype)])
    return (result if out is None else out.copy_(result)), None, inverse


def rmsnorm_bwd(
    gradient: Tensor, x: Tensor, inverse: Tensor, weight: Tensor, sm_margin: int, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    normalized = x.float() * inverse[:, None]
    scaled = gradient.float() * (weight.float() + float(zero_centered))
    mean = (scaled * normalized).mean(-1, keepdim=True)
    into_weight = (gradient.float() * normalized).sum(0)
    return ((scaled - normalized * mean) * inverse[:, None]).to(x.dtype), into_weight.to(weight.dtype)


def fused_rope_forward(x: Tensor, angles: Tensor, *others: Any) -> Tensor:
    """Rotates packed heads, (T, heads, d), by the angles of the positions in their sequences."""
    start_positions, _, interleaved, cumulative, cp_size, cp_rank = others
    assert start_positions is None and angles.dtype is torch.float32
    per_token = _angles(angles, cumulative, cp_size, cp_rank)
    width = per_token.shape[-1]
    part, rest = x[..., :width].float(), x[..., width:]
    if interleaved:
        turned = torch.stack((-part[..., 1::2], part[..., 0::2]), dim=-1).flatten(-2)
    else:
        first, second = part.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
    rotated = part * per_token.cos() + turned * per_token.sin()
    return torch.cat((rotated.to(x.dtype), rest), dim=-1)


def fused_rope_backward(gradient: Tensor, angles: Tensor, *options: Any) -> Tensor:
    return fused_rope_forward(gradient, -angles, *options)


def _angles(angles: Tensor, cumulative: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    """Angles of each token of this rank: with cp each sequence is in 2 * cp chunks, and a rank has two of them."""
    parts = []
    for length in (cumulative[1:] - cumulative[:-1]).tolist():
        if cp_size == 1:
            parts.append(torch.arange(length))
            continue
        chunk = length // (2 * cp_size)
        for number in (cp_rank, 2 * cp_size - 1 - cp_rank):
            parts.append(torch.arange(number * chunk, (number + 1) * chunk))
    return angles.flatten(0, -2)[torch.cat(parts)][:, None, :]


def convert_thd_to_bshd(x: Tensor, cumulative: Tensor, sequences: int, longest: int) -> Tensor:
    """Pads packed sequences, (T, heads, d), to (sequences, longest, heads, d)."""
    lengths = (cumulative[1:] - cumulative[:-1]).tolist()
    rows = [F.pad(row, (0, 0, 0, 0, 0, longest - len(row))) for row in x.split(lengths)]
    return torch.stack(rows)


def convert_bshd_to_thd(x: Tensor, cumulative: Tensor, total: int) -> Tensor:
    lengths = (cumulative[1:] - cumulative[:-1]).tolist()
    return torch.cat([row[:length] for row, length in zip(x, lengths, strict=True)])


def multi_tensor_l2norm(_: int, overflow: Tensor, lists: Sequence[Sequence[Tensor]], *__: Any) -> tuple[Tensor, None]:
    (tensors,) = lists
    return torch.stack([tensor.float().norm() for tensor in tensors]).norm()[None], None


def multi_tensor_scale(_: int, overflow: Tensor, lists: Sequence[Sequence[Tensor]], factor: Any) -> None:
    """Writes the tensors of the first list times a factor to the second list."""
    for source, target in zip(*lists, strict=True):
        target.copy_(source * factor)


def multi_tensor_adam(_: int, overflow: Tensor, lists: Sequence[Sequence[Tensor]], *others: Any) -> None:
    """A step of AdamW (arXiv:1711.05101) in float32."""
    lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay = others
    assert mode == bias_correction == 1
    for gradient, weight, mean, square in zip(*lists, strict=True):
        mean.lerp_(gradient, 1 - beta1)
        square.lerp_(gradient.square(), 1 - beta2)
        divisor = (square / (1 - beta2**step)).sqrt() + eps
        weight -= lr * (mean / (1 - beta1**step) / divisor + weight_decay * weight)


def module(version: str) -> ModuleType:
    built = ModuleType("transformer_engine_torch")
    named: dict[str, Any] = {}
    kernels = CUDNN if Version(version) >= Version("2.12") else CUDNN | FORMER
    for kind in (DType, enum.IntEnum("NVTE_Fused_Attn_Backend", kernels)):
        setattr(built, kind.__name__, kind)
    built.get_cudnn_version = lambda: 91200  # type: ignore[attr-defined]
    built.get_cublasLt_version = lambda: 130000  # type: ignore[attr-defined]
    built.get_fused_attn_backend = lambda _: (-1, "no kernel of cuDNN")  # type: ignore[attr-defined]
    built.get_num_cublas_streams = lambda: 1  # type: ignore[attr-defined]
    for function in (
        *(generic_gemm, te_general_grouped_gemm, rmsnorm_fwd, rmsnorm_bwd),
        *(fused_rope_forward, fused_rope_backward, convert_thd_to_bshd, convert_bshd_to_thd),
        *(multi_tensor_l2norm, multi_tensor_scale, multi_tensor_adam),
    ):
        setattr(built, function.__name__, function)

    built.multi_tensor_scale_tensor = multi_tensor_scale  # type: ignore[attr-defined]
    for name in IMPORTED:
        setattr(built, name, missing(name))

    def fallback(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return named.setdefault(name, missing(name))

    built.__getattr__ = fallback  # type: ignore[method-assign]
    return built
