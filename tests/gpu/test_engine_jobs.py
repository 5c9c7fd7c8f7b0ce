"""GRPO on one rank with real engines that share its device: what they serve after each update of the weights."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tests.gpu.served_jobs import (
    CACHE_TOKENS,
    QUANTIZED,
    Reported,
    errors,
    make_inputs,
    shown,
    updates,
    updates_of_quickstart,
)
from tests.helpers.engines import SGLANG, VLLM
from tests.helpers.machine import VLLM_PYTHON, Machine
from tests.helpers.rank_pool import RankPool

JOB_S = 240
LORA = "actor.lora={rank: 8, alpha: 16}"
SMALL_CACHE = f"rollout.sglang.max_total_tokens={CACHE_TOKENS}"  # so that several jobs can share a GPU
FEW_SAMPLES = ["algorithm.prompts_per_iteration=8", "algorithm.group_size=2", "evaluation.prompts=8"]

BACKENDS = {
    "megatron": ["actor.offload=true"],
    "fsdp": ["actor.backend=fsdp", "actor.offload=true"],
    "fsdp-host": ["actor.backend=fsdp", "fsdp.cpu_offload=true"],
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def trained(ranks: RankPool, machine: Machine, inputs: Path, run: Path, engine: str, *overrides: str) -> Reported:
    """Some iterations in bfloat16, on the CPU in float32."""
    for name in ("model", "sums.jsonl", "reward.py"):
        (run / name).symlink_to(inputs / name)
    dtype = "bfloat16" if machine.gpus else "float32"
    # The Python of a warm start is for the CPU.
    python = [f"rollout.python={VLLM_PYTHON}"] if engine == "vllm" and machine.gpus else []
    cache = [SMALL_CACHE] if engine == "sglang" else []
    ((reported),) = ranks.run(1, updates, run, [f"model.dtype={dtype}", *python, *cache, *overrides], engine)
    return reported


def assert_serves(run: Path, reported: Reported, machine: Machine, name: str) -> None:
    """Answers are those of the saved checkpoint, and each update shows in them."""
    found = [errors(run, seen) for seen in reported]
    shown(name, reported, found)
    for seen, error in zip(reported, found, strict=True):
        assert seen["grad_norm"] > 0
        assert error.mean() < (0.05 if machine.gpus else 1e-4) and error.max() < (0.5 if machine.gpus else 1e-3)
        assert seen["mismatch"] < (0.5 if machine.gpus else 1e-3)
        assert seen["sync"][0] == seen["sync"][1]
    assert reported[0]["logprobs"] != reported[1]["logprobs"]


@pytest.mark.timeout(JOB_S)
@pytest.mark.parametrize(
    ("backend", "engine"),  # with vLLM one backend, since what is sent does not depend on the engine
    [
        *(pytest.param(backend, *SGLANG.values, marks=SGLANG.marks) for backend in BACKENDS),
        pytest.param("megatron", *VLLM.values, marks=VLLM.marks),
    ],
)
def test_colocated_engine_serves_the_saved_checkpoint(ranks, machine, inputs, tmp_path, engine, backend):
    """The engine sleeps while the rank trains."""
    reported = trained(ranks, machine, inputs, tmp_path, engine, *BACKENDS[backend])
    assert_serves(tmp_path, reported, machine, f"{engine}, {backend}")


@pytest.mark.needs(sglang=True)
@pytest.mark.timeout(JOB_S)
@pytest.mark.parametrize(
    "attention",
    [
        pytest.param("", id="default"),
        # SGLang has one kernel of attention on the CPU.
        pytest.param("torch_native", marks=pytest.mark.needs(gpu=True)),
    ],
)
def test_quickstart_configuration_with_sglang_serves_float32(ranks, machine, tmp_path, attention):
    """The kernels that SGLang prefers on GPUs have no float32."""
    chosen = [f"rollout.sglang.attention_backend={attention}"] if attention else []
    few = [] if machine.gpus else FEW_SAMPLES
    ((reported),) = ranks.run(1, updates_of_quickstart, tmp_path, [SMALL_CACHE, *chosen, *few])
    found = [errors(tmp_path, seen) for seen in reported]
    shown(f"quickstart, attention {attention or 'by default'}", reported, found)
    # On a GPU sums have another order; attention may multiply float32 as three products of TF32.
    limit = 1e-2 if machine.gpus else 1e-4
    assert all(error.max() < limit for error in found)
    assert all(seen["mismatch"] < 5 * limit for seen in reported)


@pytest.mark.needs(gpu=True, sglang=True)
@pytest.mark.timeout(JOB_S)
@pytest.mark.parametrize(
    "wire", [pytest.param(wire, marks=pytest.mark.needs(blackwell=wire == "mxfp8")) for wire in QUANTIZED]
)
def test_engine_with_quantized_weights_serves_the_saved_checkpoint(ranks, machine, inputs, tmp_path, wire):
    """SGLang has no kernels for quantized weights on the CPU."""
    # Random weights lose more in eight bits than trained ones: means of 0.08 to 0.12 were measured, near the default.
    bound = "rollout.max_mismatch=0.5"
    reported = trained(ranks, machine, inputs, tmp_path, "sglang", f"rollout.wire={wire}", bound)
    whole, found = ([errors(tmp_path, seen, values) for seen in reported] for values in (None, QUANTIZED[wire]))
    shown(f"{wire}, against whole weights", reported, whole)
    shown(f"{wire}, against quantized weights", reported, found)
    # Inputs of a product are FP8 too, those of INT4 are not.
    assert all(error.mean() < (0.05 if wire == "int4" else 0.15) for error in found)
    if wire == "int4":
        assert all(error.mean() < exact.mean() for error, exact in zip(found, whole, strict=True))
    assert reported[0]["grad_norm"] > 0 and reported[0]["logprobs"] != reported[1]["logprobs"]


@pytest.mark.timeout(JOB_S)
@pytest.mark.parametrize(
    ("engine", "overrides"),
    [
        pytest.param(*SGLANG.values, ["rollout.adapters=true", "rollout.sleep=false"], id="alone", marks=SGLANG.marks),
        pytest.param(*SGLANG.values, ["actor.offload=true"], id="merged-sglang", marks=SGLANG.marks),
        pytest.param("hf", [], id="merged-hf"),
    ],
)
def test_engine_serves_trained_adapters(ranks, machine, inputs, tmp_path, engine, overrides):
    """Adapters that are sent alone, and adapters that are merged into the weights."""
    reported = trained(ranks, machine, inputs, tmp_path, engine, LORA, "actor.optimizer.lr=3e-2", *overrides)
    assert_serves(tmp_path, reported, machine, f"adapters, {engine}")
    assert trained_adapters(tmp_path / reported[-1]["checkpoint"])


def trained_adapters(checkpoint: Path) -> bool:
    """Whether each B, which begins as zeros, is different from them."""
    config = json.loads((checkpoint / "adapter" / "adapter_config.json").read_text())
    with safe_open(checkpoint / "adapter" / "adapter_model.safetensors", "pt") as file:
        factors: list[Any] = [file.get_tensor(name) for name in file.keys() if ".lora_B." in name]  # noqa: SIM118
    return config["r"] == 8 and bool(factors) and all(factor.any() for factor in factors)
