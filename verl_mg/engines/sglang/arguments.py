"""Server arguments and environment of SGLang for a layout and a device."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_mg import device
from verl_mg.config.checks import Refusal, under
from verl_mg.engines.engine_options import EXACT_TRITON, EngineCase, EngineOptions, in_float32, inherited_environment
from verl_mg.lazy_import import lazy_import
from verl_mg.models.hf_config import HFConfig
from verl_mg.reshard.encoding import Wire

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")

# Name of the loader, for the server argument `custom_weight_loader` and as load format.
LOADER = "verl_mg.engines.sglang.weight_loader.load_chunk"
# Largest number of candidates of a token that engines report, more than a vocabulary has; `return_all_candidates` has
# them pack only those that there are.
MAX_CANDIDATES = 2**24
CPU_TILE = 32  # on the CPU, SGLang pads widths of matrices to multiples of this on each rank
CPU_KEY_VALUE_TOKENS = 2**16  # largest key-value cache of an engine on the CPU, in tokens
# Field `quantization_config` with which SGLang builds its model for each `rollout.wire`.
QUANTIZATIONS: dict[Wire, dict[str, Any] | None] = {
    "cast": None,
    "fp8_block": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
    "fp8_channel": {"quant_method": "w8a8_fp8"},
    "mxfp8": {"quant_method": "mxfp8", "activation_scheme": "dynamic", "weight_block_size": [1, 32]},
    "int4": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": 128,
                    "dynamic": False,
                },
                "input_activations": None,
                "output_activations": None,
            }
        },
        "ignore": ["lm_head"],
    },
}
# GPU: none of these variables.
# GPU-TEST: tests/engines/sglang/test_contract.py::test_environment_on_gpus_leaves_out_what_is_for_the_rank
# GPU-RAN: h200-1, h100-1
# Environment of SGLang's processes on the CPU. Where torch is built for CUDA, NCCL is installed and would be used. The
# few small functions that SGLang compiles would delay the first request to each process by seconds.
ON_CPU = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_NCCL_SO_PATH": "none",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
PADDED = (  # what a row is to begin with, and the multiple of the condition
    f"on the CPU SGLang pads the {{}} to a multiple of {CPU_TILE} * tp. Set rollout.engine=hf, or use a model with a "
    "multiple of {{value}}."
)
# Attention backend of engines in float32 on GPUs, as SGLang's default there has 16 bits only.
FLOAT32_ATTENTION = "triton"
PHASES = ("prefill", "decode")
ATTENTION = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
WITH_FLOAT32 = (FLOAT32_ATTENTION, "torch_native", "flex_attention")  # attention backends that have float32
# Largest width of a head in float32: tiles of wider ones may not fit into the memory of a block of Triton's kernel.
FLOAT32_HEAD = 128
# Environment of engines in float32 on GPUs. The compiled norms and activations of SGLang have 16 bits only.
IN_FLOAT32 = {"SGLANG_FORCE_FUSED_OP_BACKEND": "torch", **EXACT_TRITON}
# Runner of experts that reads their weights in the order in which they are written, and reports the experts of each
# token. Others have them transposed, padded, in blocks, or the gate after the other half; SGLang's choice on Blackwell
# is one of them, whose routers report expert 0 for each token.
EXPERT_RUNNER = "triton"
IN_ORDER = (EXPERT_RUNNER, "deep_gemm")
# Kernel of products in FP8 with scales of blocks on Blackwell: others round the scales and pack them into another form,
# into which no update can be written.
BLACKWELL_FP8 = "triton"
FP8_PRODUCTS = "fp8_gemm_runner_backend"
# Kernels of products in MXFP8 that read the weights in order, and the scales from a copy in their own form, which
# SGLang computes again at the end of each update. Another one has the rows of the weights themselves shuffled.
MXFP8_IN_ORDER = ("auto", "flashinfer_cutedsl", "flashinfer_cutlass", "deep_gemm")
# Responses of a step after which SGLang's main process handles others first: the rank gets all in one message.
ALL_OF_A_STEP = 2**20
RUNNERS = ("moe_runner_backend", "speculative_moe_runner_backend")
# Environment of all engines. SGLang would keep the features of images over updates of the vision tower, and on GPUs
# fuse two projections of an indexer that the weight table has apart, or, if a variable says so, exchange rows of the
# experts that Triton computes.
OF_ALL_ENGINES = {
    "SGLANG_VLM_CACHE_SIZE_MB": "0",
    "SGLANG_DISABLE_DSA_INDEXER_FUSION": "1",
    "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED": "0",
}


def has_multi_token_draft(arguments: Mapping[str, Any]) -> bool:
    """Returns whether SGLang decodes speculatively with the model's own layer of multi-token prediction."""
    is_eagle = arguments.get("speculative_algorithm") in ("EAGLE", "NEXTN")
    return is_eagle and not arguments.get("speculative_draft_model_path")


def engine_arguments(model: Path, options: EngineOptions) -> dict[str, Any]:
    """Returns the keyword arguments of `sglang.Engine`. It loads no weights: the first weight sync does."""
    layout = options.layout
    common: dict[str, Any] = {
        "model_path": str(model),
        "load_format": "dummy",  # random weights, without a read of the directory
        "custom_weight_loader": [LOADER],
        "dtype": options.dtype_name,
        "tp_size": layout.tp,
        "pp_size": layout.pp,
        "ep_size": layout.ep,
        "max_running_requests": options.max_running,
        "sampling_mask_max_tokens": MAX_CANDIDATES,
        "random_seed": options.seed,
        # The weights arrive as training or the encoder has them, not as the checkpoint does.
        "json_model_override_args": json.dumps({"quantization_config": QUANTIZATIONS[options.wire]}),
        # Requests and samples are token ids; text is involved only in stop strings.
        "skip_tokenizer_init": not options.reads_text,
        # A separate layer, as in the weight table.
        "disable_shared_experts_fusion": True,
        "batch_notify_size": ALL_OF_A_STEP,
        "skip_server_warmup": True,
        "log_level": "warning",
    }
    if layout.adp > 1:
        common["attn_dp_size"] = layout.adp
    if options.nodes.count > 1:
        common |= {"nnodes": options.nodes.count, "node_rank": options.nodes.rank}
    if options.routed_experts:
        common["enable_return_routed_experts"] = True
    if options.selected_keys:
        common["enable_return_indexer_topk"] = True
    if options.adapters:
        common |= {
            "enable_lora": True,
            "max_lora_rank": options.adapters.rank,
            "lora_target_modules": list(options.adapters.targets),
            "max_loras_per_batch": 2,  # no adapter counts as one of them, the policy's is the other
        }
    # GPU: the arguments of `_on_gpus`: attention, graphs, overlap of host and device, the memory saver and the
    # cache's fraction.
    # GPU-TEST: tests/engines/sglang/test_contract.py::test_engine_arguments_on_gpus_are_accepted_and_effective,
    # tests/engines/sglang/test_contract.py::test_engine_that_sleeps_has_no_graphs_whose_memory_stays
    # GPU-RAN: h200-1, h100-1
    place = _on_gpus(options) if torch.cuda.is_available() else _on_cpu(options)
    return common | place | dict(options.extra)


def choices(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Returns what an engine computes with, by arguments as passed, or as a started engine has resolved them."""

    by_phase = {phase: arguments.get(f"{phase}_attention_backend") for phase in PHASES}
    attention = ", ".join(f"{backend} in {phase}" for phase, backend in by_phase.items() if backend)
    chosen = {
        "attention": attention or arguments.get("attention_backend") or "auto",
        "experts": arguments.get("moe_runner_backend") or "auto",
        "memory fraction": str(arguments.get("mem_fraction_static") or "auto"),
        "CUDA graphs": "off" if arguments.get("disable_cuda_graph") else "auto",
    }
    if graphs := arguments.get("cuda_graph_config"):  # of an engine that has started, and the next one too
        chosen["CUDA graphs"] = ", ".join(f"{graphs[phase]['backend']} in {phase}" for phase in PHASES)
    if memory := arguments.get("memory_usage"):
        chosen["key-value cache"] = f"{memory['token_capacity']} tokens"
    return chosen


# GPU: these models and layouts are served.
# GPU-TEST: tests/job/test_refused.py::test_tables_of_checks_have_a_refused_case_for_each_row
# GPU-RAN: not yet
# Models and layouts that SGLang does not have on the CPU, or pads there, for which the weight table has no shards.
ON_CPU_REFUSED: tuple[Refusal[EngineCase], ...] = (
    Refusal(lambda c: c.table.config.attention_sinks,
            "rollout.engine=sglang: on the CPU SGLang has attention sinks only in kernels for AMX, which this project "
            "does not use. Set rollout.engine=hf, or use a GPU."),
    Refusal(lambda c: c.table.config.indexer,
            "rollout.engine=sglang: SGLang has no sparse attention on the CPU. Set rollout.engine=hf, or use a GPU."),
    Refusal(lambda c: c.layout.ep > 1 or c.layout.adp > 1,
            "rollout.layout={c.layout}: SGLang does not support ep and adp on the CPU. Remove them."),
    Refusal(lambda c: c.table.model_dims.key_heads,
            "rollout.engine=sglang: on the CPU linear attention needs compiled kernels of SGLang that are not on PyPI. "
            "Set rollout.engine=hf."),
    *under(
        "rollout.layout={c.layout}", lambda c: CPU_TILE * c.layout.tp,
        (lambda c: c.table.model_dims.ffn % (CPU_TILE * c.layout.tp) and CPU_TILE * c.layout.tp,
         PADDED.format("{c.table.model_dims.ffn} columns of the feed-forward layer")),
        (lambda c: c.table.model_dims.expert_ffn % (CPU_TILE * c.layout.tp) and CPU_TILE * c.layout.tp,
         PADDED.format("{c.table.model_dims.expert_ffn} columns of an expert")),
        (lambda c: c.table.model_dims.kv_heads % c.layout.tp,
         "on the CPU SGLang pads {c.table.model_dims.kv_heads} key-value heads to a multiple of tp. Set a tp that "
         "divides them."),
    ),
)  # fmt: skip


def _not_in_float32(config: HFConfig) -> dict[str, object]:
    """Returns what a model has of which SGLang's engines in float32 are not known to work on GPUs."""
    return {
        "experts": config.experts,
        "latent attention": config.latent,
        "linear attention": config.linear,
        "images": config.with_vision,
        f"heads of {config.head_dim}": config.head_dim > FLOAT32_HEAD,
    }


# Models and arguments for which SGLang has no kernels on GPUs.
ON_GPUS_REFUSED: tuple[Refusal[EngineCase], ...] = (
    *in_float32("sglang", ATTENTION, WITH_FLOAT32, _not_in_float32),
    Refusal(lambda c: c.table.config.experts and c.extra_beyond(RUNNERS, IN_ORDER),
            "rollout.sglang.{value}: it does not read the weights of experts in the order in which they are written, "
            f"or does not report the experts of a token. Leave it out, or write one of {', '.join(IN_ORDER)}."),
    Refusal(lambda c: c.wire == "fp8_block" and c.blackwell
            and c.extra_beyond((FP8_PRODUCTS, *RUNNERS), (BLACKWELL_FP8,)),
            "rollout.sglang.{value}: on Blackwell it keeps scales of rollout.wire=fp8_block in a form into which no "
            "update can be written. Leave it out."),
    *under(
        "rollout.wire=mxfp8", lambda c: c.wire == "mxfp8",
        (lambda c: not c.blackwell,
         "SGLang has MXFP8 on Blackwell and newer GPUs only. Write rollout.wire=fp8_block."),
        (lambda c: c.extra_beyond((FP8_PRODUCTS,), MXFP8_IN_ORDER),
         "rollout.sglang.{value} does not read weights in the order in which they are written. Leave it out."),
    ),
)  # fmt: skip


def place_arguments(options: EngineOptions, ports: Sequence[int], address: str) -> dict[str, Any]:
    """Returns arguments from which `sglang.Engine` derives its ports; its processes meet at `address`, HOST:PORT."""
    return {"nccl_port": ports[0], "dist_init_addr": address}


def environment(model: Path, options: EngineOptions) -> dict[str, str]:
    """Returns the environment of an engine process: this one without what is only for the rank."""
    inherited = inherited_environment(options.python)
    if options.nodes.count > 1:
        inherited.setdefault("SGLANG_HOST_IP", options.nodes.address)  # SGLang would look for a route to the internet
    if options.selected_keys:
        # Otherwise it reports where the keys are in the cache or the batch, and not their positions in the sequence.
        inherited["SGLANG_DSA_FUSE_TOPK"] = "0"
    if options.nodes.rank:
        inherited["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] = "0"  # else `sglang.Engine` would not return on this node
    # GPU: SGLang's checks of equal memory are off, graphs are released, and float32 has exact kernels.
    # GPU-TEST: tests/engines/sglang/test_contract.py::test_environment_on_gpus_is_what_sglang_reads,
    # tests/engines/sglang/test_contract.py::test_environment_on_gpus_has_exact_kernels_in_float32_only
    # GPU-RAN: h200-1, h100-1
    if torch.cuda.is_available():
        return _variables_on_gpus(options) | inherited | OF_ALL_ENGINES
    # A core for each rank of the engine: SGLang's own binding needs a NUMA node for each.
    cores = sorted(os.sched_getaffinity(0))
    binding = "|".join(str(cores[rank % len(cores)]) for rank in range(options.layout.ranks))
    return inherited | ON_CPU | OF_ALL_ENGINES | {"SGLANG_CPU_OMP_THREADS_BIND": binding}


def _variables_on_gpus(options: EngineOptions) -> dict[str, str]:
    precision = IN_FLOAT32 if options.dtype is torch.float32 else {}
    return precision | {
        # GPUs of a job have different amounts of free memory: stages of different size, a rank that is still loading.
        "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "false",
        # An idle engine whose cache is released would fail it.
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "false",
        # Graphs release their memory too: some GiB.
        "SGLANG_MEMORY_SAVER_CUDA_GRAPH": str(options.sleeps).lower(),
    }


def _on_gpus(options: EngineOptions) -> dict[str, Any]:
    kernels = {"attention_backend": FLOAT32_ATTENTION} if options.dtype is torch.float32 else {}
    # Where experts exchange tokens by other means than SGLang's own, these have runners of theirs.
    # GPU: Triton's runner computes the experts, also on Blackwell; on the CPU SGLang has another one.
    # GPU-TEST: tests/engines/sglang/test_resolution.py::test_experts_of_a_mixture_have_the_runner_that_is_in_order
    # GPU-RAN: not yet
    if options.extra.get("moe_a2a_backend") in (None, "none"):
        kernels["moe_runner_backend"] = EXPERT_RUNNER
    # GPU: Triton computes products in FP8 with scales of blocks on Blackwell, DeepGEMM on Hopper.
    # GPU-TEST: tests/engines/sglang/test_resolution.py::test_scales_of_blocks_are_not_packed_on_blackwell
    # GPU-RAN: not yet
    if options.wire == "fp8_block" and device.is_blackwell():
        kernels[FP8_PRODUCTS] = BLACKWELL_FP8
    return kernels | {
        "device": "cuda",
        "base_gpu_id": options.first_gpu,
        "gpu_id_step": options.gpu_step,
        "enable_memory_saver": options.sleeps,
        # SGLang's graphs of the prefill phase cannot release their memory, and refuse to start where others do.
        "disable_prefill_cuda_graph": options.sleeps,
        "mem_fraction_static": options.memory_fraction,
        # Not on the CPU: SGLang permits it only with attention kernels for GPUs.
        "enable_deterministic_inference": options.deterministic,
    }


def _on_cpu(options: EngineOptions) -> dict[str, Any]:
    return {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "mem_fraction_static": 0.1,
        "max_total_tokens": min(options.requests_on_cpu * options.max_positions, CPU_KEY_VALUE_TOKENS),
        # Idle engines share the cores with training.
        "sleep_on_idle": True,
        "lora_backend": "torch_native",
    }
