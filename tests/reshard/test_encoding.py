"""Encoded weights on real ranks, against the quantizers of engines applied to whole tensors, and the lower bound."""

import pytest
import torch

from tests.helpers.random_models import config
from tests.reshard.encoded_moves import (
    BLOCK,
    CASES,
    CHANNELS,
    INT4,
    SGLANG,
    VLLM,
    compressed_tensors_groups,
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
    if encoding.columns == BLOCK:
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


@pytest.mark.parametrize("dtype", FLOATS)
def test_encoder_int4_equals_compressed_tensors_bitwise(ranks, dtype):
    results = ranks.run(RANKS, move, 8, INT4, dtype)
    assert_moved(8, INT4, dtype, compressed_tensors_groups, results)


@pytest.mark.parametrize(
    ("wire", "share"), [("fp8_block", 0.5 + 2 / 128**2), ("fp8_channel", 0.5), ("int4", 0.25 + 1 / 128)]
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
