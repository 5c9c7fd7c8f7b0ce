"""What a server's own description says about the shards that its ranks can receive."""

import json

import pytest

from verl_mg.engines.sglang.arguments import QUANTIZATIONS
from verl_mg.engines.sglang.shard_receiver import RECEIVER
from verl_mg.servers.info import _shard_obstacle


def server(wire, **others):
    """The fields of a server that has started for weights in a form."""
    form = QUANTIZATIONS[wire] and json.dumps({"quantization_config": QUANTIZATIONS[wire]})
    fields = {"custom_weight_loader": [RECEIVER], "pp_size": 1, "json_model_override_args": form, "quantization": None}
    fields |= {"fp8_gemm_runner_backend": "auto", "enable_eplb": False, "ep_num_redundant_experts": 0}
    return fields | {"init_expert_location": "trivial"} | others


@pytest.mark.parametrize("wire", QUANTIZATIONS)
def test_shard_obstacle_server_in_the_form_of_the_job_has_none(wire):
    assert _shard_obstacle(server(wire), wire) == ""


@pytest.mark.parametrize(
    ("described", "wire", "words"),
    [
        (server("fp8_block"), "mxfp8", "its weights are quantized in another way"),
        (server("mxfp8"), "cast", "its weights are quantized in another way"),
        (server("mxfp8", quantization="mxfp8"), "mxfp8", "its weights are quantized in another way"),
        (
            server("mxfp8", fp8_gemm_runner_backend="flashinfer_trtllm"),
            "mxfp8",
            "its --fp8-gemm-backend flashinfer_trtllm reads weights in another order than they are sent in",
        ),
        (server("cast", enable_eplb=True), "cast", "its experts are not in the order of the checkpoint"),
    ],
)
def test_shard_obstacle_server_that_would_read_other_weights_has_one(described, wire, words):
    assert _shard_obstacle(described, wire).startswith(words)


def test_shard_obstacle_kernel_of_another_form_does_not_matter():
    assert _shard_obstacle(server("fp8_channel", fp8_gemm_runner_backend="flashinfer_trtllm"), "fp8_channel") == ""
