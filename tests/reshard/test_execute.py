"""Plans carried out between 8 real ranks, against the cut of the whole model, and against the lower bound."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.random_models import assemble, checkpoint, config
from verl_mg.errors import UserError
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
        return weight_table(c).shard_map_sglang(EnginePlacement(EngineLayout.parse(written), ranks, int(stride or 1)))
    layout = Layout.parse(written.removeprefix("te-"))
    fitted = layout.fit(len(ranks)) if len(ranks) % layout.ranks == 0 else layout
    modules = "transformer_engine" if written.startswith("te-") else "local"
    return weight_table(c).shard_map_megatron(Placement(fitted, ranks[: fitted.ranks]), modules)


def hold(held: ShardMap, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: assemble(shard, tensors) for name, shard in held.shards(dist.get_rank()).items()}


def room_for(held: ShardMap, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Unwritten parameters; what is declared padding is 0 already."""
    parameters = {}
    for name, shard in held.shards(dist.get_rank()).items():
        parameters[name] = torch.full(shard.shape, torch.nan, dtype=dtype)
        for box in shard.padding:
            parameters[name][slices(box)] = 0
    return parameters


def move_all(family: str, node: int, bucket_bytes: int) -> list[str]:
    """Each pair of layouts in turn; what went wrong on this rank."""
    c, cases = CASES[family]
    tensors, rank, wrong = checkpoint(c, torch.float32), dist.get_rank(), []
    for case in cases:
        source, target = (shard_map_of(c, side) for side in case)
        moved = plan(source, target, node)
        got, expected = room_for(target, torch.float32), hold(target, tensors)
        traffic = execute(schedule(moved, rank, torch.float32, bucket_bytes), hold(source, tensors), got)
        wrong += [f"{case}: {name}" for name in expected if not torch.equal(got[name], expected[name])]
        counted = (traffic.bytes_received, moved.lower_bound(rank, 4), moved.traffic(4).get(rank))
        if counted[0] != counted[1] or (counted[2] and counted[2].received != counted[0]):
            wrong.append(f"{case}: bytes {counted}")
    return wrong


@pytest.mark.parametrize("family", CASES)
@pytest.mark.parametrize("node,bucket_bytes", [pytest.param(8, 10**6, marks=pytest.mark.nightly), (2, 4000)])
def test_execute_weights_are_bitwise_equal_and_bytes_the_lower_bound(ranks, family, node, bucket_bytes):
    assert len(DENSE + MIXTURE + LATENT) >= 20
    assert ranks.run(RANKS, move_all, family, node, bucket_bytes) == [[]] * RANKS


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


def test_execute_casts_before_sending_except_float32_router_bias(ranks):
    for full, half, same, exact in ranks.run(RANKS, cast):
        assert full == 2 * half and same and exact  # every rank has the biases: none travels


@pytest.mark.parametrize(
    ("side", "shape", "message"),
    [
        ("source", None, "source: the parameter 'output_layer.weight' of the plan is missing"),
        ("target", (3, 4), r"target: 'lm_head.weight' has shape \(3, 4\), but \(101, 8\) in the plan"),
    ],
)
def test_execute_wrong_tensors_are_named_and_nothing_is_written(side, shape, message):
    weights = weight_table(config("llama"))
    source, target = weights.shard_map_megatron(Placement.on(Layout(), 1)), weights.shard_map_replicated((0,))
    tensors = checkpoint(config("llama"), torch.float32)
    have = {name: assemble(shard, tensors) for name, shard in source.shards(0).items()}
    got = {name: torch.zeros(shard.shape) for name, shard in target.shards(0).items()}
    wrong, name = (have, "output_layer.weight") if side == "source" else (got, "lm_head.weight")
    if shape is None:
        del wrong[name]
    else:
        wrong[name] = torch.zeros(shape)
    with pytest.raises(UserError, match=message):
        execute(schedule(plan(source, target), 0, torch.float32), have, got)
    assert not any(tensor.any() for tensor in got.values())


class Allocations(TorchDispatchMode):
    """Counts the bytes of storages that are made inside, and the most that live at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        leaves = tree_leaves((args, kwargs))
        given = {leaf.untyped_storage()._cdata for leaf in leaves if isinstance(leaf, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in given | self._known:
                    self._known.add(storage._cdata)
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        return result

    def _freed(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes


def peaks(hidden: int, layers: int, bucket_bytes: int) -> list[tuple[int, int, int]]:
    """(most extra bytes, bytes of the model's share, bytes of the largest piece) for some pairs."""
    c = config("qwen3_moe", hidden_size=hidden, num_hidden_layers=layers)
    tensors, rank, found = checkpoint(c, torch.float32), dist.get_rank(), []
    for case in (MIXTURE[0], MIXTURE[1], MIXTURE[5]):
        source, target = (shard_map_of(c, side) for side in case)
        have, got = hold(source, tensors), room_for(target, torch.bfloat16)
        own = schedule(plan(source, target, 2), rank, torch.bfloat16, bucket_bytes)
        with Allocations() as allocations:
            execute(own, have, got)
        largest = max(2 * t.numel() for t in tensors.values())
        found.append((allocations.peak, sum(t.nbytes for t in got.values()), largest))
    return found


def test_execute_extra_memory_is_two_buckets_for_any_model(ranks):
    bucket = 12 * 1024
    for hidden, layers in ((64, 4), (256, 8)):
        for found in ranks.run(RANKS, peaks, hidden, layers, bucket):
            for peak, share, largest in found:
                assert 0 < peak <= 2 * bucket + largest
                if hidden == 256:
                    assert share > 5 * peak


def test_allocations_counter_measures_peak_bytes():
    with Allocations() as allocations:
        kept = torch.empty(1000, dtype=torch.uint8)
        for _ in range(3):
            torch.ones(500, dtype=torch.uint8)
        kept.view(10, 100)[0].add_(1)
    assert allocations.peak == 1500
