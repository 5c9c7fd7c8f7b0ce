"""Updating a network: megatron-core's gradient buffers, distributed optimizer and schedule around our loss."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Annotated, Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from pydantic import Field
from torch import Tensor

from verl_mg.algorithms.aggregation import aggregate
from verl_mg.batch import Batch
from verl_mg.checkpoint.sharded_safetensors import StoredBox
from verl_mg.config import ConfigSection, Count, GuardConfig, OptimizerConfig
from verl_mg.distributed.collectives import sum_over_ranks
from verl_mg.errors import UserError
from verl_mg.megatron.cpu_offload_adam import move_to_cpu
from verl_mg.megatron.microbatch import LossInputs, MicroBatch, loss_tokens
from verl_mg.megatron.model_runner import Judge, ModelRunner, Report
from verl_mg.megatron.sharded_state import make_moments, optimizer_state, steps_taken, weights
from verl_mg.megatron.snapshot import Snapshot
from verl_mg.megatron.storages import gradient_buffers, inner_optimizers
from verl_mg.megatron.update_guard import BROKEN, UpdateGuard, Verdict

LAST_GOOD = "last_good/"
"""Before the planes of what a rollback goes back to."""


Steps = Annotated[float, Field(ge=0, lt=2**53)]
"""How many an optimizer counts, as a number of its moments' type."""


class TrainerCounters(ConfigSection):
    """The numbers of a trainer. schedule: steps of the learning rate's schedule; moments: steps that the optimizer's
    moments are made of, None before the first; last_good: the same of what a rollback goes back to, if to anything;
    bad_in_a_row: steps left out at last since loss or gradient were not finite."""

    schedule: Count
    moments: Steps | None
    last_good: tuple[Steps | None] | None
    bad_in_a_row: Count


TokenLoss = Callable[[LossInputs], tuple[Tensor, Mapping[str, Tensor]]]
"""(the judged tokens of a micro-batch) -> (loss of each (n,), metrics of each (n,) to be averaged over all tokens)."""


class Trainer:
    """A network with gradients and an optimizer; both only where the network is present. name: for messages."""

    def __init__(
        self, runner: ModelRunner, config: OptimizerConfig, guard: GuardConfig | None = None, name: str = "actor"
    ) -> None:
        check_schedule(config, name)
        self.runner, self._config = runner, config
        first = torch.distributed.get_rank() == runner.placement.ranks[0]
        self._guard = UpdateGuard(guard or GuardConfig(), name, tells=first)
        if runner.is_member:
            self._build(runner, config)
            self._last_good = Snapshot(runner, self.optimizer) if self._guard.rolls_back else None

    def _build(self, runner: ModelRunner, config: OptimizerConfig) -> None:
        # Gradients of bfloat16 weights are added up in float32 too, over micro-batches and over ranks.
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        with runner.groups.active(), runner.groups.placement_as_world(), optimizer_calls():
            runner.runnable = [
                DistributedDataParallel(chunk.config, ddp, chunk, disable_bucketing=number > 0)
                for number, chunk in enumerate(runner.chunks)
            ]
            self.optimizer = get_megatron_optimizer(
                _megatron_config(config, runner.dtype), runner.runnable, use_gloo_process_groups=False
            )
        if config.cpu_offload:
            move_to_cpu(self.optimizer)
        self.scheduler = learning_rate_schedule(self.optimizer, config)
        for chunk in runner.chunks:
            chunk.config.finalize_model_grads_func = _finalize_without_dividing
            chunk.config.grad_scale_func = self.optimizer.scale_loss
        weakref.finalize(self, _unhook, runner.runnable)

    def update(
        self,
        micro_batches: Sequence[Batch],
        temperature: float,
        loss: TokenLoss,
        mode: str,
        normalizer: float,
        total_tokens: int,
        cp_sizes: Sequence[int] | None = None,
    ) -> dict[str, float]:
        """One optimizer step over one mini-batch, whose micro-batches on this rank are given; all the network's ranks
        call it.

        contexts: see `ModelRunner.run`. `normalizer` and `total_tokens` are global (see `aggregation.normalizer`): the
        loss
        and its gradient are those of the mini-batch in one piece. Returns the same metrics on every rank: the loss; its
        metrics and `entropy` as means over all judged tokens, or, where pairs are compared, over sequences;
        `grad_norm`, `lr`, and what the guard did, see `UpdateGuard`.
        """

        def judge(micro: MicroBatch, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            tokens = loss_tokens(micro, output)

            def mean(values: Tensor) -> Tensor:
                if "pair" in tokens and mode == "seq-mean-token-mean":
                    return aggregate(values.double(), tokens.mask, tokens.sequence_ids, mode, normalizer)
                return values.double().sum() / max(total_tokens, 1)

            per_token, metrics = loss(tokens)
            total = aggregate(per_token, tokens.mask, tokens.sequence_ids, mode, normalizer)
            if len(output) > 1:
                metrics = {"entropy": tokens.entropy, **metrics}
            means = {name: mean(values.detach()) for name, values in metrics.items()}
            return total, {"loss": total.detach().double(), **means}

        among = self.runner.groups.host_group
        own = self._gradients(micro_batches, temperature, judge, cp_sizes)
        self.runner.timer.barrier("update", among)
        told = sum_over_ranks(own, among)
        verdict, seen = self._guard.judge(told)
        return {name: value for name, value in told.items() if name != BROKEN} | seen | self._carry_out(verdict)

    def parts(self) -> Iterator[StoredBox]:
        """What this rank writes of what outlives it, to be copied as it comes, and to the end."""
        yield from optimizer_state(self.runner, self.optimizer, to_write=True)
        if self._last_good is not None and self._last_good.taken:
            with self._last_good.in_place():
                for part in optimizer_state(self.runner, self.optimizer, to_write=True):
                    yield replace(part, namespace=LAST_GOOD + part.namespace)

    def counts(self) -> TrainerCounters:
        """The numbers that go with `parts`."""
        last_good = None
        if self._last_good is not None and self._last_good.taken:
            with self._last_good.in_place():
                last_good = (steps_taken(self.optimizer),)
        schedule, moments = self.scheduler.num_steps, steps_taken(self.optimizer)
        return TrainerCounters(
            schedule=schedule, moments=moments, last_good=last_good, bad_in_a_row=self._guard.bad_in_a_row
        )

    def load(self, fill: Callable[[StoredBox], None], counts: TrainerCounters) -> None:
        """Go on from what was written under any layout; `fill` brings the values of a part."""
        if self._last_good is not None and counts.last_good is not None:
            self._fill(fill, LAST_GOOD, *counts.last_good)
            self._last_good.take()
        self._fill(fill, "", counts.moments)
        self.scheduler = learning_rate_schedule(self.optimizer, self._config)
        self.scheduler.step(counts.schedule)
        self._guard.bad_in_a_row = counts.bad_in_a_row

    def _fill(self, fill: Callable[[StoredBox], None], begin: str, moments: float | None) -> None:
        for inner in inner_optimizers(self.optimizer):
            inner.state.clear()
        if moments is not None:
            make_moments(self.optimizer, moments)
        for part in (*weights(self.runner), *optimizer_state(self.runner, self.optimizer)):
            fill(replace(part, namespace=begin + part.namespace))

    def _gradients(
        self, micro_batches: Sequence[Batch], temperature: float, judge: Judge, cp_sizes: Sequence[int] | None
    ) -> list[Report]:
        """Make them; what this rank has to tell of them."""
        with self.runner.timer("optimizer"):
            for chunk in self.runner.runnable:
                chunk.zero_grad_buffer()  # type: ignore[operator]
            self.optimizer.zero_grad()
        reports = self.runner.run(micro_batches, temperature, judge, forward_only=False, cp_sizes=cp_sizes)
        select_outputs = [report for report in self.runner.select_outputs(reports, cp_sizes) if report is not None]
        with self.runner.timer("optimizer"):
            broken = sum(torch.any(~torch.isfinite(buffer)).double() for buffer in gradient_buffers(self.runner))
        return [*select_outputs, {BROKEN: torch.as_tensor(broken)}]

    def _carry_out(self, verdict: Verdict) -> dict[str, float]:
        """Change the weights, or not; the same on all ranks."""
        grad_norm = 0.0
        if verdict == "step":
            if self._last_good is not None:
                self._last_good.take()
            self.scheduler.step(1)
            with self.runner.groups.active(), optimizer_calls(), self.runner.timer("optimizer"):
                _, grad_norm, _ = self.optimizer.step()
        elif verdict == "rollback" and self._last_good is not None:
            self._last_good.restore()
            self.scheduler = learning_rate_schedule(self.optimizer, self._config)
        return {"grad_norm": float(grad_norm), "lr": self.optimizer.param_groups[0]["lr"]}


def optimizer_calls() -> AbstractContextManager[None]:
    """Held around the building and the steps of a megatron-core optimizer."""
    if torch.cuda.is_available():
        return nullcontext()
    from verl_mg.megatron.cpu_shim import tensor_types_named_cuda

    return tensor_types_named_cuda()


def _finalize_without_dividing(model: list[torch.nn.Module], num_tokens: Tensor | None = None, **groups: Any) -> None:
    """Sum gradients over ranks and leave them so: the loss was divided by its global normalizer before."""
    finalize_model_grads(model, None, **groups)


def _unhook(models: list[Any]) -> None:
    """Let go of the nodes whose hooks hold the model: Python's collector cannot see them, and it would never end."""
    for model in models:
        model.grad_accs.clear()
        model.config.grad_scale_func = None  # the optimizer, whose shards hold the same nodes


def _megatron_config(config: OptimizerConfig, dtype: torch.dtype) -> MegatronOptimizerConfig:
    return MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.betas[0],
        adam_beta2=config.betas[1],
        adam_eps=config.eps,
        clip_grad=config.clip_grad,
        use_distributed_optimizer=True,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
    )


def check_schedule(config: OptimizerConfig, name: str = "actor") -> None:
    """UserError for a learning rate that falls, nobody says over how many steps."""
    if config.schedule != "constant" and config.decay_steps is None:
        raise UserError(
            f"{name}.optimizer.schedule is {config.schedule!r}: write {name}.optimizer.decay_steps, the optimizer "
            "steps over which the learning rate falls to min_lr"
        )


def learning_rate_schedule(optimizer: Any, config: OptimizerConfig) -> OptimizerParamScheduler:
    """megatron-core's schedule, to be stepped before each optimizer step: step k of a warm-up has k/warmup_steps."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr if config.schedule != "constant" else 0.0,
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=config.decay_steps or config.warmup_steps + 1,
        lr_decay_style=config.schedule,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
