"""Model of one rank of vLLM without weights, for traces of its weight loader."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from verl_mg.engines.vllm.arguments import layer_partition
from verl_mg.layout import EngineLayout

# Kernels of sparse attention by their name in vLLM.
SPARSE_BACKEND = "vllm.v1.attention.backends.mla.flashmla_sparse.FlashMLASparseBackend"


def inspect_models_here() -> None:
    """Inspects model classes in this process, on machines without a GPU.

    For each class that its cache does not have, vLLM would start a process that imports vLLM again, lest CUDA starts in
    this one: half a minute of a CPU.
    """
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        registry._run_in_subprocess = lambda inspect: inspect()  # there is no CUDA that could start


@contextmanager
def unloaded_model(model_dir: str, layout: EngineLayout, rank: int, store: Path) -> Iterator[Any]:
    """Builds vLLM's model of one rank of an engine as a worker does, in float32 and not loaded.

    The ranks find each other by the file `store`.
    """
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models import utils as model_utils
    from vllm.utils.torch_utils import set_default_torch_dtype

    inspect_models_here()
    ident = f"{store.parent.name}-{store.stem}"
    os.environ["VLLM_DIST_IDENT"] = ident  # names the shared memory of this group, which vLLM does not always remove
    arguments = EngineArgs(
        model_dir,
        skip_tokenizer_init=True,
        dtype="float32",
        tensor_parallel_size=layout.tp,
        pipeline_parallel_size=layout.pp,
        enable_expert_parallel=layout.ep > 1,
        distributed_executor_backend="mp",
        enforce_eager=True,
        load_format="dummy",
        max_model_len=64,
        kv_cache_memory_bytes=1 << 20,
    )
    config = arguments.create_engine_config()
    os.environ.update(layer_partition(config.model_config.hf_text_config.num_hidden_layers, layout))
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(layout.ranks, rank, f"file://{store.absolute()}", rank, "gloo")
        parallel_state.initialize_model_parallel(layout.tp, layout.pp)
        with set_default_torch_dtype(torch.float32), _layers_with_sparse_attention():
            model = initialize_model(config)
        yield model
        torch.distributed.barrier()  # a rank that leaves its groups early breaks those that still connect to it
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
    for path in glob.glob(f"/dev/shm/{glob.escape(ident)}-*"):
        with suppress(FileNotFoundError):
            os.unlink(path)
    # What other stages have is remembered by the address of the model, where the next model may be.
    model_utils._model_to_pp_missing_layer_names.clear()


@contextmanager
def _layers_with_sparse_attention() -> Iterator[None]:
    # Lets vLLM build layers with sparse attention on the CPU, where it has no kernels for them; none is called.
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker import workspace

    selected = CpuPlatform.__dict__["get_attn_backend_cls"]

    def select(cls: Any, /, selected_backend: Any, attn_selector_config: Any, **options: Any) -> str:
        if attn_selector_config.use_sparse:
            return SPARSE_BACKEND
        backend: str = selected.__func__(cls, selected_backend, attn_selector_config, **options)
        return backend

    CpuPlatform.get_attn_backend_cls = classmethod(select)
    if not workspace.is_workspace_manager_initialized():
        workspace.init_workspace_manager(torch.device("cpu"))
    try:
        yield
    finally:
        CpuPlatform.get_attn_backend_cls = selected
