"""What the installed SGLang resolves engines' arguments to on a GPU: `python -m ...resolution_probe CASES`.

CASES is a list of [compute capability, keyword arguments of `sglang.Engine`] as JSON. Prints one JSON object: for each
case the resolved arguments, or {"error": TEXT} where SGLang refuses them, and the form in which a router of Qwen3-MoE
gives its choice to each runner of experts: only in the form STANDARD it has experts to report.
"""

import json
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import sglang.srt.managers.scheduler  # noqa: F401, imported for the CPU that there is, before there seem to be GPUs
import torch
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.layers.moe import topk
from sglang.srt.layers.moe.utils import MoeRunnerBackend, RoutingMethodType
from sglang.srt.runtime_context import override_platform
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils import common

ASKED = ("attention_backend", "prefill_attention_backend", "decode_attention_backend", "moe_runner_backend",
         "speculative_moe_runner_backend", "fp8_gemm_runner_backend", "quantization", "dtype")  # fmt: skip
GIB = 2**30


def resolved(capability: list[int], arguments: dict[str, Any]) -> dict[str, Any]:
    """SGLang's own resolution on a machine that says it has 8 GPUs of 80 GiB."""
    major, minor = capability
    gpu = SimpleNamespace(major=major, minor=minor, total_memory=80 * GIB, name="GPU", multi_processor_count=132)
    facts = {
        "is_cuda": True,
        "is_sm90": major == 9,
        "is_sm100": major == 10,
        "is_sm100_or_sm110": major == 10,
        "is_sm110": False,
        "is_sm120": False,
        "is_blackwell": major >= 10,
        "is_hopper_with_cuda_12_3": major == 9,
        "has_amx": False,
        "has_flashinfer": True,
        "device_sm": 10 * major + minor,
        "device_capability": (major, minor),
    }
    cuda = {
        "is_available": lambda: True,
        "device_count": lambda: 8,
        "current_device": lambda: 0,
        "get_device_capability": lambda *_, **__: (major, minor),
        "get_device_name": lambda *_, **__: gpu.name,
        "get_device_properties": lambda *_, **__: gpu,
        "mem_get_info": lambda *_, **__: (75 * GIB, 80 * GIB),
        "_lazy_init": lambda: None,
        "set_device": lambda *_: None,
    }
    memory = {"get_device_memory_capacity": lambda *_, **__: 80 * 1024}
    with mock.patch.multiple(torch.cuda, **cuda), mock.patch.multiple(common, **memory), override_platform(**facts):
        server = ServerArgs(**arguments)
        try:
            server.resolve_once()
            server.check_server_args()
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        view = resolved_view(server)
        return {name: getattr(view, name) for name in ASKED}


def choice_for(runner: MoeRunnerBackend) -> str:
    # The parts of SGLang's context that a router reads.
    shared = SimpleNamespace(use_waterfill=False, num_shared_topk_slots=0, num_fused_shared_experts=0)
    context = {
        "get_model": lambda: SimpleNamespace(shared_experts=shared),
        "get_lora": lambda: SimpleNamespace(enable_lora=False),
    }
    with mock.patch.multiple(topk, **context):
        router = topk.TopK(top_k=8, layer_id=0, is_draft=False, renormalize=True)
        router.bind_runner_backend(runner, routing_method_type=RoutingMethodType.Renormalize)
    return str(router.topk_config.output_format.name)


def main() -> None:
    cases = [resolved(capability, arguments) for capability, arguments in json.loads(sys.argv[1])]
    print(json.dumps({"cases": cases, "choices": {runner.value: choice_for(runner) for runner in MoeRunnerBackend}}))


if __name__ == "__main__":
    main()
