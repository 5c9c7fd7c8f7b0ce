"""SGLang's model of one rank without weights, for traces of its weight loader."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from verl_mg.layout import EngineLayout


def default_to_the_cpu() -> None:
    """Makes the CPU's module torch's default, for machines without a GPU.

    A torch that is built for CUDA returns CUDA's module there too, whose calls raise.
    """
    module_of = torch.get_device_module
    torch.get_device_module = lambda device=None: module_of(device or "cpu")  # type: ignore[assignment]


@contextmanager
def unloaded_model(model_dir: str, layout: EngineLayout, rank: int, store: Path) -> Iterator[Any]:
    """Builds SGLang's model of one rank of an engine as a server does, in float32 and not loaded.

    The ranks find each other by the file `store`.
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

    if not torch.cuda.is_available():
        default_to_the_cpu()
    arguments = ServerArgs(
        model_path=model_dir,
        device="cpu",
        dtype="float32",
        tp_size=layout.tp,
        pp_size=layout.pp,
        ep_size=layout.ep,
        attn_dp_size=layout.adp,
        disable_shared_experts_fusion=True,  # as in engines: a separate layer, as in the weight table
        attention_backend="triton",  # a model with attention sinks refuses others; its kernels are not used
        moe_runner_backend="triton",  # with others SGLang may transpose the weights of experts
        sampling_backend="pytorch",
        disable_custom_all_reduce=True,
        disable_cuda_graph=True,
        disable_overlap_schedule=True,
        skip_tokenizer_init=True,
        mem_fraction_static=0.1,
    )
    ranks = runtime_context.SpawnRanks(world_rank=rank, gpu_id=rank)
    with _capability_of_a_gpu():
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
    with set_default_torch_dtype(torch.float32):
        built = _initialize_model(model, LoadConfig())
    for parameter in built.parameters():
        if parameter.dtype is torch.bfloat16:  # such as parameters of an indexer, whatever the dtype of the model
            parameter.data = parameter.data.float()
    yield built
    torch.distributed.barrier()  # a rank that leaves its groups early breaks those that still connect to it
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
    runtime_context.reset_context()


@contextmanager
def _capability_of_a_gpu() -> Iterator[None]:
    # Lets SGLang read the capability of a GPU, which it does for sparse attention whatever the device is.
    asked = torch.cuda.get_device_capability
    if not torch.cuda.is_available():
        torch.cuda.get_device_capability = lambda device=None: (9, 0)
    try:
        yield
    finally:
        torch.cuda.get_device_capability = asked
