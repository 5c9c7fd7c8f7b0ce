"""Internals of vLLM that are used or replaced, for the version that is asserted here.

All imports are inside of functions, which run in vLLM's processes.

| what | why | would break where vLLM |
|---|---|---|
| `inspect_models_here` | no process that imports vLLM again, on the CPU | inspects classes otherwise |
| `dead_engine_error`, `workers_of_node` | parts of an engine on several nodes | moves them |
| `keep_config_tying` | the output layer is tied as in training | decides it elsewhere |
| `do_without_gpu` | workers that sleep; weights that an update can write | has other kernels or waits |
| `make_stage_inputs` | the CPU skips the warm-up that makes them | makes them elsewhere |
| `take_share_of_free_memory` | `rollout.memory_fraction` is of free memory | sizes its memory elsewhere |
| `derive_weights` | W_UK_T, W_UV, sinks in float32 follow an update | derives weights in other layers |
| `StagedExperts` | experts in the order of a kernel of the CPU | has other kernels |
| `register_adapters` | adapters from memory, not from a file | has another manager of adapters |
| `RoutingRecorder` | experts of each token on the CPU, where vLLM does not return them | has other layers or batches |
| `DrawRecorder` | log-probs after temperature before or after top-k and top-p, candidates | has other samplers |
| `unloaded_model` | traces of its weight loader | builds models otherwise |

`tests/engines/vllm/test_internals.py` finds what is missing in the installed version.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from copy import copy
from functools import partialmethod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl_mg.engines.sampled_support import Wire, to_wire
from verl_mg.layout import EngineLayout
from verl_mg.library import Library

CPU_POLL_SECONDS = 0.001  # time for which a worker on the CPU polls for the next message before it sleeps
# Longest sleep of a worker on the CPU: it misses the notification of a message written while it falls asleep.
CPU_SLEEP_MS = 10
DERIVED = (".W_UK_T", ".W_UV")  # ends of the names of parameters that are computed from others
SUPPORT = "returns_support"  # argument of a request: whether the candidates of its tokens are recorded
# Kernels of sparse attention by their name in vLLM.
SPARSE_BACKEND = "vllm.v1.attention.backends.mla.flashmla_sparse.FlashMLASparseBackend"


def library() -> Library:
    """Returns vLLM as it is installed."""
    from vllm import __version__

    return Library("vLLM", __version__, ("0.32.",), "Install vLLM 0.32.")


# -- in the process of an engine


def inspect_models_here() -> None:
    """Inspects model classes in this process, on machines without a GPU.

    For each class that its cache does not have, vLLM would start a process that imports vLLM again, lest CUDA starts in
    this one: half a minute of a CPU.
    """
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    # GPU: vLLM inspects models in a separate process: `registry._run_in_subprocess`.
    # GPU-TEST: tests/engines/vllm/test_engine.py::test_engine_updated_three_times_generates_as_transformers
    # GPU-RAN: not yet
    if current_platform.is_cpu():
        # There is no CUDA that could start.
        library().replace(registry, _run_in_subprocess=lambda inspect: inspect())


def keep_config_tying() -> None:
    """Ties the output layer as config.json says, as training does, whatever else the checkpoint contains."""
    from vllm.config import ModelConfig

    library().replace(ModelConfig, maybe_untie_word_embeddings=lambda self: None)


def dead_engine_error() -> type[Exception]:
    """Returns the exception that calls of an engine raise when its processes have ended."""
    from vllm.v1.engine.exceptions import EngineDeadError

    return EngineDeadError


def workers_of_node(engine_arguments: Any) -> Any:
    """Starts the workers of a further node, to which the engine on the first node sends their work."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    return MultiprocExecutor(engine_arguments.create_engine_config(headless=True), monitor_workers=False)


# -- in workers


def do_without_gpu() -> None:
    """Lets workers run on the CPU next to the ranks, with weights that an update can write; does nothing on a GPU."""
    import vllm._custom_ops as custom_ops
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.model_executor.layers import utils as layer_utils
    from vllm.platforms import current_platform

    # GPU: workers poll as vLLM has them, and kernels read the weights themselves: `SpinCondition.__init__`,
    # `shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS`, `_custom_ops._supports_onednn`, `utils.check_cpu_sgl_kernel`.
    # GPU-TEST: tests/engines/vllm/test_engine.py::test_engine_updated_three_times_generates_as_transformers
    # GPU-RAN: not yet
    if not current_platform.is_cpu():
        return
    # Else workers poll for a second after each message, which takes the cores from the ranks.
    waits = partialmethod(shm_broadcast.SpinCondition.__init__, busy_loop_s=CPU_POLL_SECONDS)
    library().replace(shm_broadcast.SpinCondition, __init__=waits)
    library().replace(shm_broadcast, SHM_READER_RECHECK_INTERVAL_MS=CPU_SLEEP_MS)
    # Else linear layers have no weight after loading, only a packed copy inside of oneDNN or of AMX kernels, into which
    # no update can be written.
    library().replace(custom_ops, _supports_onednn=False)
    library().replace(layer_utils, check_cpu_sgl_kernel=lambda n, k, dtype: False)


def make_stage_inputs(runner: Any) -> None:
    """Makes the tensors that pipeline stages pass on, where the warm-up that makes them is skipped."""
    if getattr(runner, "intermediate_tensors", True) is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


def take_share_of_free_memory() -> None:
    """Has a worker take `gpu_memory_utilization` of the memory that is free when it starts, as SGLang does."""
    # vLLM would take it of all memory of the GPU, and refuse to start where roles of the job have more than the rest.
    # Here, as each worker knows its own GPU, also when a lost engine starts again and ranks cannot agree on a value.
    # GPU: each worker measures its GPU's memory and sizes its part of the key-value cache by the result.
    # GPU-TEST: tests/engines/vllm/test_contract.py::test_worker_on_a_gpu_takes_a_share_of_its_free_memory
    # GPU-RAN: not yet
    from vllm.v1.worker import gpu_worker

    request = gpu_worker.request_memory

    def request_of_free(snapshot: Any, *rest: Any) -> Any:
        snapshot = copy(snapshot)
        snapshot.total_memory = snapshot.free_memory
        return request(snapshot, *rest)

    library().replace(gpu_worker, request_memory=request_of_free)


def derive_weights(runner: Any) -> None:
    """Computes what layers of attention derive from new weights: the parameters DERIVED, and copies for kernels."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    # GPU: kernels of FlashInfer have a copy of attention sinks in float32.
    # GPU-TEST: tests/engines/vllm/test_contract.py::test_sinks_in_float32_follow_an_update_where_they_are
    # GPU-RAN: not yet
    for module in runner.model.modules():
        if is_deferred_attention_layer(module):
            module.process_weights_after_loading(runner.model_config.dtype)


def register_adapters(
    manager: Any, number: int, previous: int | None, tensors: dict[str, Tensor], config: Mapping[str, Any]
) -> None:
    """Registers adapters with the id `number`, as vLLM does after reading a file, and removes the previous ones."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    if previous is not None:
        manager.remove_adapter(previous)
    adapters = LoRAModel.from_lora_tensors(
        number, tensors, PEFTHelper.from_dict(config), device="cpu", dtype=manager.lora_config.lora_dtype
    )
    manager._adapter_manager.add_adapter(adapters)
    manager._adapter_manager.activate_adapter(number)


class StagedExperts:
    """Stacked experts whose kernel on the CPU needs another order of the values: written here, then packed."""

    def __init__(self, packed: Tensor, isa: str) -> None:
        self.raw, self._packed, self._isa = torch.zeros_like(packed), packed, isa

    def pack(self) -> None:
        """Brings the values into the order of the kernel."""
        import vllm._custom_ops as custom_ops

        self._packed.copy_(custom_ops.cpu_prepack_moe_weight(self.raw, self._isa))


def staged_experts(model: torch.nn.Module) -> dict[str, StagedExperts]:
    """Returns the stacked experts of a model on the CPU by the names of their parameters."""
    staged = {}
    for name, module in model.named_modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None and hasattr(module, "w13_weight"):
            for weight in ("w13_weight", "w2_weight"):
                packed = getattr(module, weight).data
                staged[f"{name}.{weight}"] = StagedExperts(packed, kernel.fused_experts.isa)
    return staged


class RoutingRecorder:
    """Records the experts that the routers of all layers choose, for each request.

    layers: _record(layer, experts)  -->  one step of all layers  --_execute_step-->  rows of each request  --> take
    """

    def __init__(self, runner: Any) -> None:
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        self._runner, self._execute = runner, runner.execute_model
        layers = [module for module in runner.model.modules() if isinstance(module, MoERunner)]
        self._step: list[Tensor | None] = [None] * len(layers)
        self._recorded: dict[str, list[tuple[int, Tensor]]] = {}
        for number, layer in enumerate(layers):
            layer.router.set_capture_fn(lambda experts, number=number: self._record(number, experts))
        runner.execute_model = self._execute_step

    def take(self, rid: str, fed: int) -> Tensor:
        """Returns the experts of a request's tokens, (fed, layers, experts per token) int32, and forgets the request.

        A token that is computed again, because its request was put back, keeps the experts of the first time.
        """
        recorded = self._recorded.pop(rid, [])
        top_k = recorded[0][1].shape[-1] if recorded else 1
        experts = torch.zeros(fed, len(self._step), top_k, dtype=torch.int32)
        for start, rows in reversed(recorded):  # the first record of a token is written last
            rows = rows[: max(0, fed - start)]
            experts[start : start + len(rows)] = rows
        return experts

    def _record(self, layer: int, experts: Tensor) -> None:
        self._step[layer] = experts.to(torch.int32).clone()

    def _execute_step(self, scheduled: Any, *arguments: Any, **keywords: Any) -> Any:
        """Runs a step and gives each request its rows: tokens of a step are in the order of the batch's requests."""
        output = self._execute(scheduled, *arguments, **keywords)
        if scheduled.total_num_scheduled_tokens:
            rows = torch.stack([layer for layer in self._step if layer is not None], dim=1)
            batch, start = self._runner.input_batch, 0  # after the step: before, it has the requests of the last one
            for index, name in enumerate(batch.req_ids):
                count = scheduled.num_scheduled_tokens[name]
                first = int(batch.num_computed_tokens_cpu[index])
                rid = name.rpartition("-")[0]  # inside of vLLM it ends with a random part
                self._recorded.setdefault(rid, []).append((first, rows[start : start + count]))
                start += count
        return output


class _Draw(NamedTuple):
    """A draw for a request that wants the candidates."""

    row: int  # its row in the batch
    rid: str
    number: int  # number of the drawn token in the response
    excluded: Sequence[int]  # tokens that are never drawn, of which a bias has left a rounding error


class DrawRecorder:
    """Has a runner return log-probabilities after temperature, 1 for greedy ones, and before min-p, top-k and top-p.

    For requests that want the candidates of their tokens they are after all of these, and the candidates recorded:

    draw of a step: _rows_of_first, _rows_of_second  -->  _record  -->  candidates by request and token  --> take
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._recorded: dict[str, dict[int, Tensor]] = {}
        self._wanting: dict[int, Sequence[int]] = {}  # tokens that are excluded, by slot of the second runner
        # vLLM's processed log-probs are renormalized over the candidates, its raw ones ignore the temperature. Its two
        # model runners have different samplers: one returns log-probabilities, the other logits.
        sampler, full = runner.sampler, _FullDistribution()
        if hasattr(sampler, "topk_topp_sampler"):
            candidates = sampler.topk_topp_sampler
            library().replace(sampler, apply_temperature=full.kept_after(sampler.apply_temperature, _log_softmax))
            draw = full.returned_by(candidates.forward, 1, self._rows_of_first, self._record)
            library().replace(candidates, forward=draw)
            return
        # GPU: the sampler of vLLM's second model runner, and with speculative decoding one that verifies drafts with
        # it, which records no candidates.
        # GPU-TEST: tests/engines/vllm/test_sampler.py::test_sampler_returns_the_distribution_that_the_request_wants
        # GPU-RAN: not yet
        states, verifier, add = sampler.sampling_states, runner.rejection_sampler, sampler.add_request
        library().replace(states, apply_temperature=full.kept_after(states.apply_temperature, torch.clone))
        draw = full.returned_by(sampler._sample_random, 1, self._rows_of_second, self._record)

        def add_request(slot: int, parameters: Any) -> None:
            self._wanting.pop(slot, None)
            if _wants_candidates(parameters):
                self._wanting[slot] = tuple(parameters.logit_bias or ())
            add(slot, parameters)

        library().replace(sampler, _sample_random=draw, add_request=add_request)
        if verifier is not None:
            library().replace(verifier, _verify=full.returned_by(verifier._verify, 0, lambda *_: (), self._record))

    def take(self, rid: str, num_tokens: int) -> Wire | None:
        """Returns the candidates of a request's tokens, and forgets the request; None where none are recorded."""
        recorded = self._recorded.pop(rid, None)
        none = torch.empty(0, dtype=torch.int32)
        ids = [none if recorded is None else recorded.get(number, none) for number in range(num_tokens)]
        sizes = torch.tensor([len(of_token) for of_token in ids], dtype=torch.int32)
        return to_wire(sizes.numpy(), torch.cat([*ids, none]).numpy()) if recorded else None

    def _rows_of_first(self, *_: Any) -> Sequence[_Draw]:
        runner, batch, draws = self._runner, self._runner.input_batch, []
        for row, rid in enumerate(batch.req_ids):
            parameters = runner.requests[rid].sampling_params
            # What is drawn in front of the last token of a context is dropped.
            if _wants_candidates(parameters) and not runner.discard_request_mask.np[row]:
                number = int(runner.optimistic_seq_lens_cpu[row]) - int(batch.num_prompt_tokens[row])
                draws.append(_Draw(row, rid, number, tuple(parameters.logit_bias or ())))
        return draws

    def _rows_of_second(self, logits: Tensor, mapping: Tensor, slots: Any, places: Tensor, *_: Any) -> Sequence[_Draw]:
        rows = [(row, slot) for row, slot in enumerate(slots.tolist()) if slot in self._wanting]
        if not rows:  # the next line waits for the device
            return ()
        states, lengths = self._runner.req_states, (places + 1).tolist()
        return [
            _Draw(
                row, states.index_to_req_id[slot], lengths[row] - int(states.prompt_len.np[slot]), self._wanting[slot]
            )
            for row, slot in rows
            if lengths[row] >= states.prefill_len.np[slot]
        ]

    def _record(self, draws: Sequence[_Draw], values: Tensor) -> None:
        kept = values[[draw.row for draw in draws]] > -torch.inf
        for draw, mask in zip(draws, kept, strict=True):
            mask[list(draw.excluded)] = False
        ids = kept.nonzero()[:, 1].to("cpu", torch.int32)
        for draw, of_token in zip(draws, ids.split(kept.sum(1).tolist()), strict=True):
            rid = draw.rid.rpartition("-")[0]  # inside of vLLM it ends with a random part
            # A token that is drawn again, because an update has dropped the first one, has its last candidates.
            self._recorded.setdefault(rid, {})[draw.number] = of_token


def _wants_candidates(parameters: Any) -> bool:
    return bool((parameters.extra_args or {}).get(SUPPORT))


def _log_softmax(logits: Tensor) -> Tensor:
    return logits.log_softmax(dim=-1, dtype=torch.float32)


class _FullDistribution:
    """Distribution of a step after temperature; candidates are cut off in place afterwards."""

    def __init__(self) -> None:
        self._values: Tensor | None = None

    def kept_after(self, scale: Callable[..., Any], copy: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
        """Returns `scale`, which divides logits by temperatures, maybe in place, with a `copy` of its result kept."""

        def scale_and_keep(logits: Tensor, *rest: Any) -> Any:
            result = scale(logits, *rest)
            self._values = copy(logits if result is None else result)
            return result

        return scale_and_keep

    def returned_by(
        self,
        draw: Callable[..., tuple[Any, ...]],
        place: int,
        wanted: Callable[..., Sequence[_Draw]],
        record: Callable[[Sequence[_Draw], Tensor], None],
    ) -> Callable[..., tuple[Any, ...]]:
        """Returns `draw`, which draws tokens, with what was kept at this place of its result.

        The rows of `wanted` draws stay as they are, and are given to `record`.
        """

        def draw_with_full(*arguments: Any) -> tuple[Any, ...]:
            result = draw(*arguments)
            kept, self._values = self._values, None
            draws = wanted(*arguments)
            if draws:
                record(draws, result[place])
            # The second model runner scales and cuts nothing where all requests are greedy or have temperature 1 and
            # no limits: then its result is the full distribution.
            if kept is None:
                return result
            if draws:
                rows = [each.row for each in draws]
                kept[rows] = result[place][rows]
            return (*result[:place], kept, *result[place + 1 :])

        return draw_with_full


# -- in a process that traces the weight loader


@contextmanager
def unloaded_model(
    model_dir: str, layout: EngineLayout, rank: int, store: Path, around: AbstractContextManager[None] | None = None
) -> Iterator[Any]:
    """Builds vLLM's model of a rank as a worker does, in float32 and not loaded; ranks meet by the file `store`.

    The model class is called within `around`.
    """
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models import utils as model_utils
    from vllm.utils.torch_utils import set_default_torch_dtype

    # Workers, which import this file, need no configuration.
    from verl_mg.engines.vllm.arguments import field_overrides, layer_partition
    from verl_mg.models.transformers_module import read_any_config

    library().check()
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
        hf_overrides=field_overrides(read_any_config(model_dir)),
        max_model_len=64,
        kv_cache_memory_bytes=1 << 20,
    )
    config = arguments.create_engine_config()
    os.environ.update(layer_partition(config.model_config.hf_text_config.num_hidden_layers, layout))
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(layout.ranks, rank, f"file://{store.absolute()}", rank, "gloo")
        parallel_state.initialize_model_parallel(layout.tp, layout.pp)
        with set_default_torch_dtype(torch.float32), _layers_with_sparse_attention(), around or nullcontext():
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
    # GPU: `CpuPlatform.get_attn_backend_cls` is not used: the GPU's platform has kernels of sparse attention.
    # GPU-TEST: tests/tracing/test_traced_tables.py
    # GPU-RAN: not yet
    # Lets vLLM build layers with sparse attention on the CPU, where it has no kernels for them; none is called.
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker import workspace

    selected = vars(CpuPlatform)["get_attn_backend_cls"]

    def select(cls: Any, /, selected_backend: Any, attn_selector_config: Any, **options: Any) -> str:
        if attn_selector_config.use_sparse:
            return SPARSE_BACKEND
        backend: str = selected.__func__(cls, selected_backend, attn_selector_config, **options)
        return backend

    if not workspace.is_workspace_manager_initialized():
        workspace.init_workspace_manager(torch.device("cpu"))
    with library().replaced(CpuPlatform, get_attn_backend_cls=classmethod(select)):
        yield
