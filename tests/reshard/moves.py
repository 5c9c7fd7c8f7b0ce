"""Pairs of layouts between which 8 ranks move weights, on their devices, and what is wrong afterwards."""

import torch
import torch.distributed as dist

from tests.helpers.random_models import assemble, checkpoint, config
from verl_mg import device
from verl_mg.layout import EngineLayout, EnginePlacement, Layout, Placement
from verl_mg.models.hf_config import HFConfig
from verl_mg.reshard import execute, plan, schedule
from verl_mg.sharding.boxes import slices
from verl_mg.sharding.shard_map import ShardMap
from verl_mg.sharding.weight_table import weight_table

RANKS = 8

# (source, target): "megatron", "engine" and "module", what follows is the layout; "@4" is a stride, "+4" the ranks
# from 4 on, which the other side does not use.
DENSE = [
    ("megatron tp4-pp2", "engine tp4"),
    ("megatron tp4-pp2", "engine tp2@2"),
    ("megatron tp2-pp2-vpp2", "engine tp8"),
    ("megatron pp4", "engine tp2-pp2"),
    ("megatron tp1", "engine tp4"),
    ("megatron tp2-cp2", "engine tp4-adp2"),
    ("megatron tp2-pp2", "module"),
    ("megatron tp4-pp2", "megatron tp1-pp4"),
    ("megatron pp3 +0", "megatron tp2-pp2 +4"),
    ("megatron tp2-pp2 +0", "engine tp4 +4"),
    ("module +0", "megatron tp4-pp2"),
]
MIXTURE = [
    ("megatron tp1-ep4", "engine tp4-ep2"),
    ("megatron tp2-ep4-etp1", "engine tp8-ep8"),
    ("megatron tp2-ep2-etp2", "engine tp8-ep2-adp4"),
    ("megatron pp2-ep4", "engine tp2-ep2@4"),
    ("megatron pp2-vpp2-ep2", "module"),
    ("megatron tp4-pp2-ep2-etp1", "megatron tp1-ep8"),
    ("megatron tp1-ep4 +0", "engine tp4-ep4 +4"),
]
LATENT = [
    ("megatron tp4-pp2-ep4-etp1", "engine tp8-ep8-adp8"),
    ("megatron tp2-ep8-etp1", "engine tp4-ep2-adp2"),
    ("megatron pp4-ep2", "engine tp8"),
    ("megatron tp2-pp2-ep2-etp2", "module"),
    ("megatron tp2-ep4-etp1", "megatron tp4-pp2-ep4-etp1"),
    ("megatron te-tp2-ep2-etp2", "engine tp4-pp2-ep4"),
]
CASES = {
    "qwen3": (config("qwen3", num_hidden_layers=5), DENSE),
    "qwen2": (config("qwen2", tie_word_embeddings=True), DENSE[:1] + DENSE[3:4] + DENSE[6:10]),
    "qwen3_moe": (config("qwen3_moe"), MIXTURE),
    "mixtral": (config("mixtral"), MIXTURE[4:6]),
    "deepseek_v3": (config("deepseek_v3", num_hidden_layers=6), LATENT),
    "deepseek_v2": (config("deepseek_v2", q_lora_rank=None), LATENT[:4]),
    "gemma2": (config("gemma2"), DENSE[:2]),
}


def shard_map_of(c: HFConfig, text: str) -> ShardMap:
    """The holdings that a line of the tables above means."""
    kind, *rest = text.split()
    first = next((int(word) for word in rest if word.startswith("+")), None)
    ranks = tuple(range(RANKS)) if first is None else tuple(range(first, first + 4))
    if kind == "module":
        return weight_table(c).shard_map_replicated(ranks)
    written, _, stride = rest[0].partition("@")
    if kind == "engine":
        return weight_table(c).shard_map_engine(EnginePlacement(EngineLayout.parse(written), ranks, int(stride or 1)))
    layout = Layout.parse(written.removeprefix("te-"))
    fitted = layout.fit(len(ranks)) if len(ranks) % layout.ranks == 0 else layout
    kernels = "transformer_engine" if written.startswith("te-") else "torch"
    return weight_table(c).shard_map_megatron(Placement(fitted, ranks[: fitted.ranks]), kernels)


def hold(held: ShardMap, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    here = device.current_device()
    return {name: assemble(shard, tensors).to(here) for name, shard in held.shards(dist.get_rank()).items()}


def room_for(held: ShardMap, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Unwritten parameters; what is declared padding is 0 already."""
    parameters = {}
    for name, shard in held.shards(dist.get_rank()).items():
        parameters[name] = torch.full(shard.shape, torch.nan, dtype=dtype, device=device.current_device())
        for box in shard.padding:
            parameters[name][slices(box)] = 0
    return parameters


def move_all(family: str, node: int, bucket_bytes: int) -> list[str]:
    """Each pair of layouts in turn; what went wrong on this rank."""
    c, cases = CASES[family]
    return [
        f"{case}: {what}"
        for case in cases
        for what in move(c, *(shard_map_of(c, side) for side in case), node, bucket_bytes)
    ]


def move(c: HFConfig, source: ShardMap, target: ShardMap, node: int, bucket_bytes: int) -> list[str]:
    """What is wrong on this rank after the weights have been moved: parameters, and the count of bytes."""
    tensors, rank = checkpoint(c, torch.float32), dist.get_rank()
    moved = plan(source, target, node)
    got, expected = room_for(target, torch.float32), hold(target, tensors)
    arriving = Arriving(hold(source, tensors))
    parts = schedule(moved, rank, torch.float32, bucket_bytes)
    traffic = execute(parts, arriving.tensors, got, wait_for=arriving.wait_for)
    wrong = [name for name in expected if not torch.equal(got[name], expected[name])]
    counted = (traffic.bytes_received, moved.lower_bound(rank, 4), moved.traffic(4).get(rank))
    if counted[0] != counted[1] or (counted[2] and counted[2].received != counted[0]):
        wrong.append(f"bytes {counted}")
    return wrong


class Arriving:
    """Parameters whose values arrive when they are waited for, in `tensors`; NaN before.

    names: parameters in the order in which they arrived.
    """

    def __init__(self, values: dict[str, torch.Tensor]) -> None:
        self._values = values
        self.tensors = {name: torch.full_like(value, torch.nan) for name, value in values.items()}
        self.names: list[str] = []

    def wait_for(self, name: str) -> None:
        """Gives a parameter its values."""
        if name not in self.names:
            self.names.append(name)
            self.tensors[name].copy_(self._values[name])


def cast() -> tuple[int, int, bool, bool]:
    c = config("deepseek_v3")
    source, target = shard_map_of(c, "megatron tp2-ep4-etp1"), shard_map_of(c, "engine tp8-ep2")
    tensors = {name: tensor / 7 for name, tensor in checkpoint(c, torch.float32).items()}
    rank, received = dist.get_rank(), []
    for dtype in (torch.float32, torch.bfloat16):
        moved = plan(source, target, 8)
        got = room_for(target, dtype)
        bias = "model.layers.1.mlp.gate.e_score_correction_bias"
        got[bias] = got[bias].float()
        traffic = execute(schedule(moved, rank, dtype), hold(source, tensors), got)
        expected = hold(target, tensors)
        same = all(torch.equal(got[name], expected[name].to(got[name].dtype)) for name in got)
        assert traffic.bytes_received == moved.lower_bound(rank, dtype.itemsize)
        received.append(traffic.bytes_received)
    return *received, same, torch.equal(got[bias], expected[bias])
