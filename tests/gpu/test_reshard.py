"""Weights moved between layouts by messages between devices, against the cut of the whole model."""

import pytest
import torch
import torch.distributed as dist

from tests.helpers.random_models import config
from tests.reshard.encoded_moves import as_mxfp8, every_bfloat16
from tests.reshard.moves import CASES, RANKS, cast, move, move_all
from verl_mg.layout import Layout, Placement
from verl_mg.reshard.schedule import BUCKET_BYTES
from verl_mg.sharding.weight_table import weight_table

SMALL_BUCKET, FAMILY = 4000, "qwen3"


def between_two(source: str, target: str) -> list[str]:
    """Wrong parameters after a move between layouts of Megatron on all ranks."""
    table, ranks = weight_table(config(FAMILY)), dist.get_world_size()
    held = (table.shard_map_megatron(Placement.on(Layout.parse(layout), ranks)) for layout in (source, target))
    return move(config(FAMILY), *held, ranks, SMALL_BUCKET)


def between_two_of_many() -> list[str]:
    """The same from rank 0 to rank 1; the others have no message."""
    table = weight_table(config(FAMILY))
    source, target = (table.shard_map_replicated((rank,)) for rank in range(2))
    return move(config(FAMILY), source, target, dist.get_world_size(), SMALL_BUCKET)


@pytest.mark.needs(ranks=2)
@pytest.mark.parametrize(("source", "target"), [("tp2", "pp2"), ("pp2", "tp2"), ("tp1", "pp2")])
def test_reshard_between_two_devices_is_bitwise_equal(ranks, source, target):
    assert ranks.run(2, between_two, source, target) == [[]] * 2


@pytest.mark.needs(ranks=3)
def test_reshard_with_silent_ranks_ends(ranks):
    """NCCL would wait for them if this were the first time that ranks meet."""
    count = max(ranks.size, 3)
    assert ranks.run(count, between_two_of_many) == [[]] * count


@pytest.mark.needs(ranks=RANKS)
@pytest.mark.parametrize("family", CASES)
@pytest.mark.parametrize(("node", "bucket_bytes"), [(RANKS, BUCKET_BYTES), (2, SMALL_BUCKET)])
def test_reshard_on_devices_is_bitwise_equal(ranks, family, node, bucket_bytes):
    assert ranks.run(RANKS, move_all, family, node, bucket_bytes) == [[]] * RANKS


@pytest.mark.needs(ranks=RANKS)
def test_reshard_on_devices_casts_before_sending_except_float32_router_bias(ranks):
    for full, half, same, exact in ranks.run(RANKS, cast):
        assert full == 2 * half and same and exact


def same_bits(found: tuple[torch.Tensor, torch.Tensor], wanted: tuple[torch.Tensor, torch.Tensor]) -> bool:
    pairs = zip(found, wanted, strict=True)
    return all(torch.equal(one.cpu().view(torch.uint8), other.cpu().view(torch.uint8)) for one, other in pairs)


def quantizable() -> torch.Tensor:
    """Without blocks below the smallest scale, which kernels for GPUs make 0 or give the next larger one."""
    largest = every_bfloat16().abs().amax(1)
    return every_bfloat16()[(largest == 0) | (largest > 448 * 2.0**-127)].cuda()


@pytest.mark.needs(gpu=True)
def test_mxfp8_on_a_device_has_the_bits_of_the_cpu():
    assert same_bits(as_mxfp8(every_bfloat16().cuda()), as_mxfp8(every_bfloat16()))


@pytest.mark.needs(gpu=True, sglang=True)
def test_mxfp8_on_a_device_equals_the_quantizer_of_sglang():
    pytest.importorskip("triton_kernels", reason="SGLang's quantizer needs triton_kernels")
    from sglang.srt.layers.quantization.fp8_utils import mxfp8_group_quantize

    assert same_bits(as_mxfp8(quantizable()), mxfp8_group_quantize(quantizable()))


@pytest.mark.needs(blackwell=True)
def test_mxfp8_on_a_device_equals_the_quantizer_of_flashinfer():
    flashinfer = pytest.importorskip("flashinfer")
    values, scales = flashinfer.mxfp8_quantize(quantizable(), is_sf_swizzled_layout=False)
    assert same_bits(as_mxfp8(quantizable()), (values, scales.view(len(values), -1)))
