"""Experts of each token, recorded in a worker on the CPU, where vLLM itself does not return them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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
