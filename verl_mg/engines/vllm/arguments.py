"""Engine arguments and environment of vLLM for a layout and a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_mg.config.checks import Refusal, under
from verl_mg.engines.engine_options import EXACT_TRITON, EngineCase, EngineOptions, in_float32, inherited_environment
from verl_mg.layout import EngineLayout
from verl_mg.lazy_import import lazy_import
from verl_mg.models.hf_config import HFConfig
from verl_mg.models.transformers_module import has_images, read_any_config, read_module_config

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")

WORKER_EXTENSION = "verl_mg.engines.vllm.worker.WorkerExtension"  # class whose methods vLLM adds to its workers
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # ranks of adapters for which vLLM allocates memory
CPU_TILE = 32  # sizes of experts are multiples of this on the CPU
CPU_KEY_VALUE_TOKENS = 2**16  # largest key-value cache of an engine on the CPU, in tokens
CPU_BLOCK_TOKENS = 128  # tokens of a block of the key-value cache on the CPU, vLLM's default there
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # head sizes of vLLM's attention kernel for the CPU
CPU_LATENT = (512, 64)  # rank of keys and values, and width of the rotary part, of vLLM's latent attention on the CPU
EXPERT_SIZES = (
    f"on the CPU vLLM needs multiples of {CPU_TILE} as sizes of experts, but {{value}}. Use another model or tp, or "
    "rollout.engine=hf."
)
# Kernel for experts. Others swap, pad or permute rows of the weights after loading: shards that are written in place
# would be in the wrong order.
EXPERT_KERNEL = "triton"
WITH_FLOAT32 = ("TRITON_ATTN", "FLEX_ATTENTION")  # attention backends that have float32 on GPUs
# GPU: none of these variables.
# GPU-TEST: tests/engines/vllm/test_contract.py::test_environment_of_a_deterministic_engine_asks_for_batch_invariance
# GPU-RAN: not yet
# Environment of vLLM's processes on the CPU. vLLM's own binding pins all engines to the same cores, and refuses more
# tensor-parallel ranks than the machine has NUMA nodes. The few small functions that it compiles would delay the first
# request by seconds.
ON_CPU = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def engine_arguments(model: Path, options: EngineOptions) -> dict[str, Any]:
    """Returns the keyword arguments of vLLM's `AsyncEngineArgs`. It loads no weights: the first weight sync does."""
    layout, config = options.layout, read_any_config(model)
    common: dict[str, Any] = {
        "model": str(model),
        "load_format": "dummy",  # random weights, without a read of the directory
        "worker_extension_cls": WORKER_EXTENSION,
        "dtype": options.dtype_name,
        # Whatever config.json says of a quantization: weights arrive as training has them.
        "hf_overrides": {"quantization_config": None} | field_overrides(config),
        "tensor_parallel_size": layout.tp,
        "pipeline_parallel_size": layout.pp,
        "enable_expert_parallel": layout.ep > 1,
        "max_num_seqs": options.max_running,
        "max_model_len": options.max_positions,
        "seed": options.seed,
        # Requests and samples are token ids; text is involved only in stop strings.
        "skip_tokenizer_init": not options.reads_text,
        "generation_config": "vllm",  # nothing from the model's generation_config.json
        # After temperature; the worker extension returns them before top-k and top-p, unless candidates are wanted.
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": -1,  # no limit of the number of likeliest tokens
        "disable_log_stats": True,  # of vLLM's own loggers; `StepStatistics` is another one
    }
    if has_images(read_module_config(model)):
        # Its processor of images needs the tokenizer. It normalizes pixels as training does; in the model, mean and
        # standard deviation would be buffers, which random initial weights overwrite and no weight sync brings.
        common |= {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"video": 0}, "mm_device_do_normalize": False}
    if options.adapters:
        served = next(rank for rank in RANKS if options.adapters.rank <= rank)
        common |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": served}
        common["lora_target_modules"] = list(options.adapters.targets)
    # GPU: the arguments of `_on_gpus`: devices, sleep mode, the cache's fraction, Triton's experts.
    # GPU-TEST: tests/engines/vllm/test_contract.py::
    # test_engine_arguments_on_gpus_place_the_engine_and_write_experts_in_place
    # GPU-RAN: not yet
    place = _on_gpus(config, options) if torch.cuda.is_available() else _on_cpu(config, options)
    return common | place | dict(options.extra)


def field_overrides(config: HFConfig) -> dict[str, Any]:
    """Returns the fields of config.json that vLLM is given in place of the model's."""
    if not config.indexer:
        return {}
    # vLLM does not read `indexer_types`, and would build an indexer for layers that have none.
    kinds = ("F" if config.has_indexer(layer) else "S" for layer in range(config.layers))
    return {"index_topk_pattern": "".join(kinds)}


def choices(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Returns what an engine computes with, by arguments as passed, or as a started engine has resolved them."""
    parts = {"experts": "moe_backend", "memory fraction": "gpu_memory_utilization", "attention": "attention_backend"}
    graphs = "off" if arguments.get("enforce_eager") else "on"
    return {part: str(arguments.get(name) or "auto") for part, name in parts.items()} | {"CUDA graphs": graphs}


def place_arguments(options: EngineOptions, ports: Sequence[int], address: str) -> dict[str, Any]:
    """Returns the arguments of the part of an engine on one of several nodes; none where it has only one."""
    if options.nodes.count == 1:
        return {}
    host, port = address.rsplit(":", 1)
    return {
        "distributed_executor_backend": "mp",
        "nnodes": options.nodes.count,
        "node_rank": options.nodes.rank,
        "master_addr": host,
        "master_port": int(port),
    }


# GPU: these models and layouts are served.
# GPU-TEST: tests/job/test_refused.py::test_tables_of_checks_have_a_refused_case_for_each_row
# GPU-RAN: not yet
# Models and layouts that vLLM does not have on the CPU.
ON_CPU_REFUSED: tuple[Refusal[EngineCase], ...] = (
    Refusal(lambda c: c.layout.ep > 1,
            "rollout.layout={c.layout}: vLLM does not support ep on the CPU. Leave it out."),
    Refusal(lambda c: c.table.config.indexer,
            "rollout.engine=vllm: vLLM has no sparse attention on the CPU. Set rollout.engine=hf, or use a GPU."),
    Refusal(lambda c: c.table.config.latent and (c.table.config.latent.kv_rank, c.table.config.latent.rope_dim)
            != CPU_LATENT,
            "rollout.engine=vllm: on the CPU vLLM's latent attention has kv_lora_rank 512 and qk_rope_head_dim 64, but "
            "this model {c.table.config.latent.kv_rank} and {c.table.config.latent.rope_dim}. Use rollout.engine=hf."),
    Refusal(lambda c: not c.table.config.latent and c.table.config.head_dim not in CPU_HEAD_DIMS,
            "rollout.engine=vllm: on the CPU vLLM has no attention with heads of size {c.table.config.head_dim}. Use a "
            f"model with one of {', '.join(map(str, CPU_HEAD_DIMS))}, or rollout.engine=hf."),
    *under(
        "rollout.layout={c.layout}", lambda c: c.table.config.experts,
        (lambda c: c.table.config.hidden % CPU_TILE and f"the hidden size is {c.table.config.hidden}", EXPERT_SIZES),
        (lambda c: c.table.config.experts.ffn // c.layout.tp % CPU_TILE
         and f"the columns of an expert on each rank is {c.table.config.experts.ffn // c.layout.tp}", EXPERT_SIZES),
    ),
)  # fmt: skip


# Models and arguments that vLLM's engines of a job do not have on GPUs.
ON_GPUS_REFUSED: tuple[Refusal[EngineCase], ...] = (
    Refusal(lambda c: "gpu_memory_utilization" in c.extra,
            "rollout.vllm.gpu_memory_utilization: engines of a job take a share of the memory that is free, not of "
            "all. Set rollout.memory_fraction."),
    *in_float32("vllm", ("attention_backend",), WITH_FLOAT32,
                lambda config: {"latent attention": config.latent, "linear attention": config.linear}),
    Refusal(lambda c: c.table.config.experts and c.extra_beyond(("moe_backend",), (EXPERT_KERNEL,)),
            "rollout.vllm.{value}: it does not read the weights of experts in the order in which they are written. "
            "Leave it out."),
)  # fmt: skip


def environment(model: Path, options: EngineOptions) -> dict[str, str]:
    """Returns the environment of an engine process: this one without what is only for the rank."""
    inherited = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"} | inherited_environment(options.python)
    fixed = layer_partition(read_any_config(model).layers, options.layout)
    if options.nodes.count > 1:
        fixed["VLLM_HOST_IP"] = options.nodes.address
    # GPU: compiled functions, and `VLLM_BATCH_INVARIANT` in a deterministic job.
    # GPU-TEST: tests/engines/vllm/test_contract.py::
    # test_environment_of_a_deterministic_engine_asks_for_batch_invariance
    # GPU-RAN: not yet
    if not torch.cuda.is_available():
        return inherited | fixed | ON_CPU
    if options.deterministic:
        fixed["VLLM_BATCH_INVARIANT"] = "1"
    # GPU: Triton's attention computes float32 in three products of TF32; on the CPU vLLM has another kernel.
    # GPU-TEST: tests/engines/vllm/test_selection.py::test_attention_in_float32_has_the_backends_that_are_permitted
    # GPU-RAN: not yet
    if options.dtype is torch.float32:
        inherited = EXACT_TRITON | inherited
    return inherited | fixed


def layer_partition(layers: int, layout: EngineLayout) -> dict[str, str]:
    """Returns the environment variable for the layers of each pipeline stage, as `EngineLayout.layers` has them."""
    sizes = [len(layout.layers(layers, stage)) for stage in range(layout.pp)]
    return {"VLLM_PP_LAYER_PARTITION": ",".join(map(str, sizes))}


def _on_gpus(config: HFConfig, options: EngineOptions) -> dict[str, Any]:
    on_node = options.layout.ranks // options.nodes.count  # a part names only the GPUs of its node
    arguments: dict[str, Any] = {
        "device_ids": [options.first_gpu + options.gpu_step * rank for rank in range(on_node)],
        "enable_sleep_mode": options.sleeps,
        # Graphs release their memory too, some GiB, which vLLM keeps in host memory meanwhile.
        "sleep_mode_offload_cudagraph": options.sleeps,
        "gpu_memory_utilization": options.memory_fraction,  # of free memory, see `take_share_of_free_memory`
        "enable_return_routed_experts": options.routed_experts,
    }
    if config.experts:
        arguments["moe_backend"] = EXPERT_KERNEL
    return arguments


def _on_cpu(config: HFConfig, options: EngineOptions) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "enforce_eager": True,
        # The draw after a part of a prompt is taken back, which generators for the CPU cannot do: vLLM's worker ends.
        "enable_chunked_prefill": False,
        "kv_cache_memory_bytes": _key_value_bytes(config, options),
        # The worker extension records the experts of each token that is computed, and a cached one is not.
        "enable_prefix_caching": not options.routed_experts,
    }
    if config.latent:
        # vLLM's rotary embedding for the CPU takes queries of several heads wrongly.
        arguments["compilation_config"] = {"mode": 0, "custom_ops": ["-rotary_embedding"]}
    return arguments


def _key_value_bytes(config: HFConfig, options: EngineOptions) -> int:
    """Returns the size of the key-value cache of a worker on the CPU."""
    heads = max(1, config.kv_heads // options.layout.tp)
    width = sum(CPU_LATENT) if config.latent else 2 * heads * config.head_dim
    blocks = -(-options.max_positions // CPU_BLOCK_TOKENS)
    tokens = min(options.requests_on_cpu * blocks * CPU_BLOCK_TOKENS, CPU_KEY_VALUE_TOKENS)
    # One block is vLLM's own.
    tokens = max(tokens, blocks * CPU_BLOCK_TOKENS) + CPU_BLOCK_TOKENS
    return tokens * config.layers * width * options.dtype.itemsize
