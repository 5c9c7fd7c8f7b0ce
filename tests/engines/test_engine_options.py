"""Options of engines on their way to the engine's process."""

import json
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from tests.helpers.random_models import config
from verl_mg.config import Config
from verl_mg.engines.engine_options import AdapterSettings, EngineNodes, EngineOptions
from verl_mg.layout import EngineLayout
from verl_mg.sharding.weight_table import weight_table


def test_options_as_json_are_the_same_options():
    options = EngineOptions(
        layout=EngineLayout(tp=4, ep=2, adp=2), dtype=torch.bfloat16, wire="int4", max_running=3, max_positions=64,
        request_timeout=5.5, keep_cache=True, memory_fraction=0.5, first_gpu=2, gpu_step=2, sleeps=False, seed=7,
        nodes=EngineNodes(2, 1, "10.0.0.2"), routed_experts=True, deterministic=True, reads_text=True,
        selected_keys=True, adapters=AdapterSettings(8, ("q_proj", "k_proj")), python=Path("/usr/bin/python"),
        extra={"log_level": "info"},
    )  # fmt: skip
    plain = EngineOptions(layout=EngineLayout(), dtype=torch.float32, max_running=1, max_positions=8)
    assert all(getattr(options, field.name) != getattr(plain, field.name) for field in fields(options))
    for one in (options, plain):
        assert EngineOptions.from_json(json.loads(json.dumps(one.to_json()))) == one


@pytest.mark.parametrize(
    ("keys", "option", "value"),
    [
        ({"engine": "vllm", "request_timeout_s": 5.5}, "request_timeout", 5.5),
        ({"engine": "vllm", "keep_kv_cache": True}, "keep_cache", True),
        ({"engine": "vllm", "python": "/opt/python"}, "python", Path("/opt/python")),
        ({"engine": "vllm", "vllm": {"seed": 3}}, "extra", {"seed": 3}),
        ({"engine": "sglang", "replay_selections": True}, "selected_keys", True),
        ({"engine": "sglang", "sglang": {"log_level": "info"}}, "extra", {"log_level": "info"}),
    ],
)
def test_options_of_a_job_have_the_values_of_its_keys(keys, option, value):
    whole = Config.model_validate({"model": {"path": "m"}, "data": {"train": "d"}, "rollout": keys})
    options = EngineOptions.of_job(whole, torch.float32, weight_table(config("qwen3")))
    assert getattr(options, option) == value
