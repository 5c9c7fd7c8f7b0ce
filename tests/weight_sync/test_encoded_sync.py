"""Weight sync into quantized engines: what arrives in an engine's process, without the engine."""

import pytest
import torch
import torch.distributed as dist

from tests.helpers.roles import build_role
from tests.oracles.installed_source import installed_functions
from verl_mg.config import OptimizerConfig
from verl_mg.config.roles import LoraConfig
from verl_mg.engines.ipc_payload import named_views, open_payload
from verl_mg.layout import EngineLayout, EnginePlacement, Layout, Placement
from verl_mg.megatron.process_groups import ParallelGroups
from verl_mg.models.hf_config import read_config
from verl_mg.models.tiny_model import make_tiny_model
from verl_mg.planner.inputs import PlanInputs
from verl_mg.planner.iteration_time import weight_sync
from verl_mg.planner.memory import rollout_memory
from verl_mg.reshard import best_stride
from verl_mg.roles.models import Actor
from verl_mg.sharding.weight_table import weight_table
from verl_mg.weight_sync.engines import ProcessEngineSync, engine_groups


class ReceivingEngine:
    """An engine that keeps what it loads: the parameters of each of its ranks."""

    def __init__(self, size):
        self.parameters = [{} for _ in range(size)]

    def load(self, payloads, version):
        for rank, payload in enumerate(payloads):
            views = named_views(*open_payload(payload, torch.device("cpu")))
            self.parameters[rank] |= {name: tensor.clone() for name, tensor in views}
        return 0

    def loaded(self, number): ...


def synced(model, wire, lora):
    """Transfers an actor of tp4 into two engines of tp2; returns the names of wrong parameters, and the metrics."""
    actor = build_role(
        Actor,
        model,
        ParallelGroups(Placement.on(Layout(tp=4), 4)),
        dtype=torch.bfloat16,
        tokens_per_micro_batch=64,
        optimizer=OptimizerConfig(),
        lora=LoraConfig(rank=4) if lora else None,
    )
    if lora:
        for adapter in actor.runner.adapters().values():
            torch.manual_seed(7)
            adapter.data.normal_()
    table = actor.runner.table
    placement = EnginePlacement(EngineLayout(tp=2), (0, 1, 2, 3))
    placement = best_stride(actor.runner.shard_map(), table, placement, 4)
    leaders = {ranks[0]: number for number, ranks in placement.members().items()}
    plain, encoded = (ReceivingEngine(2) if dist.get_rank() in leaders else None for _ in range(2))
    groups = engine_groups(placement)
    ProcessEngineSync(placement, groups, plain, table).transfer(actor)
    metrics = ProcessEngineSync(placement, groups, encoded, table, wire).transfer(actor)
    wrong = []
    for rank in range(2) if plain else ():
        wrong += differences(plain.parameters[rank], encoded.parameters[rank])
    held = [sum(tensor.nbytes for tensor in part.values()) for part in encoded.parameters] if encoded else []
    return wrong, metrics, held


def differences(plain, encoded):
    file = "srt/layers/quantization/mxfp8_block_convert.py"
    quantize = installed_functions("sglang", file, "bf16_to_block_fp8_128", torch=torch)["bf16_to_block_fp8_128"]
    for name, parameter in plain.items():
        scales = encoded.get(name + "_scale_inv")
        if scales is None:
            if not torch.equal(encoded[name], parameter):
                yield name
            continue
        values, factors = quantize(parameter)
        bits = values.view(torch.uint8), encoded[name].view(torch.uint8)
        if not (torch.equal(*bits) and torch.equal(factors, scales)):
            yield name
    if len(encoded) < len(plain) + 4:
        yield "no scales"


@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_transfer_into_fp8_engines_equals_their_quantizer_on_what_they_would_have_received(ranks, tmp_path, lora):
    model = make_tiny_model(
        tmp_path, "qwen3", hidden=128, layers=2, heads=4, kv_heads=4, head_dim=64, ffn=256, init_std=0.2
    )
    results = ranks.run(4, synced, model, "fp8_block", lora)
    assert [wrong for wrong, _, _ in results] == [[]] * 4
    inputs = PlanInputs(weight_table(read_config(model)), 4, node=4, wire="fp8_block")
    on_paper = weight_sync(inputs, Layout(tp=4), EngineLayout(tp=2))
    (weights,) = rollout_memory(inputs, EngineLayout(tp=2)).weights
    for _, metrics, held in results:
        assert metrics["weight_sync/bytes_received"] == metrics["weight_sync/bytes_lower_bound"] > 0
        assert metrics["weight_sync/bytes_received"] == sum(on_paper.received)
        assert held in ([], [weights, weights])
