"""What the installed SGLang resolves engines' arguments to on a GPU: `python -m ...resolution_probe CASES`.

CASES is a list of [compute capability, keyword arguments of `sglang.Engine`] as JSON. Prints one JSON object: for each
case the resolved arguments, or {"error": TEXT} where SGLang refuses them; the form in which a router of Qwen3-MoE
gives its choice to each runner of experts: only in the form STANDARD it has experts to report; and what each kernel of
products in MXFP8 has of an updated layer.
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
from sglang.srt.layers.quantization import fp8_utils
from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod
from sglang.srt.runtime_context import override_platform
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils import common

from verl_mg.engines.sglang.arguments import QUANTIZATIONS

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


def mxfp8_by_default(has_cute_dsl: bool) -> str:
    """SGLang's kernel for products in MXFP8 on Blackwell, where FlashInfer has CuTe DSL for the GPU or has it not."""
    kernels = SimpleNamespace(is_backend_supported=lambda *_: has_cute_dsl)
    facts = {"is_flashinfer_available": lambda: True, "get_device_sm": lambda: 100}
    with (
        mock.patch.multiple(fp8_utils, **facts),
        mock.patch.object(fp8_utils, "_raw_flashinfer_mm_mxfp8", kernels, create=True),
        override_platform(is_blackwell=True),
    ):
        return str(fp8_utils.resolve_mxfp8_dense_gemm_backend().value)


def mxfp8_dtypes() -> dict[str, str]:
    """Dtypes of the parameters with which SGLang creates a layer."""
    _, layer = mxfp8_layer()
    return {name: str(parameter.dtype) for name, parameter in layer.named_parameters()}


def mxfp8_layer() -> tuple[Fp8LinearMethod, torch.nn.Module]:
    method = Fp8LinearMethod(Fp8Config.from_config(QUANTIZATIONS["mxfp8"]))
    layer = torch.nn.Module()
    layer.deepgemm_mxfp8_input = False
    method.create_weights(layer, 128, [128], 128, 128, torch.bfloat16, True, weight_loader=None)
    return method, layer


def mxfp8_after_updates(kernel: str) -> dict[str, bool]:
    """Which parameters of a layer keep their values in two updates; whether the kernel's copy of the scales follows.

    FlashInfer's functions, which need a GPU, are replaced by others that change the order.
    """
    rearranged = SimpleNamespace(
        block_scale_interleave=lambda scales: scales.flip(0).flatten(),
        shuffle_matrix_a=lambda weight, _: weight.flip(0),
        shuffle_matrix_sf_a=lambda scales, *_, **__: scales.flip(0),
    )
    method, layer = mxfp8_layer()
    method.mxfp8_dense_backend = fp8_utils.Mxfp8DenseGemmBackend(kernel)
    kept, copies = {"weight": True, "weight_scale_inv": True}, []
    for _ in range(2):
        written = {
            "weight": torch.randn(128, 128).to(torch.float8_e4m3fn),
            "weight_scale_inv": torch.randint(100, 140, (128, 4), dtype=torch.uint8),
        }
        for name, values in written.items():
            getattr(layer, name).data.copy_(values)
        with mock.patch.dict(sys.modules, flashinfer=rearranged):
            method.process_weights_after_loading(layer)
        for name, values in written.items():
            kept[name] &= torch.equal(getattr(layer, name).data.view(torch.uint8), values.view(torch.uint8))
        derived = next(tensor for name, tensor in layer.named_parameters() if name.startswith("weight_scale_inv_"))
        copies.append((derived.data_ptr(), derived.clone()))
    (first, old), (second, new) = copies
    return kept | {"copy": first == second and not torch.equal(old, new)}


def main() -> None:
    cases = [resolved(capability, arguments) for capability, arguments in json.loads(sys.argv[1])]
    choices = {runner.value: choice_for(runner) for runner in MoeRunnerBackend}
    kernels = [backend.value for backend in fp8_utils.Mxfp8DenseGemmBackend if not backend.is_gfx95()]
    mxfp8 = {kernel: mxfp8_after_updates(kernel) for kernel in kernels if kernel != "unsupported"}
    default = [mxfp8_by_default(has_cute_dsl) for has_cute_dsl in (True, False)]
    of_mxfp8 = {"mxfp8": mxfp8, "mxfp8_by_default": default, "mxfp8_dtypes": mxfp8_dtypes()}
    print(json.dumps({"cases": cases, "choices": choices, **of_mxfp8}))


if __name__ == "__main__":
    main()
