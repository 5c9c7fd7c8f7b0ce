"""Pairs of layouts between which 8 ranks move encoded weights, and the quantizers of engines as oracles."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.helpers.random_models import assemble, config
from tests.oracles.installed_source import installed_functions
from tests.reshard.moves import hold, shard_map_of
from verl_mg.dtypes import torch_dtype
from verl_mg.models.hf_config import HFConfig
from verl_mg.reshard import execute, plan, schedule
from verl_mg.reshard.encode import EncodedTarget, Encoder, encoded_maps, quantized_tensors
from verl_mg.reshard.encoding import FP8, MXFP8, Encoding, Int4, add_largest, encode_box
from verl_mg.sharding.boxes import Box, Piece, Shard, box_shape, full_box
from verl_mg.sharding.weight_table import weight_table

BLOCK = 4
DENSE = config("qwen3", hidden_size=24, intermediate_size=24, num_hidden_layers=2)
"""Four tensor-parallel ranks cut its 24 rows within blocks, and a key-value head has half of a block."""
LATENT = config("deepseek_v3", hidden_size=16, kv_lora_rank=12, qk_rope_head_dim=6, num_hidden_layers=3, v_head_dim=2)
"""Its projection to 18 rows ends within a block."""
WORDS = config("qwen3_moe", hidden_size=16, moe_intermediate_size=16, num_attention_heads=16, num_hidden_layers=2)
"""Its parts of rows are multiples of 8 on two ranks."""
CASES: list[tuple[HFConfig, str, str, int]] = [
    # (model, source, target, whether blocks are distributed over ranks)
    (DENSE, "megatron tp4-pp2", "engine tp2", 1),
    (DENSE, "megatron pp2", "engine tp2", 0),
    (DENSE, "megatron tp4", "engine tp1", 1),
    (DENSE, "megatron tp4-pp1 +0", "engine tp2 +4", 1),
    (LATENT, "megatron tp2-ep4-etp1", "engine tp2-ep2", 1),
    (LATENT, "megatron te-tp4-ep2-etp2", "engine tp2", 1),
    (config("qwen3_moe", hidden_size=12, num_hidden_layers=2), "megatron tp1-ep4", "engine tp2-ep2", 0),
    (config("mixtral", intermediate_size=24, num_hidden_layers=2), "megatron tp4-ep2-etp4", "engine tp2", 1),
    (WORDS, "megatron tp2-ep2-etp2", "engine tp2", 0),
]
SGLANG, VLLM = FP8(rows=BLOCK, columns=BLOCK), FP8(rows=BLOCK, columns=BLOCK, by_reciprocal=True)
CHANNELS = FP8(scale_suffix="_scale", rows=1, columns=None, smallest=0.0, by_reciprocal=True)
INT4 = Int4(columns=8)
MICROSCALED = MXFP8(columns=BLOCK)
MICROSCALING = {
    "sglang": "kernels/ops/quantization/mxfp8_amd_gfx95.py",
    "vllm": "model_executor/layers/quantization/utils/mxfp8_utils.py",
}
"""Files of the engines with their quantizers of MXFP8."""
Quantizer = Callable[[Tensor], tuple[Tensor, Tensor]]


def sglang_blocks(block: int = BLOCK) -> Quantizer:
    """SGLang's quantizer of bfloat16 weights to FP8 blocks with float32 scales."""
    file = "srt/layers/quantization/mxfp8_block_convert.py"
    function = installed_functions("sglang", file, "bf16_to_block_fp8_128", torch=torch)["bf16_to_block_fp8_128"]
    return partial(function, block=block)


def vllm_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """vLLM's `per_block_cast_to_fp8` (vllm/utils/deep_gemm.py), step by step: it multiplies by the reciprocal."""
    rows, columns = (math.ceil(size / BLOCK) * BLOCK for size in weight.shape)
    padded = torch.zeros((rows, columns), dtype=weight.dtype)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    view = padded.view(-1, BLOCK, columns // BLOCK, BLOCK)
    scale = view.abs().float().amax(dim=(1, 3), keepdim=True).clamp(1e-4) / 448.0
    values = (view * (1.0 / scale)).to(torch.float8_e4m3fn).view_as(padded)
    return values[: weight.shape[0], : weight.shape[1]].contiguous(), scale.view(rows // BLOCK, columns // BLOCK)


def sglang_channels(weight: Tensor) -> tuple[Tensor, Tensor]:
    """SGLang's `per_token_quant_fp8` (kernels/jit/csrc/gemm/per_token_quant_fp8.cuh) for many rows, step by step."""
    scale = weight.float().abs().amax(1, keepdim=True) / 448.0
    inverse = torch.where(scale == 0, torch.zeros(()), 1.0 / scale)
    return (weight.float() * inverse).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def microscaled(package: str, block: int = BLOCK) -> Quantizer:
    """The quantizer of MXFP8 of an engine in torch: `sglang` or `vllm`, of which the one has that of the other."""
    file, name = MICROSCALING[package], "_mxfp8_e4m3_quantize_torch"
    known = {"MXFP8_BLOCK_SIZE": block, "MXFP8_VALUE_DTYPE": torch.float8_e4m3fn, "MXFP8_E4M3_MAX": 448.0}
    return installed_functions(package, file, name, torch=torch, **known)[name]


def as_mxfp8(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Values and scales of a whole matrix as the ranks make them."""
    (rows, columns), encoding = matrix.shape, MXFP8()
    largest = torch.zeros(encoding.grid((rows, columns)), device=matrix.device)
    values = torch.empty(matrix.shape, dtype=torch_dtype(encoding.dtype), device=matrix.device)
    add_largest(largest, matrix, ((0, rows), (0, columns)), encoding.block((rows, columns)))
    scales = encoding.scales(largest, matrix.dtype)
    encode_box(encoding, matrix, scales, ((0, rows), (0, columns)), values)
    return values, scales


def every_bfloat16() -> Tensor:
    """Blocks of 32 whose largest magnitude is each finite one, with smaller ones and with zeros of both signs."""
    largest = torch.arange(0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)[:, None]
    return largest * torch.linspace(-1, 1, 32).bfloat16().roll(7)


def many_magnitudes() -> Tensor:
    """Blocks of 32 from 2 ** -60 to 2 ** 60, in bfloat16, in rows and columns that fill no tile of a kernel."""
    generator = torch.Generator().manual_seed(3)
    powers = torch.randint(-60, 60, (130, 9), generator=generator).float().exp2().repeat_interleave(32, 1)
    values = torch.randn(powers.shape, generator=generator) * powers
    values[5, :32] = 448  # the largest value of the dtype, with which a scale is exact
    return values.bfloat16()


def compressed_tensors_groups(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The quantizer and packer of compressed-tensors, in which both engines load INT4."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=INT4.columns, symmetric=True)
    groups = weight.unflatten(1, (-1, INT4.columns))
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    return pack_to_int32(quantize(weight, scale, zero, args, dtype=torch.int8), 4), scale


@lru_cache(maxsize=1)  # the ranks of a case have it in common
def checkpoint(c: HFConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """Random values whose magnitudes differ from place to place; one block and one row are 0."""
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for name, shard in weight_table(c).huggingface().items():
        values = torch.randn(shard.shape, generator=generator)
        values *= 10 ** (4 * torch.rand(shard.shape, generator=generator) - 3)
        if len(shard.shape) == 2:
            values[:BLOCK, :BLOCK], values[-1] = 0, 0
        tensors[name] = values.to(dtype)
    return tensors


def move(case: int, encoding: Encoding, dtype: torch.dtype, node: int = 8) -> dict[str, Any]:
    """Moves encoded weights; returns what this rank received and counted."""
    c, source_text, target_text, _ = CASES[case]
    rank, plain = dist.get_rank(), shard_map_of(c, source_text)
    maps = encoded_maps(weight_table(c), plain, shard_map_of(c, target_text), encoding)
    source, target = maps.source, maps.target
    moved = plan(source, target, node)
    parts = schedule(moved, rank, dtype, 4000)
    encoder = Encoder(source, target.tensors, parts, dtype)
    encoded = encoder.run(hold(plain, checkpoint(c, dtype)), lambda _: None)
    got = room_for_encoded(target, dtype)
    traffic = execute(parts, encoded, got)
    return {
        "parameters": got,
        "received": traffic.bytes_received,
        "lower_bound": moved.lower_bound(rank, dtype.itemsize),
        "on_paper": moved.traffic(dtype.itemsize)[rank].received,
        "exchanged": encoder.bytes_exchanged,
    }


def room_for_encoded(target: EncodedTarget, dtype: torch.dtype) -> dict[str, Tensor]:
    """Zeros for this rank's parameters of a quantized engine."""
    return {
        name: torch.zeros(
            shard.shape, dtype=target.tensors[shard.pieces[0].tensor].wire_dtype(dtype) if shard.pieces else dtype
        )
        for name, shard in target.shards(dist.get_rank()).items()
    }


@lru_cache(maxsize=1)  # the ranks of a case have it in common
def quantized(case: int, dtype: torch.dtype, quantize: Quantizer) -> dict[str, tuple[Tensor, Tensor]]:
    """The whole tensors as the oracle quantizes them: values and scales."""
    c, *_ = CASES[case]
    names = quantized_tensors(weight_table(c))
    return {name: quantize(tensor) for name, tensor in checkpoint(c, dtype).items() if name in names}


def wrong(
    case: int, encoding: Encoding, dtype: torch.dtype, quantize: Quantizer, results: Sequence[Mapping[str, Any]]
) -> list[list[str]]:
    """Parameters of each rank that are not the parts of whole tensors that the oracle has quantized."""
    c, _, target, _ = CASES[case]
    whole, shard_map = quantized(case, dtype, quantize), shard_map_of(c, target)
    found = []
    for rank, result in enumerate(results):
        biases = {name: bias.to(dtype) for name, bias in result["parameters"].items() if name.endswith("bias")}
        wanted = encoded_parameters(shard_map.shards(rank), checkpoint(c, dtype), whole, encoding)
        found.append(differing(result["parameters"] | biases, wanted))
    return found


def encoded_parameters(
    shards: Mapping[str, Shard],
    tensors: Mapping[str, Tensor],
    quantized: Mapping[str, tuple[Tensor, Tensor]],
    encoding: Encoding | None,
) -> dict[str, Tensor]:
    """Parameters of a rank of an engine, cut from whole tensors and from the values and scales of some of them."""
    result = {}
    for name, shard in shards.items():
        if encoding is None or not shard.pieces or shard.pieces[0].tensor not in quantized:
            result[name] = assemble(shard, tensors)
            continue
        for part, rows, columns, suffix in (
            (0, 1, encoding.packed, encoding.value_suffix),
            (1, encoding.rows, encoding.columns, encoding.scale_suffix),
        ):
            whole = {piece.tensor: quantized[piece.tensor][part] for piece in shard.pieces}
            result[name + suffix] = assemble(_in_blocks(shard, rows, columns), whole)
    return result


def _in_blocks(shard: Shard, rows: int, columns: int | None) -> Shard:
    """A shard with a row and a column for each block of it; without `columns` a block has whole rows."""

    def divided(box: Box) -> Box:
        *stacked, (top, bottom), (left, right) = box
        across = (left // columns, math.ceil(right / columns)) if columns else (0, 1)
        return (*stacked, (top // rows, math.ceil(bottom / rows)), across)

    pieces = (Piece(piece.tensor, divided(piece.source), divided(piece.target)) for piece in shard.pieces)
    return Shard(box_shape(divided(full_box(shard.shape))), tuple(pieces))


def differing(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> list[str]:
    """Names of the parameters of which some bits differ."""
    return [
        name
        for name in sorted({*found, *wanted})
        if name not in found
        or name not in wanted
        or found[name].dtype != wanted[name].dtype
        or not torch.equal(found[name].contiguous().view(torch.uint8), wanted[name].contiguous().view(torch.uint8))
    ]
