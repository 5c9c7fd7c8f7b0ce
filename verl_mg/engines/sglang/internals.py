"""Internals of SGLang that are used or replaced, for the version that is asserted here.

SGLang calls nothing below `sglang.srt` public, and moves it between versions. All imports are inside of functions: they
run in SGLang's processes, but for the parsers, which any process may read.

| what | why | would break where SGLang |
|---|---|---|
| `reply_parsers` | formats of tool calls and reasoning, for all engines | moves the parsers or their lists of formats |
| `request`, `merged` | requests to the schedulers that `Engine` has no method for | renames them or their fields |
| `position` | the rank of a scheduler in the engine | has another place for parallel sizes |
| `finish_load`, `compute_buffers`, `write`, `is_transposed` | updates in place | processes weights otherwise |
| `marlin_layers`, `write_marlin`, `keep_order` | INT4 in the order of its kernel | changes kernel, layer or marks |
| `start_engine`, `run_scheduler` | memory is pinned also without a GPU | starts schedulers otherwise |
| `return_each_response` | a list of requests is one message to the scheduler | collects responses elsewhere |
| `return_all_candidates` | as many as there are, without a limit that cuts them | packs them elsewhere |
| `unloaded_model` | traces of its weight loader | builds models otherwise |

`tests/engines/sglang/test_internals.py` finds what is missing in the installed version.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl_mg.layout import EngineLayout
from verl_mg.library import Library

DERIVED = (".gemma_weight",)  # ends of the names of buffers that are computed from parameters
# Attributes of a model by which SGLang's loader knows that an update leaves weights in the form of their kernels.
MARKS = {"original_weights_rebuild_keys": {}, "recorded_loader": {}, "flash_rl_initial_load_complete": True}


def library() -> Library:
    """Returns SGLang as it is installed."""
    from sglang.version import __version__

    return Library("SGLang", __version__, ("0.5.23",), "Install sglang==0.5.23.")


# -- in any process


class ReplyParsers(NamedTuple):
    """Classes of SGLang that read replies."""

    tool_calls: Any
    reasoning: Any
    tool: Any  # description of a tool
    environment: Any  # SGLang's settings by environment variables


def reply_parsers() -> ReplyParsers | None:
    """Returns the parsers of tool calls and reasoning; None where SGLang cannot be imported."""
    try:
        with _unchanged_environment():
            from sglang.srt.entrypoints.openai.protocol import Tool
            from sglang.srt.environ import envs
            from sglang.srt.function_call.function_call_parser import FunctionCallParser
            from sglang.srt.parser.reasoning_parser import ReasoningParser
    except ImportError:
        return None
    # Its warnings concern calls that cannot be parsed, and there are many.
    logging.getLogger("sglang.srt.function_call").setLevel(logging.ERROR)
    return ReplyParsers(FunctionCallParser, ReasoningParser, Tool, envs)


@contextmanager
def _unchanged_environment() -> Iterator[None]:
    # SGLang's import names caches of kernels (TRITON_CACHE_DIR, CUDA_CACHE_PATH): training would compile its own again.
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


# -- in the process of an engine


def request(kind: str, **fields: Any) -> Any:
    """Returns a request to the schedulers, by the name of its class."""
    from sglang.srt.managers import io_struct

    return getattr(io_struct, kind)(**fields)


def merged(responses: Sequence[Any]) -> tuple[bool, str]:
    """Returns whether all schedulers have handled a request, and their messages."""
    from sglang.srt.managers.communicator import FanOutCommunicator

    success, message = FanOutCommunicator.merge_results(responses)
    return success, message


def start_engine(arguments: Mapping[str, Any]) -> Any:
    """Starts SGLang's engine, whose schedulers run `run_scheduler`."""
    from sglang.srt.entrypoints.engine import Engine

    library().check()
    return_each_response()

    class AdaptedEngine(Engine):
        run_scheduler_process_func = staticmethod(run_scheduler)

    # GPU: its processes are new interpreters, since forks could not use a GPU that this process has used.
    # GPU-TEST: tests/engines/sglang/test_contract.py::test_engine_arguments_on_gpus_are_accepted_and_effective
    # GPU-RAN: h200-1, h100-1
    if torch.cuda.is_available():
        return AdaptedEngine(**arguments)
    # Forks of this process, which has no threads yet: each new interpreter would import SGLang again, for 10 s.
    with library().replaced(multiprocessing, set_start_method=lambda *_, **__: None):
        return AdaptedEngine(**arguments)


def return_each_response() -> None:
    """Has a list of requests return the generator of each response, which SGLang else returns when all are complete."""
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    async def return_generators(manager: Any, generators: list[Any]) -> list[Any]:
        return generators

    library().replace(TokenizerManager, _collect_batch_responses=return_generators)


# -- in the processes of schedulers


def run_scheduler(*arguments: Any) -> None:
    """Runs a scheduler process of SGLang."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    return_all_candidates()
    # GPU: SGLang's scheduler runs unchanged.
    # GPU-TEST: tests/engines/sglang/test_contract.py::test_engine_arguments_on_gpus_are_accepted_and_effective
    # GPU-RAN: h200-1, h100-1
    if not torch.cuda.is_available():
        _do_without_gpu()
    run_scheduler_process(*arguments)


def return_all_candidates() -> None:
    """Has samplers return as many candidates as the draws of a step have at most."""
    # SGLang packs, sorts and copies to the host as many for each token as its limit permits, here the vocabulary.
    from sglang.srt.layers.sampler import Sampler

    build = Sampler._build_sampling_mask_output

    def build_as_wide_as_needed(sampler: Any, tokens: Tensor, captured: Any, *rest: Any) -> Any:
        sampler.sampling_mask_max_tokens = int((captured.weights > 0).sum(-1).max())
        return build(sampler, tokens, captured, *rest)

    library().replace(Sampler, _build_sampling_mask_output=build_as_wide_as_needed)


def _do_without_gpu() -> None:
    from sglang.srt.mem_cache.pool_host import common

    # GPU: pinned memory: `pool_host.common._cuda_host_register`, `Tensor.pin_memory`, and `torch.tensor` and
    # `torch.zeros` with `pin_memory=True`.
    # GPU-TEST: tests/engines/sglang/test_engine.py::
    # test_engine_that_imports_its_libraries_late_is_updated_after_samples_with_experts
    # GPU-RAN: h200-1
    # It registers what is to be pinned, such as the buffer of routed experts, with CUDA, without a look at the device.
    library().replace(common, _cuda_host_register=lambda *_, **__: None)
    default_to_the_cpu()
    # srt/lora/lora.py and srt/lora/layers.py pin the memory of adapters, where torch raises.
    torch.Tensor.pin_memory = lambda self, *_, **__: self  # type: ignore[assignment,method-assign]
    for name in ("tensor", "zeros"):
        setattr(torch, name, _without_pinning(getattr(torch, name)))


def default_to_the_cpu() -> None:
    """Makes the CPU's module torch's default, for machines without a GPU.

    A torch that is built for CUDA returns CUDA's module there too, whose calls raise.
    """
    # GPU: `torch.get_device_module` returns CUDA's module by default.
    # GPU-TEST: tests/tracing/test_tracer.py::test_trace_of_qwen3_weights_round_trips_through_a_file
    # GPU-RAN: h200-1, h100-1
    module_of = torch.get_device_module
    torch.get_device_module = lambda device=None: module_of(device or "cpu")  # type: ignore[assignment]


def _without_pinning(create: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(create)
    def create_unpinned(*arguments: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return create(*arguments, **options)

    return create_unpinned


class Position(NamedTuple):
    """Place of a scheduler in its engine."""

    stage: int  # pipeline-parallel rank
    rank: int  # rank among all of the engine


def position() -> Position:
    """Returns the place of this scheduler."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return Position(parallel.pp_rank, parallel.pp_rank * parallel.tp_size + parallel.tp_rank)


def write(parameter: Tensor, values: Tensor) -> None:
    """Copies values into a parameter, as SGLang's loader does for most parameters."""
    from sglang.srt.model_loader.weight_utils import default_weight_loader

    default_weight_loader(parameter, values)


def is_transposed(module: Any) -> bool:
    """Returns whether SGLang transposes a module's matrix whenever it processes weights: FP8 with scales of rows."""
    from sglang.srt.layers.quantization.w8a8_fp8 import W8A8Fp8LinearMethod

    return isinstance(getattr(module, "quant_method", None), W8A8Fp8LinearMethod)


def compute_buffers(model: Any) -> None:
    """Computes the buffers DERIVED, which kernels that fuse a norm read, from the parameters."""
    from sglang.srt.layers.layernorm import GemmaRMSNorm

    for module in model.modules():
        if isinstance(module, GemmaRMSNorm):
            module.refresh_gemma_weight()


def finish_load(model: Any) -> None:
    """Computes weights that are derived from others (MLA's w_kc, w_vc), as at the end of SGLang's own loading."""
    from sglang.srt.model_loader.loader import post_load_weights

    compute_buffers(model)
    post_load_weights(model)


def marlin_layers(model: Any) -> Mapping[str, Any]:
    """Returns the layers with INT4 weights by the names of the parameters that are rearranged; {} without any."""
    # SGLang rearranges packed weights and their scales for its kernel (Marlin) once, when a model is loaded, and has no
    # way back for linear layers: processing them again at the end of an update would be an error. So each shard is
    # rearranged by SGLang's own functions and copied into the memory that its kernel and its graphs use, and the model
    # is marked as one whose weights SGLang does not process after an update.
    from sglang.srt.layers.quantization.compressed_tensors.schemes import CompressedTensorsWNA16

    return {
        f"{prefix}.{name}": module
        for prefix, module in model.named_modules()
        if isinstance(getattr(module, "scheme", None), CompressedTensorsWNA16)
        for name in (module.scheme.w_q_name, module.scheme.w_s_name)
    }


def keep_order(model: Any) -> None:
    """Marks a model, so that SGLang's loader does not process its weights after an update."""
    for name, value in MARKS.items():
        setattr(model, name, value)


def write_marlin(layer: Any, name: str, shard: Tensor) -> None:
    """Rearranges a shard and writes it into the parameter of a layer that SGLang has processed.

    Shards are (rows, columns / 8) int32 of packed values, or (rows, columns / group) scales.
    """
    from sglang.srt.layers.quantization.compressed_tensors.schemes import compressed_tensors_wNa16
    from sglang.srt.layers.quantization.marlin_utils import marlin_permute_scales

    form, attribute = layer.scheme.kernel_config, name.rpartition(".")[2]
    columns, rows = form.partition_weight_shape
    turned = shard.t().contiguous()  # in GPTQ's orientation, which both functions take
    if attribute == layer.scheme.w_q_name:
        bits = form.weight_type.size_bits
        arranged = compressed_tensors_wNa16.gptq_marlin_repack(
            turned, perm=layer.g_idx_sort_indices, size_k=columns, size_n=rows, num_bits=bits
        )
    else:
        arranged = marlin_permute_scales(turned, size_k=columns, size_n=rows, group_size=form.group_size)
    getattr(layer, attribute).data.copy_(arranged)  # the same memory, of which graphs have the address


# -- in a process that traces the weight loader


@contextmanager
def unloaded_model(
    model_dir: str, layout: EngineLayout, rank: int, store: Path, around: AbstractContextManager[None] | None = None
) -> Iterator[Any]:
    """Builds SGLang's model of a rank as a server does, in float32 and not loaded; ranks meet by the file `store`.

    The model class is called within `around`.
    """
    from sglang.srt import runtime_context
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.configs.update_config import adjust_tp_num_heads_if_necessary
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.model_loader.loader import _initialize_model
    from sglang.srt.model_loader.utils import set_default_torch_dtype
    from sglang.srt.server_args import ServerArgs

    library().check()
    # GPU: nothing else: traces run on the CPU there too.
    # GPU-TEST: tests/tracing/test_tracer.py::test_trace_of_qwen3_weights_round_trips_through_a_file
    # GPU-RAN: not yet
    if not torch.cuda.is_available():
        default_to_the_cpu()
    options: dict[str, Any] = dict(
        model_path=model_dir,
        device="cpu",
        dtype="float32",
        tp_size=layout.tp,
        pp_size=layout.pp,
        ep_size=layout.ep,
        attn_dp_size=layout.adp,
        disable_shared_experts_fusion=True,  # as in engines: a separate layer, as in the weight table
        moe_runner_backend="triton",  # with others SGLang may transpose the weights of experts
        sampling_backend="pytorch",
        disable_custom_all_reduce=True,
        disable_cuda_graph=True,
        disable_overlap_schedule=True,
        skip_tokenizer_init=True,
        mem_fraction_static=0.1,
    )
    ranks = runtime_context.SpawnRanks(world_rank=rank, gpu_id=rank)
    # SGLang reads the capability of a GPU for sparse attention, whatever the device is.
    asked = {} if torch.cuda.is_available() else {"get_device_capability": lambda device=None: (9, 0)}
    with library().replaced(torch.cuda, **asked):
        # Kernels of attention are not used. Models with sinks refuse others, those with short convolutions this one.
        arguments = ServerArgs(**options, attention_backend="triton")
        try:
            runtime_context.publish(arguments, role="scheduler", ranks=ranks)
        except AssertionError:
            arguments = ServerArgs(**options, attention_backend="torch_native")
            runtime_context.publish(arguments, role="scheduler", ranks=ranks)
    parallel_state.init_distributed_environment(
        layout.ranks, rank, f"file://{store.absolute()}", local_rank=rank, backend="gloo"
    )
    parallel_state.initialize_model_parallel()
    initialize_dp_attention(arguments)
    initialize_moe_config()
    model = ModelConfig.from_server_args(arguments)
    # On the CPU linear attention reads other fields, which SGLang's runner of models sets.
    adjust_tp_num_heads_if_necessary(model.hf_text_config, layout.attention_tp, True)
    with set_default_torch_dtype(torch.float32), around or nullcontext():
        built = _initialize_model(model, LoadConfig())
    for parameter in built.parameters():
        if parameter.dtype is torch.bfloat16:  # such as parameters of an indexer, whatever the dtype of the model
            parameter.data = parameter.data.float()
    yield built
    torch.distributed.barrier()  # a rank that leaves its groups early breaks those that still connect to it
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
    runtime_context.reset_context()
