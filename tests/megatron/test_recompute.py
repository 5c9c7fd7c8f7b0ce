"""Selective recomputation: the backward pass runs the named parts of a layer again, and nothing else."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.helpers.roles import megatron_runner
from tests.helpers.tiny_models import rows_for, tiny_model
from tests.megatron.training import OPTIMIZER, update
from verl_mg.errors import UserError
from verl_mg.megatron.trainer import MegatronTrainer
from verl_mg.megatron.transformer_config import check_recompute
from verl_mg.training.model_spec import ModelSpec

LAYERS, DENSE = 4, 1
PARTS = {
    "core_attn": {"core_attention": LAYERS},
    "layernorm": {"input_layernorm": LAYERS, "pre_mlp_layernorm": LAYERS},
    "mla_up_proj": {"linear_q_up_proj": LAYERS, "linear_kv_up_proj": LAYERS},
    "mlp": {"mlp": DENSE},
    "moe": {"router": LAYERS - DENSE, "experts": LAYERS - DENSE, "shared_experts": LAYERS - DENSE},
    "shared_experts": {"shared_experts": LAYERS - DENSE},
}
"""{name: modules that run twice, of DeepSeek-V3 with one layer without experts}."""
COUNTED = {module for parts in PARTS.values() for module in parts}


def forward_calls(model, recompute):
    """How often modules of each name ran in one update."""
    trainer = MegatronTrainer(megatron_runner(model, recompute=recompute), OPTIMIZER)
    calls = Counter()
    for name, module in trainer.runner.chunks[0].named_modules():
        last = name.rpartition(".")[2]
        if last in COUNTED and "layers" in name:
            module.register_forward_pre_hook(lambda *_, last=last: calls.update([last]))
    rows = rows_for(model, 4)
    update(trainer, [rows], rows)
    return calls


@pytest.mark.parametrize("part", PARTS)
def test_recomputed_part_runs_twice_and_the_others_once(ranks, tmp_path, part):
    model = tiny_model(tmp_path / "model", "deepseek_v3")
    (once,), (calls,) = ranks.run(1, forward_calls, model, False), ranks.run(1, forward_calls, model, [part])
    assert calls - once == Counter(PARTS[part])
    assert once["core_attention"] == LAYERS


@pytest.mark.parametrize(
    ("family", "recompute", "missing"),
    [
        ("qwen3", ["core_attn", "moe"], "moe"),
        ("qwen3", ["mla_up_proj"], "mla_up_proj"),
        ("qwen3_moe", ["mlp"], "mlp"),
        ("qwen3_moe", ["shared_experts"], "shared_experts"),
    ],
)
def test_check_recompute_names_the_part_that_a_model_does_not_have(configs, family, recompute, missing):
    with pytest.raises(UserError, match=f"recompute: the model has no {missing}. Leave it out."):
        check_recompute(configs[family], ModelSpec(Path("unread"), torch.float32, recompute=recompute))
