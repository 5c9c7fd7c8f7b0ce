"""Optimizer steps on a sharded module of `transformers`: AdamW on this rank's parts of the parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage, nn
from torch.distributed.tensor import DTensor

from verl_mg import device
from verl_mg.checkpoint.sharded_safetensors import StoredBox
from verl_mg.config import GuardConfig, OptimizerConfig
from verl_mg.fsdp.model import local_part
from verl_mg.fsdp.model_runner import FsdpRunner
from verl_mg.fsdp.options import check_optimizer
from verl_mg.sharding.boxes import full_box
from verl_mg.training.runner import LossClosure, Report
from verl_mg.training.storages import storages, storages_here
from verl_mg.training.trainer import LearningRateSchedule, MiniBatch, Trainer
from verl_mg.training.weights import WEIGHTS, stored_boxes

MOMENTS = ("exp_avg", "exp_avg_sq")  # Adam's moments by their names in the optimizer's state, and in checkpoints


class FsdpTrainer(Trainer):
    """Trainer of the FSDP backend.

    Adam computes each element by itself, so every rank steps on plain tensors that share the memory of its parts, and
    parameters of different meshes are in one optimizer.

        zero     gradients are freed
        run      FSDP sums gradients over the data mesh in float32, without dividing
        sum      `_complete_gradients` adds what FSDP does not: norms of heads over tp, else whole parameters
        step     one norm of all parts, each element counted once; clip; AdamW on this rank's parts
    """

    optimizer: torch.optim.AdamW
    runner: FsdpRunner

    def __init__(
        self, runner: FsdpRunner, config: OptimizerConfig, guard: GuardConfig | None = None, name: str = "actor"
    ) -> None:
        check_optimizer(config, name)
        super().__init__(runner, config, guard, name)

    def _build(self) -> None:
        trained, whole = self.runner.trained(), self._parameters_by_name()
        self._parameters = {name: whole[name] for name in trained}
        # Empty parts are left out: a rank has none of a parameter with fewer rows than ranks.
        self._weights = {name: nn.Parameter(local_part(p)) for name, p in self._parameters.items()}
        filled = {name: weight for name, weight in self._weights.items() if weight.numel()}
        # As megatron-core: neither vectors nor biases decay, nor single numbers.
        kinds = {1.0: [], 0.0: []}  # type: dict[float, list[nn.Parameter]]
        for name, weight in filled.items():
            kinds[0.0 if self._parameters[name].dim() < 2 or name.endswith("bias") else 1.0].append(weight)
        groups = [{"params": weights, "wd_mult": factor} for factor, weights in kinds.items() if weights]
        c = self._config
        # An optimizer needs a parameter, also on a rank that has no part of any.
        self.optimizer = torch.optim.AdamW(
            groups or [{"params": [nn.Parameter(torch.zeros(0))]}], lr=c.lr, betas=c.betas, eps=c.eps, fused=True
        )
        self.scheduler = LearningRateSchedule(self.optimizer, c)

    @property
    def inner_optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.optimizer]

    def _parameters_by_name(self) -> dict[str, Tensor]:
        assert self.runner.packed is not None
        named: dict[str, Tensor] = dict(self.runner.packed.module.named_parameters())
        return named | dict(self.runner.adapters())

    def _make_moments(self, steps: float) -> None:
        for weight in self._weights.values():
            if weight.numel():
                moments = {name: torch.zeros_like(weight) for name in MOMENTS}
                self.optimizer.state[weight] = {"step": torch.tensor(steps, device=weight.device), **moments}

    def _steps_taken(self) -> float | None:
        for state in self.optimizer.state.values():
            return float(state["step"])
        return None

    def _state(self) -> Iterator[StoredBox]:
        shards = self.runner.trained_shards()
        for name, weight in self._weights.items():
            kinds = {WEIGHTS: weight.detach(), **{k: self.optimizer.state.get(weight, {}).get(k) for k in MOMENTS}}
            for namespace, values in kinds.items():
                if values is not None:
                    values = shards[name].described(values)
                    yield from stored_boxes(namespace, shards[name], values, full_box(tuple(values.shape)))

    def _use_restored_weights(self) -> None:
        self.runner.unrestored -= self._weights.keys()  # optimizer and model have the same memory

    def state_storages(self) -> list[UntypedStorage]:
        states = (value for state in self.optimizer.state.values() for value in state.values())
        return storages_here(value for value in states if isinstance(value, Tensor) and value.dim())

    def _updated_storages(self) -> list[UntypedStorage]:
        states = (value for state in self.optimizer.state.values() for value in state.values())
        return storages([*self._weights.values(), *(value for value in states if isinstance(value, Tensor))])

    def _gradients(self) -> Iterator[Tensor]:
        return (local_part(p.grad) for p in self._parameters.values() if p.grad is not None)

    def _clear_gradients(self, mini_batch: MiniBatch, loss_closure: LossClosure) -> LossClosure:
        for parameter in self._parameters.values():
            parameter.grad = None
        return loss_closure

    def _complete_gradients(self) -> Report:
        """Sums the gradients that the backward pass has not summed: of tensor-parallel parts, adapters and numbers."""
        groups, adapters = self.runner.groups, self.runner.lora
        whole = frozenset(name for name, parameter in self._parameters.items() if not parameter.dim())
        whole |= adapters.module_parameters if adapters else frozenset()
        for names, group in (
            (self.runner.summed_gradients, groups.tensor_ranks.group),
            (whole, groups.group),
        ):
            grads = [local_part(self._with_gradient(self._parameters[n])) for n in sorted(names & self._weights.keys())]
            if grads and group is not None and group.size() > 1:
                # One collective for all, on the device: with `fsdp.cpu_offload` the gradients are in host memory.
                flat = torch.cat([grad.flatten() for grad in grads]).to(device.current_device())
                dist.all_reduce(flat, group=group)
                parts = flat.split([grad.numel() for grad in grads])
                for grad, part in zip(grads, parts, strict=True):
                    grad.copy_(part.view_as(grad))
        return {}

    def _with_gradient(self, parameter: Tensor) -> Tensor:
        """Returns the gradient of a parameter; zeros where no token has reached it."""
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad

    @torch.no_grad()
    def _step(self) -> float:
        with self.runner.timer("optimizer"):
            return self._clip_and_step()

    def _clip_and_step(self) -> float:
        for name, weight in self._weights.items():
            # The gradients are the module's, in its memory.
            weight.grad = local_part(self._with_gradient(self._parameters[name]))
        norm = self._gradient_norm()
        limit = self._config.clip_grad
        if limit and norm > limit:
            factor = limit / (norm + 1e-6)  # as megatron-core
            torch._foreach_mul_([grad for _, grads in self._by_share() for grad in grads], factor)
        self.optimizer.step()
        return norm

    def _gradient_norm(self) -> float:
        """Returns the norm of the gradients of all parameters, each element counted once."""
        total = torch.zeros((), dtype=torch.float64)
        for share, grads in self._by_share():
            norms = torch._foreach_norm(grads, dtype=torch.float32) if grads else []
            if norms:
                total += torch.stack(list(norms)).double().square().sum().cpu() * share
        group = self.runner.host_group
        dist.all_reduce(total, group=group)
        return math.sqrt(float(total))

    def _by_share(self) -> Iterable[tuple[float, list[Tensor]]]:
        """Returns gradients with the share of them that this rank counts: ranks with the same part divide it."""
        by_copies: dict[int, list[Tensor]] = {}
        for name, weight in self._weights.items():
            if weight.numel() and weight.grad is not None:
                by_copies.setdefault(self._copies(self._parameters[name]), []).append(weight.grad)
        return [(1 / copies, grads) for copies, grads in by_copies.items()]

    def _copies(self, parameter: Tensor) -> int:
        """Returns the number of ranks that have the same part of a parameter."""
        ranks = len(self.runner.placement.ranks)
        if not isinstance(parameter, DTensor):
            return ranks
        return ranks // math.prod(
            size
            for size, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True)
            if not placement.is_replicate()
        )
