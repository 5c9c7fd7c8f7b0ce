"""Loads of experts: how many tokens of a mini-batch chose each, as a metric, and for the updates of routers' biases.

Without an auxiliary loss (DeepSeek-V3, arXiv:2412.19437, section 2.1.2; arXiv:2408.15664, algorithm 1) experts are
balanced by the bias that a router adds to the scores for the choice of experts: after each optimizer step

    b_i += u * sign(mean load - load_i)

with the loads over all tokens of the mini-batch, on whatever ranks and in whatever micro-batches they are. Counts are
integers, so biases are bitwise the same under every layout that routes tokens alike.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from verl_mg.megatron.balance_losses import BalanceLosses
from verl_mg.megatron.model_runner import ModelRunner
from verl_mg.megatron.routing import Router

MAX_LOAD = "max_expert_load"
"""Metric: the largest load of an expert as a multiple of the mean load, averaged over the layers with experts."""


class ExpertLoads:
    """Loads of all experts of a trained model on a rank of its placement.

    Attributes:
        losses: auxiliary losses that the routers compute; None without.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._routers = [m for chunk in runner.chunks for m in chunk.modules() if isinstance(m, Router)]
        self._rate = runner.bias_update_rate
        self._group = runner.groups.collection.tp_dp_cp
        at = runner.groups.coordinates
        self._reports = at.tp == at.cp == at.dp == 0
        experts = runner.table.config.experts
        self._layers = len(experts.layers) + (runner.multi_token_factor > 0) if experts else 0
        self._loads = torch.empty(0)  # (layers of this rank with experts, experts) int64
        balance, z = runner.balance_factors
        self.losses = BalanceLosses(balance, z, runner.groups.collection.tp) if balance or z else None

    def clear(self) -> None:
        """Sets the sums to 0, for the next mini-batch."""
        if self.losses:
            self.losses.sums = None
        if self._routers:
            first = self._routers[0]
            shape = len(self._routers), first.config.num_moe_experts
            self._loads = torch.zeros(shape, dtype=torch.int64, device=first.weight.device)
        for router, load in zip(self._routers, self._loads, strict=True):
            router.losses, router.load = self.losses, load

    def sum_over_ranks(self) -> dict[str, Tensor]:
        """Completes the loads and returns this rank's part of the metrics, to be summed; a collective."""
        if not self._routers:
            return {}
        losses = {} if self.losses is None else self.losses.report(self._layers)
        dist.all_reduce(self._loads, group=self._group)
        # All ranks of a pipeline stage have the same sums now: one of them reports.
        if not self._reports:
            return losses
        loads = self._loads.double()
        mean = loads.mean(1).clamp_min(1 / loads.shape[1])  # a mini-batch without tokens has no loads
        return losses | {MAX_LOAD: (loads.amax(1) / mean).sum() / self._layers}

    def update_biases(self) -> None:
        """Raises the biases of experts below the mean load, and lowers them above it."""
        if not self._rate:
            return
        for router, load in zip(self._routers, self._loads, strict=True):
            # The sign of mean - load, in integers: a rounded mean could differ from a load that equals it.
            router.expert_bias += self._rate * (load.sum() - load * len(load)).sign()
