"""What SGLang chooses for an engine's arguments on GPUs of each generation, by its own resolution, with faked GPUs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import warm_start
from tests.helpers.internals import printed
from tests.helpers.tiny_models import tiny_model
from tests.helpers.traces import needs_sglang
from verl_mg.engines.engine_options import EngineOptions
from verl_mg.engines.sglang.arguments import (
    EXPERT_RUNNER,
    FLOAT32_ATTENTION,
    FP8_PRODUCTS,
    IN_ORDER,
    MXFP8_IN_ORDER,
    engine_arguments,
)
from verl_mg.layout import EngineLayout
from verl_mg.reshard.encoding import encoding_of

pytestmark = needs_sglang

GENERATIONS = {"A100": (8, 0), "H100": (9, 0), "B200": (10, 0)}
MIXTURES = ("qwen3_moe", "mixtral", "glm4_moe", "gpt_oss", "minimax_m2", "deepseek_v3")
WIRES = ("cast", "fp8_block", "fp8_channel")
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(scope="module")
def sglang_says(tmp_path_factory) -> dict[str, Any]:
    """Resolved arguments by (generation, family, wire or dtype, whether they have our runner), and `choices`."""
    folder, cases = tmp_path_factory.mktemp("models"), {}

    def add(generation: str, family: str, ours: bool = True, **options: Any) -> None:
        model = folder / family if (folder / family).exists() else tiny_model(folder / family, family)
        given = {"dtype": torch.bfloat16, "max_running": 16, "max_positions": 64, "layout": EngineLayout()} | options
        capability = GENERATIONS[generation]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            patch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
            arguments = engine_arguments(Path(model), EngineOptions(**given))
        if not ours:
            del arguments["moe_runner_backend"]
        cases[generation, family, str(options.get("wire", given["dtype"])), ours] = [capability, arguments]

    for generation in GENERATIONS:
        for dtype in DTYPES:
            add(generation, "qwen3", dtype=dtype)
        for family in MIXTURES:
            for wire in WIRES:
                add(generation, family, wire=wire, routed_experts=True)
        add(generation, "qwen3_moe", False, wire="cast")
    add("B200", "qwen3", wire="mxfp8")
    said = printed(warm_start.sglang().python, "tests.engines.sglang.resolution_probe", json.dumps([*cases.values()]))
    return said | dict(zip(cases, said["cases"], strict=True))


@pytest.mark.parametrize("generation", GENERATIONS)
def test_experts_of_a_mixture_have_the_runner_that_is_in_order(sglang_says, generation):
    for family in MIXTURES:
        for wire in WIRES:
            resolved = sglang_says[generation, family, wire, True]
            assert "error" not in resolved, (family, wire, resolved)
            assert resolved["moe_runner_backend"] == resolved["speculative_moe_runner_backend"] == EXPERT_RUNNER


def test_experts_without_our_argument_have_another_runner_on_blackwell(sglang_says):
    chosen = {name: sglang_says[name, "qwen3_moe", "cast", False]["moe_runner_backend"] for name in GENERATIONS}
    assert chosen == {"A100": "auto", "H100": "auto", "B200": "flashinfer_trtllm"}


def test_routers_report_their_choice_for_the_runners_that_are_permitted(sglang_says):
    choices = sglang_says["choices"]
    assert {choices[runner] for runner in IN_ORDER} == {"STANDARD"}
    assert choices["flashinfer_trtllm"] == "BYPASSED" and choices["triton_kernel"] != "STANDARD"


@pytest.mark.parametrize("family", MIXTURES)
def test_scales_of_blocks_are_not_packed_on_blackwell(sglang_says, family):
    chosen = {name: sglang_says[name, family, "fp8_block", True]["fp8_gemm_runner_backend"] for name in GENERATIONS}
    assert chosen == {"A100": "auto", "H100": "auto", "B200": "triton"}


def test_products_in_mxfp8_read_weights_in_the_order_in_which_they_are_written(sglang_says):
    assert sglang_says["B200", "qwen3", "mxfp8", True][FP8_PRODUCTS] == "auto"
    assert {*sglang_says["mxfp8_by_default"]} <= {*MXFP8_IN_ORDER}
    in_order = {kernel for kernel, seen in sglang_says["mxfp8"].items() if all(seen.values())}
    assert in_order == {*MXFP8_IN_ORDER} - {"auto"}
    assert not sglang_says["mxfp8"]["flashinfer_trtllm"]["weight"]
    encoding = encoding_of("mxfp8")
    dtypes = {"weight": f"torch.{encoding.dtype}", f"weight{encoding.scale_suffix}": f"torch.{encoding.scale_dtype}"}
    assert sglang_says["mxfp8_dtypes"] == dtypes


@pytest.mark.parametrize("generation", GENERATIONS)
def test_attention_in_float32_is_the_one_that_has_it(sglang_says, generation):
    resolved = {dtype: sglang_says[generation, "qwen3", str(dtype), True] for dtype in DTYPES}
    assert resolved[torch.float32]["attention_backend"] == FLOAT32_ATTENTION
    assert resolved[torch.bfloat16]["attention_backend"] in ("flashinfer", "fa3", "trtllm_mha")
    assert {resolved[torch.float32][f"{phase}_attention_backend"] for phase in ("prefill", "decode")} == {None}
    assert [resolved[dtype]["dtype"] for dtype in DTYPES] == ["float32", "bfloat16"]
