"""Parameters of modules that are memory of a rank's model."""

import torch

from tests.helpers.random_models import assemble, checkpoint, config
from verl_mg.layout import EngineLayout, EnginePlacement, Layout, Placement
from verl_mg.models.tensor_index import TensorInfo
from verl_mg.reshard import execute, plan, schedule
from verl_mg.sharding.boxes import Piece, Shard, full_box
from verl_mg.sharding.shard_map import ExplicitShardMap
from verl_mg.sharding.weight_table import weight_table
from verl_mg.weight_sync.hf_module import Alias, aliases


def test_aliases_module_on_one_rank_shares_all_but_qkv():
    weights = weight_table(config("llama"))
    source, target = weights.shard_map_megatron(Placement.on(Layout(), 1)), weights.shard_map_replicated((0,))
    found = aliases(schedule(plan(source, target), 0, torch.float32))
    apart = {name for name in weights.transformers() if name not in found}
    assert apart == {f"model.layers.{i}.self_attn.{x}_proj.weight" for i in range(4) for x in "qkv"}
    fc1 = "decoder.layers.2.mlp.linear_fc1.weight"
    assert found["model.layers.2.mlp.gate_proj.weight"] == Alias(fc1, (0, 16))
    assert found["model.layers.2.mlp.up_proj.weight"] == Alias(fc1, (16, 32))
    assert found["model.embed_tokens.weight"] == Alias("embedding.word_embeddings.weight", (0, 101))


def test_aliases_are_not_written_again_and_have_the_values():
    c = config("llama")
    weights, tensors = weight_table(c), checkpoint(c, torch.float32)
    source, target = weights.shard_map_megatron(Placement.on(Layout(), 1)), weights.shard_map_replicated((0,))
    messages = schedule(plan(source, target), 0, torch.float32)
    have = {name: assemble(shard, tensors) for name, shard in source.shards(0).items()}
    before = {name: tensor._version for name, tensor in have.items()}
    views = {name: have[alias.source][slice(*alias.rows)] for name, alias in aliases(messages).items()}
    got = {name: torch.zeros(shard.shape) for name, shard in target.shards(0).items()} | views
    execute(messages, have, got)
    for name, shard in target.shards(0).items():
        assert torch.equal(got[name], assemble(shard, tensors)), name
    assert {name: tensor._version for name, tensor in have.items()} == before
    assert all(any(v.untyped_storage().data_ptr() == t.untyped_storage().data_ptr() for t in have.values())
               for v in views.values())  # fmt: skip


def test_aliases_different_or_received_shards_are_not_shared():
    weights = weight_table(config("qwen3_moe"))
    source = weights.shard_map_megatron(Placement.on(Layout.parse("tp2"), 2))
    target = weights.shard_map_engine(EnginePlacement(EngineLayout(), (0, 1)))
    found = aliases(schedule(plan(source, target), 0, torch.float32))
    # One rank of two holds whole what is not cut, and nothing else.
    assert found and all("norm" in name or name.endswith("mlp.gate.weight") for name in found)


def test_aliases_equal_layouts_share_everything():
    weights = weight_table(config("qwen3"))
    source = weights.shard_map_megatron(Placement.on(Layout.parse("tp2-pp2"), 4))
    moves = plan(source, weights.shard_map_megatron(Placement.on(Layout.parse("tp2-pp2"), 4)))
    for rank in range(4):
        shards = source.shards(rank)
        found = aliases(schedule(moves, rank, torch.float32))
        assert found == {name: Alias(name, (0, shard.shape[0])) for name, shard in shards.items()}


def test_aliases_share_scalars_that_a_rank_has():
    tensors = {name: TensorInfo(position, shape) for position, (name, shape) in enumerate({"s": (), "m": (2,)}.items())}
    shards = {name: Shard(t.shape, (Piece(name, full_box(t.shape), full_box(t.shape)),)) for name, t in tensors.items()}
    source, target = ({0: shards, 1: {}}, {0: shards, 1: shards})
    moves = plan(ExplicitShardMap(source, tensors), ExplicitShardMap(target, tensors))
    assert aliases(schedule(moves, 0, torch.float32)) == {"s": Alias("s", (0, 1)), "m": Alias("m", (0, 2))}
    assert aliases(schedule(moves, 1, torch.float32)) == {}
