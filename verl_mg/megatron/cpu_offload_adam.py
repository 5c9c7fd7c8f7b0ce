"""AdamW with its moments and its computation on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class CpuOffloadAdamW(torch.optim.AdamW):
    """AdamW (arXiv:1711.05101) of weights on the device: 8 of its 12 bytes per weight are on the host.

    A step copies gradients and weights to the host, in pinned memory where there is a GPU, and weights back
    (ZeRO-Offload, arXiv:2101.06840). `state` has the weights as its keys, like that of any other optimizer.
    """

    def __init__(self, param_groups: list[dict[str, Any]]) -> None:
        """Creates the optimizer without moments; `param_groups` are those of a torch optimizer."""
        super().__init__([torch.empty(0)])
        self.param_groups = param_groups  # megatron-core's shards are views, which torch's constructor refuses
        host_groups = [self._host_group(group) for group in self.param_groups]
        self._host = torch.optim.AdamW(host_groups, fused=True)

    def _host_group(self, group: dict[str, Any]) -> dict[str, Any]:
        return {**_hyperparameters(group), "params": [_empty_on_host(weight) for weight in group["params"]]}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates all weights that have a gradient."""
        pairs = []
        for group, host_group in zip(self.param_groups, self._host.param_groups, strict=True):
            host_group.update(_hyperparameters(group))
            pairs += list(zip(group["params"], host_group["params"], strict=True))
        for weight, host_weight in pairs:
            host_weight.copy_(weight, non_blocking=True)
            if weight.grad is None:
                host_weight.grad = None
                continue
            host_weight.grad = _empty_on_host(weight.grad) if host_weight.grad is None else host_weight.grad
            host_weight.grad.copy_(weight.grad, non_blocking=True)
        torch.cuda.synchronize()
        # A restored checkpoint or snapshot has changed `state`, not that of the host optimizer.
        for weight, host_weight in pairs:
            if weight in self.state:
                self._host.state[host_weight] = self.state[weight]
            else:
                self._host.state.pop(host_weight, None)
        self._host.step()
        for weight, host_weight in pairs:
            weight.copy_(host_weight, non_blocking=True)
            if host_weight in self._host.state:
                self.state[weight] = self._host.state[host_weight]
        torch.cuda.synchronize()


def move_to_cpu(optimizer: Any) -> None:
    """Replaces the torch optimizers inside a new megatron-core optimizer by `CpuOffloadAdamW`."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        part.optimizer = CpuOffloadAdamW(part.optimizer.param_groups)


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    return {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}


def _empty_on_host(values: Tensor) -> Tensor:
    return torch.empty_like(values, device="cpu", pin_memory=values.is_cuda)
