"""Encoded weights on real ranks, against the quantizers of engines applied to whole tensors, and the lower bound."""

import importlib.util
import os
import sys

import pytest
import torch

from tests.helpers.internals import printed
from tests.helpers.random_models import config
from tests.helpers.traces import needs_sglang
from tests.reshard.encoded_moves import (
    BLOCK,
    CASES,
    CHANNELS,
    INT4,
    MICROSCALED,
    MICROSCALING,
    SGLANG,
    VLLM,
    as_mxfp8,
    compressed_tensors_groups,
    every_bfloat16,
    many_magnitudes,
    microscaled,
    move,
    sglang_blocks,
    sglang_channels,
    vllm_blocks,
    wrong,
)
from tests.reshard.moves import shard_map_of
from verl_mg.errors import UserError
from verl_mg.reshard import plan
from verl_mg.reshard.encode import EncodedSource, EncodedTarget, quantized_tensors
from verl_mg.reshard.encoding import FP8, Int4, encoding_of
from verl_mg.sharding.weight_table import weight_table

RANKS = 8


EVERY_CASE = [
    case if case in (0, 3, 4, 7) else pytest.param(case, marks=pytest.mark.nightly) for case in range(len(CASES))
]
FLOATS = [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.nightly)]


def assert_moved(case, encoding, dtype, quantize, results):
    assert wrong(case, encoding, dtype, quantize, results) == [[]] * RANKS
    assert all(r["received"] == r["lower_bound"] == r["on_paper"] for r in results)
    exchanged = {r["exchanged"] for r in results}
    assert len(exchanged) == 1
    if encoding.rows == encoding.columns == BLOCK:
        assert bool(exchanged.pop()) == bool(CASES[case][3])


@pytest.mark.parametrize("case", EVERY_CASE)
def test_encoder_fp8_blocks_equal_sglang_bitwise_and_bytes_the_lower_bound(ranks, case):
    results = ranks.run(RANKS, move, case, SGLANG, torch.bfloat16)
    assert_moved(case, SGLANG, torch.bfloat16, sglang_blocks(), results)


@pytest.mark.parametrize("dtype", FLOATS)
def test_encoder_fp8_blocks_by_reciprocal_equal_vllm_bitwise(ranks, dtype):
    results = ranks.run(RANKS, move, 0, VLLM, dtype, 2)
    assert_moved(0, VLLM, dtype, vllm_blocks, results)
    if dtype is torch.bfloat16:  # the two engines round differently, or the test would show nothing
        assert any(wrong(0, VLLM, dtype, sglang_blocks(), results))


@pytest.mark.parametrize("case", [0, 4, pytest.param(7, marks=pytest.mark.nightly)])
def test_encoder_fp8_channels_equal_the_kernel_of_sglang_bitwise(ranks, case):
    results = ranks.run(RANKS, move, case, CHANNELS, torch.bfloat16)
    assert_moved(case, CHANNELS, torch.bfloat16, sglang_channels, results)


@pytest.mark.parametrize(
    ("case", "cut"),  # ranks of a source of tp4 have parts of rows that end within a block, of tp2 they do not
    [(0, True), *(pytest.param(*case, marks=pytest.mark.nightly) for case in ((3, True), (4, False), (6, False)))],
)
def test_encoder_mxfp8_equals_sglang_bitwise_and_bytes_the_lower_bound(ranks, case, cut):
    results = ranks.run(RANKS, move, case, MICROSCALED, torch.bfloat16)
    assert_moved(case, MICROSCALED, torch.bfloat16, microscaled("sglang"), results)
    assert all(bool(result["exchanged"]) == cut for result in results)


@pytest.mark.parametrize("package", MICROSCALING)
def test_mxfp8_of_every_bfloat16_equals_an_engine_bitwise(package):
    values, scales = as_mxfp8(every_bfloat16())
    for found, wanted in zip((values, scales), microscaled(package, 32)(every_bfloat16()), strict=True):
        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


@needs_sglang
@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed; run tools/test.sh")
def test_mxfp8_equals_the_triton_kernels_of_sglang():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    swizzled, of_cache, quotients = printed(sys.executable, "tests.reshard.triton_probe", env=environment)
    values, scales = as_mxfp8(many_magnitudes())
    assert scales.tolist() == swizzled == of_cache
    assert torch.equal(values.view(torch.uint8), torch.tensor(quotients).to(values.dtype).view(torch.uint8))


def test_mxfp8_scale_is_the_smallest_power_of_two_that_cuts_nothing_off():
    _, scales = as_mxfp8(every_bfloat16())
    largest, powers = every_bfloat16().double().abs().amax(1), scales[:, 0].view(torch.float8_e8m0fnu).double()
    assert (largest <= 448 * powers).all()
    assert ((largest > 448 * powers / 2) | (powers == 2.0**-127)).all()


def test_mxfp8_block_with_a_value_that_is_not_finite_is_not_a_number():
    blocks = torch.ones(3, 64, dtype=torch.bfloat16)
    blocks[0, 3], blocks[1, 40] = torch.nan, -torch.inf
    values, scales = as_mxfp8(blocks)
    decoded = values.float().unflatten(1, (2, 32)) * scales.view(torch.float8_e8m0fnu).float()[..., None]
    assert decoded.isnan().all(-1).tolist() == [[True, False], [False, True], [False, False]]
    assert (decoded[2] == 1).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_encoder_int4_equals_compressed_tensors_bitwise(ranks, dtype):
    results = ranks.run(RANKS, move, 8, INT4, dtype)
    assert_moved(8, INT4, dtype, compressed_tensors_groups, results)


@pytest.mark.parametrize(
    ("wire", "share"),
    [("fp8_block", 0.5 + 2 / 128**2), ("fp8_channel", 0.5), ("mxfp8", 0.5 + 1 / 64), ("int4", 0.25 + 1 / 128)],
)
def test_lower_bound_of_an_encoding_counts_values_and_scales(wire, share):
    c = config("qwen3", hidden_size=1024, intermediate_size=2048, head_dim=128, vocab_size=1)
    names, encoding = quantized_tensors(weight_table(c)), encoding_of(wire)
    source, target = shard_map_of(c, "megatron tp1 +0"), shard_map_of(c, "engine tp4 +4")
    encoded = EncodedSource(source, encoding, names), EncodedTarget(target, encoding, names)
    full, less = plan(source, target).lower_bound(4, 2), plan(*encoded).lower_bound(4, 2)
    extra = 0.001 if wire == "fp8_channel" else 0.0001  # scales of rows, norms and the embedding
    assert share <= less / full < share + 10 * extra


@pytest.mark.parametrize(
    ("encoding", "source", "target", "message"),
    [
        (
            FP8(),
            "megatron tp1",
            "engine tp2",
            r"qkv_proj.weight: the box .* does not consist of whole blocks of \(128, 128",
        ),
        (Int4(columns=8), "megatron tp4", "engine tp1", "ends within 8 columns that one number on the wire contains"),
    ],
)
def test_encoded_plan_of_cut_blocks_is_user_error(encoding, source, target, message):
    c = config("qwen3", hidden_size=24, intermediate_size=24)
    names = quantized_tensors(weight_table(c))
    with pytest.raises(UserError, match=message):
        plan(
            EncodedSource(shard_map_of(c, source), encoding, names),
            EncodedTarget(shard_map_of(c, target), encoding, names),
        ).rank_plan(0)
