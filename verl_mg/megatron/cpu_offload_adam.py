"""Adam whose moments live on the host, which also computes its step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class CpuOffloadAdamW(torch.optim.AdamW):
    """AdamW (arXiv:1711.05101) of weights on the device: 8 of its 12 bytes a weight are on the host.

    In a step gradients and weights go to the host, pinned where there is a GPU, and weights come back (ZeRO-Offload,
    arXiv:2101.06840). `state` is that of the weights, as of any other optimizer.
    """

    def __init__(self, param_groups: list[dict[str, Any]]) -> None:
        super().__init__([torch.empty(0)])
        self.param_groups = param_groups  # megatron-core's shards are views, which torch takes no other way
        twins = [self._twin(group) for group in self.param_groups]
        self._host = torch.optim.AdamW(twins, fused=True)

    def _twin(self, group: dict[str, Any]) -> dict[str, Any]:
        return {**_numbers(group), "params": [_on_host(weight) for weight in group["params"]]}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step of all weights that have a gradient."""
        pairs = []
        for group, twins in zip(self.param_groups, self._host.param_groups, strict=True):
            twins.update(_numbers(group))
            pairs += list(zip(group["params"], twins["params"], strict=True))
        for weight, twin in pairs:
            twin.copy_(weight, non_blocking=True)
            if weight.grad is None:
                twin.grad = None
                continue
            twin.grad = _on_host(weight.grad) if twin.grad is None else twin.grad
            twin.grad.copy_(weight.grad, non_blocking=True)
        torch.cuda.synchronize()
        for weight, twin in pairs:  # whoever restored the state did so here
            if weight in self.state:
                self._host.state[twin] = self.state[weight]
            else:
                self._host.state.pop(twin, None)
        self._host.step()
        for weight, twin in pairs:
            weight.copy_(twin, non_blocking=True)
            if twin in self._host.state:
                self.state[weight] = self._host.state[twin]
        torch.cuda.synchronize()


def move_to_cpu(optimizer: Any) -> None:
    """Have a fresh optimizer of megatron-core keep its moments on the host from now on."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        part.optimizer = CpuOffloadAdamW(part.optimizer.param_groups)


def _numbers(group: dict[str, Any]) -> dict[str, Any]:
    return {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}


def _on_host(values: Tensor) -> Tensor:
    return torch.empty_like(values, device="cpu", pin_memory=values.is_cuda)
