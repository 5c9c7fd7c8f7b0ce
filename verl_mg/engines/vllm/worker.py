"""Methods that vLLM adds to its workers, by the engine argument `worker_extension_cls`; imported in each worker before
the model is built.
"""

from __future__ import annotations

import base64
import glob
import os
import tempfile
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.platforms import current_platform

from verl_mg.engines.payloads import named_views, open_payload
from verl_mg.engines.sampled_support import Wire
from verl_mg.engines.vllm import internals

internals.do_without_gpu()
internals.take_share_of_free_memory()


class WorkerExtension:
    """Writes shards into the parameters of a worker, and records what samples are to contain.

    vLLM's own transfers of weights send whole tensors to every rank, or need Ray.
    """

    rank: int  # rank of the worker in the engine: `pp_rank * tp + tp_rank`
    device: torch.device
    model_runner: Any  # object of vLLM that has the model and its sampler

    def prepare(self, captures_routing: bool) -> str:
        """Adapts the worker, once after the start, and returns the names of its kernels of attention."""
        runner = self.model_runner
        # The last pipeline stage has a sampler.
        self._draws = None if runner.sampler is None else internals.DrawRecorder(runner)
        self._written: set[str] = set()
        # GPU: experts are written where Triton's kernel reads them, and stages make their inputs in the warm-up.
        # GPU-TEST: tests/engines/vllm/test_engine.py::test_engine_updated_three_times_generates_as_transformers
        # GPU-RAN: not yet
        self._staged_experts = internals.staged_experts(runner.model) if current_platform.is_cpu() else {}
        if captures_routing:
            self._routing = internals.RoutingRecorder(runner)
        if current_platform.is_cpu():
            internals.make_stage_inputs(runner)
        # Removes the names of the shared memory of this node's workers, which have opened it: killed processes do not.
        if ident := os.environ.get("VLLM_DIST_IDENT"):
            for path in glob.glob(f"/dev/shm/*{ident}*") + glob.glob(f"{tempfile.gettempdir()}/{ident}"):
                Path(path).unlink(missing_ok=True)
        groups = [group for of_cache in runner.attn_groups for group in of_cache]
        return " and ".join(sorted({group.backend.get_name() for group in groups}))

    @torch.no_grad()
    def write_shards(self, payloads: Sequence[str], is_last: bool) -> None:
        """Copies this worker's payload into the parameters; at the end RuntimeError where one was not written."""
        parameters = self._loaded()
        places, memory = open_payload(payloads[self.rank], self.device)
        for name, tensor in named_views(places, memory):
            if name not in parameters:
                raise RuntimeError(f"the engine's model has no parameter {name}")
            parameters[name].copy_(tensor)
            self._written.add(name)
        # GPU: a wait before the rank reuses the memory.
        # GPU-TEST: none
        # GPU-RAN: not yet
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the rank reuses the memory
        if is_last:
            self._finish()

    @torch.no_grad()
    def read_shards(self, payloads: Sequence[str]) -> None:
        """Copies parameters into this worker's payload."""
        parameters = self._loaded()
        places, memory = open_payload(payloads[self.rank], self.device)
        for name, tensor in named_views(places, memory):
            # A cast would be believed to be the value that was sent.
            if name not in parameters or parameters[name].dtype is not tensor.dtype:
                raise RuntimeError(f"the engine's model has no parameter {name} in {tensor.dtype}")
            tensor.copy_(parameters[name])
        # GPU: a wait before the rank reads the memory.
        # GPU-TEST: none
        # GPU-RAN: not yet
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _loaded(self) -> dict[str, Tensor]:
        """Returns what a table may name, in the order of the values in which it is loaded."""
        model = self.model_runner.model
        # A loader may fill buffers too, and then the table has them.
        parameters = _plain_names(chain(model.named_parameters(), model.named_buffers()))
        return parameters | {name: staged.raw for name, staged in self._staged_experts.items()}

    def _finish(self) -> None:
        model = self.model_runner.model
        # vLLM processes no weights here, so a parameter that an update leaves out would keep random values unnoticed.
        names = {name for name in _plain_names(model.named_parameters()) if not name.endswith(internals.DERIVED)}
        if missing := sorted(names - self._written):
            raise RuntimeError(f"{len(missing)} parameters were not written: {', '.join(missing[:4])}")
        self._written.clear()
        internals.derive_weights(self.model_runner)
        for staged in self._staged_experts.values():
            staged.pack()

    def replace_adapters(
        self, payloads: Sequence[str], number: int, previous: int | None, config: dict[str, Any]
    ) -> None:
        """Registers adapters with the id `number`, and removes the previous ones."""
        tensors = dict(named_views(*open_payload(payloads[self.rank], torch.device("cpu"))))
        copied = {name: view.clone() for name, view in tensors.items()}  # the rank reuses the memory
        internals.register_adapters(self.model_runner.lora_manager, number, previous, copied, config)

    def take_routing(self, rid: str, fed: int) -> str:
        """Returns the recorded experts of a request, see `RoutingRecorder.take`, in base64."""
        return base64.b64encode(self._routing.take(rid, fed).numpy().tobytes()).decode()

    def take_support(self, rid: str, num_tokens: int) -> Wire | None:
        """Returns the recorded candidates of a request, see `DrawRecorder.take`; None where this rank draws nothing."""
        return self._draws.take(rid, num_tokens) if self._draws else None


def _plain_names(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Returns tensors of a model by their names without adapters, for which vLLM puts layers inside of others."""
    return {name.replace(".base_layer.", "."): tensor for name, tensor in tensors}
