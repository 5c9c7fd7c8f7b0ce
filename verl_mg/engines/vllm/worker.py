"""Methods that vLLM adds to its workers, by the engine argument `worker_extension_cls`; imported in each worker before
the model is built.
"""

from __future__ import annotations

import base64
import glob
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partialmethod
from pathlib import Path
from typing import Any

import torch
import vllm._custom_ops as custom_ops
from torch import Tensor
from vllm.distributed.device_communicators import shm_broadcast
from vllm.model_executor.layers import utils as layer_utils
from vllm.platforms import current_platform

from verl_mg.engines.ipc_payload import named_views, open_payload

CPU_POLL_SECONDS = 0.001  # time for which a worker on the CPU polls for the next message before it sleeps
# Longest sleep of a worker on the CPU: it misses the notification of a message written while it falls asleep.
CPU_SLEEP_MS = 10

if current_platform.is_cpu():
    # Else workers poll for a second after each message, which takes the cores from the ranks.
    shm_broadcast.SpinCondition.__init__ = partialmethod(
        shm_broadcast.SpinCondition.__init__, busy_loop_s=CPU_POLL_SECONDS
    )
    shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = CPU_SLEEP_MS
    # Else linear layers have no weight after loading, only a packed copy inside of oneDNN or of AMX kernels, into which
    # no update can be written.
    custom_ops._supports_onednn = False
    layer_utils.check_cpu_sgl_kernel = lambda n, k, dtype: False

DERIVED = (".W_UK_T", ".W_UV")  # ends of the names of parameters that are computed from others


class WorkerExtension:
    """Writes shards into the parameters of a worker, and records what samples are to contain.

    vLLM's own transfers of weights send whole tensors to every rank, or need Ray.
    """

    rank: int  # rank of the worker in the engine: `pp_rank * tp + tp_rank`
    device: torch.device
    model_runner: Any  # object of vLLM that has the model and its sampler

    def prepare(self, captures_routing: bool) -> None:
        """Adapts the worker, once after the start."""
        runner = self.model_runner
        if runner.sampler is not None:  # the last pipeline stage's
            _return_full_logprobs(runner.sampler)
        self._written: set[str] = set()
        self._staged_experts = _staged_experts(runner.model) if current_platform.is_cpu() else {}
        if captures_routing:
            self._routing = RoutingRecorder(runner)
        if current_platform.is_cpu() and getattr(runner, "intermediate_tensors", True) is None:
            # The warm-up that makes them for pipeline stages is skipped on the CPU.
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )
        _unlink_shared_memory(os.environ.get("VLLM_DIST_IDENT"))

    @torch.no_grad()
    def write_shards(self, payloads: Sequence[str], is_last: bool) -> None:
        """Copies the tensors of this worker's payload into the parameters of the same names.

        There is one payload per worker. With the last ones RuntimeError where a parameter was not written.
        """
        parameters = _parameters(self.model_runner.model)
        places, memory = open_payload(payloads[self.rank], self.device)
        for name, tensor in named_views(places, memory):
            staged = self._staged_experts.get(name)
            (parameters[name] if staged is None else staged.raw).copy_(tensor)
            self._written.add(name)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the rank reuses the memory
        if is_last:
            self._finish()

    def _finish(self) -> None:
        model = self.model_runner.model
        # vLLM processes no weights here, so a parameter that an update leaves out would keep random values unnoticed.
        names = {name for name in _parameters(model) if not name.endswith(DERIVED)}
        if missing := sorted(names - self._written - _padding_alone(model)):
            raise RuntimeError(f"{len(missing)} parameters were not written: {', '.join(missing[:4])}")
        self._written.clear()
        for module in model.modules():
            # Computes W_UK_T and W_UV from the new weights.
            if type(module).__name__ == "MLAAttention":
                module.process_weights_after_loading(self.model_runner.model_config.dtype)
        for staged in self._staged_experts.values():
            staged.pack()

    def replace_adapters(
        self, payloads: Sequence[str], number: int, previous: int | None, config: dict[str, Any]
    ) -> None:
        """Registers adapters with the id `number`, as vLLM does after reading a file, and removes the previous ones."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        manager = self.model_runner.lora_manager
        if previous is not None:
            manager.remove_adapter(previous)
        tensors = dict(named_views(*open_payload(payloads[self.rank], torch.device("cpu"))))
        copied = {name: view.clone() for name, view in tensors.items()}  # the rank reuses the memory
        adapters = LoRAModel.from_lora_tensors(
            number, copied, PEFTHelper.from_dict(config), device="cpu", dtype=manager.lora_config.lora_dtype
        )
        manager._adapter_manager.add_adapter(adapters)
        manager._adapter_manager.activate_adapter(number)

    def take_routing(self, rid: str, fed: int) -> str:
        """Returns the recorded experts of a request, see `RoutingRecorder.take`, in base64."""
        return base64.b64encode(self._routing.take(rid, fed).numpy().tobytes()).decode()


def _unlink_shared_memory(ident: str | None) -> None:
    # Removes the names of the shared memory of this node's workers, which have opened it: killed processes do not.
    if ident:
        for path in glob.glob(f"/dev/shm/*{ident}*") + glob.glob(f"{tempfile.gettempdir()}/{ident}"):
            Path(path).unlink(missing_ok=True)


def _parameters(model: torch.nn.Module) -> dict[str, Tensor]:
    """Returns the parameters by their names without adapters, for which vLLM puts layers inside of others."""
    return {name.replace(".base_layer.", "."): parameter for name, parameter in model.named_parameters()}


def _padding_alone(model: torch.nn.Module) -> set[str]:
    """Returns the names of parameters that are only for tokens beyond the vocabulary, which are not sent."""
    return {
        f"{name}.weight"
        for name, module in model.named_modules()
        if hasattr(module, "shard_indices") and module.shard_indices.num_org_elements == 0
    }


class _StagedExperts:
    """Stacked experts whose kernel on the CPU needs another order of the values: written here, then packed."""

    def __init__(self, packed: Tensor, isa: str) -> None:
        self.raw, self._packed, self._isa = torch.zeros_like(packed), packed, isa

    def pack(self) -> None:
        self._packed.copy_(custom_ops.cpu_prepack_moe_weight(self.raw, self._isa))


def _staged_experts(model: torch.nn.Module) -> dict[str, _StagedExperts]:
    staged = {}
    for name, module in model.named_modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None and hasattr(module, "w13_weight"):
            for weight in ("w13_weight", "w2_weight"):
                packed = getattr(module, weight).data
                staged[f"{name}.{weight}"] = _StagedExperts(packed, kernel.fused_experts.isa)
    return staged


def _return_full_logprobs(sampler: Any) -> None:
    # Has a sampler return log-probabilities after temperature but before min-p, top-k and top-p. vLLM's processed ones
    # are renormalized over the candidates, its raw ones ignore the temperature. Its two model runners have different
    # samplers: one returns log-probabilities, the other logits.
    full = _FullDistribution()
    if hasattr(sampler, "topk_topp_sampler"):
        candidates = sampler.topk_topp_sampler
        sampler.apply_temperature = full.kept_after(sampler.apply_temperature, _log_softmax)
        candidates.forward = full.returned_by(candidates.forward)
    else:
        states = sampler.sampling_states
        states.apply_temperature = full.kept_after(states.apply_temperature, torch.clone)
        sampler._sample_random = full.returned_by(sampler._sample_random)


def _log_softmax(logits: Tensor) -> Tensor:
    return logits.log_softmax(dim=-1, dtype=torch.float32)


class _FullDistribution:
    """Distribution of a step after temperature; candidates are cut off in place afterwards."""

    def __init__(self) -> None:
        self._values: Tensor | None = None

    def kept_after(self, scale: Callable[..., Any], copy: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
        """Returns a function that divides logits by temperatures, and whose result is kept.

        `scale` works in place where it returns nothing; `copy` makes what is kept.
        """

        def scale_and_keep(logits: Tensor, *rest: Any) -> Any:
            result = scale(logits, *rest)
            self._values = copy(logits if result is None else result)
            return result

        return scale_and_keep

    def returned_by(self, sample: Callable[..., tuple[Tensor, Any]]) -> Callable[..., tuple[Tensor, Tensor | None]]:
        """Returns a function that draws tokens and returns them with what was kept."""

        def sample_with_full(*arguments: Any) -> tuple[Tensor, Tensor | None]:
            tokens, _ = sample(*arguments)
            values, self._values = self._values, None
            return tokens, values

        return sample_with_full


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
                self._recorded.setdefault(_request_of(name), []).append((first, rows[start : start + count]))
                start += count
        return output


def _request_of(name: str) -> str:
    """Returns the id of a request from its name inside of vLLM, which ends with a random part."""
    return name.rpartition("-")[0]
