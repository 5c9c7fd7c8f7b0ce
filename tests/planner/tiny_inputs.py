"""Small models on paper, whose memory can be counted by hand, and the published ones."""

import json
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from verl_mg.cli import main
from verl_mg.config import load_config
from verl_mg.models.hf_config import parse_config, read_config
from verl_mg.planner.efficiency import Efficiency
from verl_mg.planner.from_config import PlanRequest, plan_request
from verl_mg.planner.inputs import PlanInputs
from verl_mg.recipes import ppo
from verl_mg.sharding.weight_table import weight_table

TIMELESS = (
    *("half_rows", "elementwise", "layer", "expert_layer", "decode_step", "decode_sample", "decode_layer"),
    *("all_reduce_near", "all_reduce_far", "sync_start", "iteration"),
)
IDEAL = Efficiency(**{field.name: 1.0 for field in fields(Efficiency)} | dict.fromkeys(TIMELESS, 0.0) | {"fp8": 2.0})
"""Hardware without losses: only FLOPs and bytes take time, which can be counted by hand."""
CONFIGS = Path(__file__).parents[2] / "tools" / "model_configs"

DENSE = {
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "intermediate_size": 64,
    "vocab_size": 64,
}
MIXTURE = DENSE | {
    "model_type": "qwen3_moe",
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
LATENT = DENSE | {
    "model_type": "deepseek_v3",
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}


def tiny(raw: dict[str, Any], ranks: int = 8, **options: Any) -> PlanInputs:
    """A tiny model; a micro-batch has 64 tokens, a device 80 GiB unless said otherwise."""
    return PlanInputs(
        weight_table(parse_config(raw)),
        ranks,
        **{"micro_batch": 64, "tokens_per_iteration": 1024, "sequence": 32, "memory": 80, **options},
    )


def published(name: str, ranks: int, **options: Any) -> PlanInputs:
    return PlanInputs(weight_table(read_config(CONFIGS / f"{name}.json")), ranks, **options)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which a command is refused."""
    with pytest.raises(SystemExit) as left:
        main(list(arguments))
    err = capsys.readouterr().err
    assert left.value.code == 2 and err.startswith("error: ") and err.count("\n") == 1
    return err


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    main([*arguments, "--json"])
    numbers: dict[str, Any] = json.loads(capsys.readouterr().out)
    return numbers


def request(*overrides: str, recipe: ModuleType = ppo) -> PlanRequest:
    """The values of a small configuration for a plan."""
    small = ["model.path=m", "data.train=t.jsonl", "model.dtype=bfloat16", "rollout.engine=sglang"]
    config = load_config(None, [*small, *overrides], recipe.Config)
    return plan_request(config, recipe.roles(config.algorithm))
