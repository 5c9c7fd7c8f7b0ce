"""What an engine on GPUs is started with and uses, against the installed vLLM: its own functions, or its source."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import warm_start
from tests.helpers.internals import printed
from tests.helpers.tiny_models import vision_model
from tests.helpers.traces import needs_vllm
from verl_mg.engines.engine_options import AdapterSettings, EngineNodes, EngineOptions
from verl_mg.engines.vllm.arguments import engine_arguments, environment, place_arguments
from verl_mg.layout import EngineLayout
from verl_mg.models.tiny_model import make_tiny_model

LIMITS = {"dtype": torch.bfloat16, "max_running": 16, "max_positions": 256}
ENGINES = {
    "tp2": EngineOptions(layout=EngineLayout(tp=2), first_gpu=4, gpu_step=2, deterministic=True, **LIMITS),
    "ep4": EngineOptions(layout=EngineLayout(tp=4, ep=4), routed_experts=True, sleeps=False, **LIMITS),
    "adapters": EngineOptions(
        layout=EngineLayout(tp=2), sleeps=False, adapters=AdapterSettings(12, ("q_proj", "k_proj", "v_proj")), **LIMITS
    ),
}

# What a 1.7B model leaves of a GPU with 80 GiB, with a reference on the device, and an 8B model.
FREE = [round(size * 2**30) for size in (49.6, 46.4, 44.1)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3_moe", characters="abcdefgh")


@pytest.fixture(scope="module")
def vllm_says(model) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        arguments = [engine_arguments(model, settings) for settings in ENGINES.values()]
        arguments.append(engine_arguments(vision_model("qwen3_vl"), ENGINES["tp2"]))
        arguments[0] |= place_arguments(replace(ENGINES["tp2"], nodes=EngineNodes(2, 0)), range(1), "10.0.0.1:12001")
    given = json.dumps(arguments), json.dumps({"free": FREE, "fraction": 0.6})
    return printed(warm_start.vllm().python, "tests.engines.vllm.contract_probe", *given)


def test_engine_arguments_on_gpus_place_the_engine_and_write_experts_in_place(on_gpus, model):
    first, second, third = (engine_arguments(model, settings) for settings in ENGINES.values())
    assert first["device_ids"] == [4, 6] and second["device_ids"] == [0, 1, 2, 3]
    for name in ("enable_sleep_mode", "sleep_mode_offload_cudagraph"):
        assert (first[name], second[name]) == (True, False)
    assert (first["enable_expert_parallel"], second["enable_expert_parallel"]) == (False, True)
    assert second["enable_return_routed_experts"] and second["moe_backend"] == "triton"
    assert "enforce_eager" not in first and "enable_lora" not in first
    assert (third["enable_lora"], third["max_lora_rank"]) == (True, 16)


def test_environment_of_a_deterministic_engine_asks_for_batch_invariance(on_gpus, model):
    variables = [environment(model, settings).get("VLLM_BATCH_INVARIANT") for settings in ENGINES.values()]
    assert variables == ["1", None, None]


def test_place_arguments_of_a_part_name_the_first_node(on_gpus, model):
    nodes = EngineNodes(2, 1, "10.0.0.2")
    settings = EngineOptions(layout=EngineLayout(tp=4), first_gpu=2, nodes=nodes, **LIMITS)
    assert engine_arguments(model, settings)["device_ids"] == [2, 3]
    assert environment(model, settings)["VLLM_HOST_IP"] == "10.0.0.2"
    assert place_arguments(settings, range(1), "10.0.0.1:12001") == {
        "distributed_executor_backend": "mp",
        "nnodes": 2,
        "node_rank": 1,
        "master_addr": "10.0.0.1",
        "master_port": 12001,
    }
    assert place_arguments(ENGINES["tp2"], range(1), "10.0.0.1:12001") == {}


@needs_vllm
def test_arguments_of_the_engine_and_of_its_methods_are_those_of_vllm(vllm_says):
    assert vllm_says["unknown"] == [] and "triton" in vllm_says["moe_backends"]
    methods = vllm_says["methods"]
    assert "level" in methods["sleep"] and "tags" in methods["wake_up"]
    assert {"mode", "clear_cache"} <= set(methods["pause_generation"])
    assert "reset_running_requests" in methods["reset_prefix_cache"]
    assert {"weights", "kv_cache"} <= set(vllm_says["tags"])


@needs_vllm
def test_sampler_of_the_second_model_runner_can_be_wrapped(vllm_says):
    """It gets the logits after temperature, by position, and returns those after top-k and top-p."""
    returned = "(sampled, processed_logits)"
    assert vllm_says["sampler"] == {"first": "processed_logits", "returns": returned, "keywords": [0]}


@needs_vllm
def test_worker_on_a_gpu_takes_a_share_of_its_free_memory(vllm_says):
    assert vllm_says["requested"]["of_workers"] == [math.ceil(0.6 * free) for free in FREE]
    fits, *others = vllm_says["requested"]["of_vllm"]
    assert fits == 48 * 2**30 and all("is less than desired GPU memory utilization" in text for text in others)


@needs_vllm
def test_sinks_in_float32_follow_an_update_where_they_are(vllm_says):
    assert vllm_says["derived"] == {"sinks": [1.0, 2.0], "in_place": True}
