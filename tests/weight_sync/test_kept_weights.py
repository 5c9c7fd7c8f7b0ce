"""Weights that come back from engines, to any layout, bit for bit or not at all."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.weight_sync.receivers import TABLE, EngineProcess, Source, differing
from verl_mg import device
from verl_mg.checkpoint.sharded_safetensors import StoredBox
from verl_mg.layout import EngineLayout, EnginePlacement
from verl_mg.sharding.boxes import full_box
from verl_mg.training.weights import stored_boxes
from verl_mg.weight_sync.ipc import ProcessEngineSync, engine_groups
from verl_mg.weight_sync.kept_weights import NAMESPACE, KeptWeights, obstacle, take_back

CHUNK = 2**18
"""Bytes of a chunk, of which a model has several."""


def filled(kept: KeptWeights, source: Any, namespace: str) -> dict[str, torch.Tensor] | None:
    """The parameters of this rank, box by box as a checkpoint has them; None where a box was not filled."""
    shards = source.shard_map().shards(dist.get_rank())
    values = {name: torch.zeros_like(tensor) for name, tensor in source.served_parameters().items()}
    boxes: list[StoredBox] = []
    for name, tensor in values.items():
        boxes += stored_boxes(namespace, shards[name], tensor, full_box(tuple(tensor.shape)))
    return values if all([kept.fill(box) for box in boxes]) else None


def back_from_engines(layout: str) -> dict[str, object]:
    """What ranks of a layout get back from two engines on ranks 0 to 3, and from engines with a fault."""
    placement, rank = EnginePlacement(EngineLayout(tp=2), (0, 1, 2, 3)), dist.get_rank()
    engine = EngineProcess("tp2") if rank in (0, 2) else None
    groups = engine_groups(placement)
    ProcessEngineSync(placement, groups, engine, TABLE).transfer(Source("tp4").at(1))
    source, engines = Source(layout), TABLE.shard_map_engine(placement)
    source.at(1)

    def taken() -> KeptWeights | str:
        return take_back(source, engines, groups[rank // 2], engine, CHUNK)

    kept = taken()
    assert isinstance(kept, KeptWeights)
    values = filled(kept, source, NAMESPACE)
    report: dict[str, object] = {
        "differ": values and differing(values, source.served_parameters()),
        "moments": filled(kept, source, "actor/exp_avg"),
    }
    if rank == 2:
        engine.loads_left = 1
    report["died"] = taken()
    if rank == 2:
        engine.loads_left = 10**6
        engine.parameters[1]["model.norm.weight"] = engine.parameters[1]["model.norm.weight"].float()
    report["other dtype"] = taken()
    return report


@pytest.mark.parametrize("layout", ["tp2-pp2", pytest.param("tp4", marks=pytest.mark.nightly)])
def test_weights_come_back_bit_for_bit_or_not_at_all(ranks, layout):
    for report in ranks.run(4, back_from_engines, layout):
        assert report["differ"] == [] and report["moments"] is None
        assert report["died"] == "its process ended"
        assert report["other dtype"] == "the engine's model has no parameter model.norm.weight in torch.bfloat16"


def missing_tensor() -> KeptWeights | str:
    """From an engine without the second layer."""
    placement = EnginePlacement(EngineLayout(), (0,))
    engines, source = TABLE.shard_map_engine(placement), Source("tp1")
    source.at(1)
    fewer = {name: info for name, info in engines.tensors.items() if ".layers.1." not in name}
    without = SimpleNamespace(tensors=fewer, ranks=engines.ranks)
    return take_back(source, without, None, None, CHUNK)


def test_weights_do_not_come_back_from_engines_without_a_tensor(ranks):
    (problem,) = ranks.run(1, missing_tensor)
    assert problem == "the engines do not have model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("lora", "wire", "dtype", "backend", "expected"),
    [
        (None, "cast", torch.float32, "nccl", ""),
        (None, "cast", torch.float32, "gloo", "files are faster"),
        (None, "cast", torch.bfloat16, "nccl", "the optimizer has them in float32"),
        (None, "fp8_block", torch.float32, "nccl", "rollout.wire=fp8_block rounds them"),
        (object(), "cast", torch.float32, "nccl", "adapters are trained, and merged into what engines have"),
    ],
)
def test_obstacle_is_whatever_rounds_or_merges_weights_or_is_slower(monkeypatch, lora, wire, dtype, backend, expected):
    monkeypatch.setattr(device, "group_backend", lambda: backend)
    assert obstacle(SimpleNamespace(lora=lora, dtype=dtype), wire) == expected
