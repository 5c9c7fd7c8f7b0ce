"""`Trainer`: optimizer steps on a model with global normalizers, whatever the backend, and the guard of these steps.

An update, with the state that each verdict of `UpdateGuard` leaves:

    forward, backward of all micro-batches     gradients, summed over micro-batches
    reports, summed over ranks in host memory  the same numbers, and so the same verdict, on every rank
      step       snapshot (where a rollback is possible), schedule + 1, clip, optimizer step
      skip       nothing changes; the next update clears the gradients
      rollback   weights and moments of the snapshot, schedule from its beginning

Moments: None -> created by the first step, by `allocate_moments`, or by `load` from a checkpoint that has some.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, UntypedStorage

from verl_mg.algorithms.aggregation import aggregate, normalizer
from verl_mg.batch import Batch
from verl_mg.checkpoint.sharded_safetensors import StoredBox
from verl_mg.config import Count, GuardConfig, OptimizerConfig
from verl_mg.distributed.collectives import sum_over_ranks
from verl_mg.errors import UserError
from verl_mg.jsonl import StoredRecord
from verl_mg.training.logprobs import EVERYTHING, TokenOutputs
from verl_mg.training.loss_inputs import LossInputs, loss_tokens
from verl_mg.training.microbatch import MicroBatch
from verl_mg.training.runner import LossClosure, Report, Runner
from verl_mg.training.storages import Snapshot, storages_here

log = logging.getLogger(__name__)

TRAJECTORY_TOKENS = "trajectory_tokens"
"""Sequence column with the number of scored tokens of a row's trajectory, in all micro-batches."""
LAST_GOOD = "last_good/"  # prefix of the namespaces of the state that a rollback restores

Verdict = Literal["step", "skip", "rollback"]
"""Decision on an update: apply it, leave it out, or restore the state before the last one."""

NON_FINITE_BUFFERS = "non-finite gradient buffers"
"""Name of the reported number of gradient buffers with an element that is not finite."""

Steps = Annotated[float, Field(ge=0, lt=2**53)]  # number of optimizer steps, in the moments' floating-point type


class TrainerCounters(StoredRecord):
    """Counters of a trainer in a checkpoint."""

    schedule: Count  # steps of the learning-rate schedule
    moments: Steps | None  # optimizer steps in Adam's moments; None before the first
    last_good: tuple[Steps | None] | None
    """`moments` of the state that a rollback restores; None where there is no such state."""
    bad_in_a_row: Count  # latest steps skipped in a row because loss or gradient were not finite


TokenLoss = Callable[[LossInputs], tuple[Tensor, Mapping[str, Tensor]]]
"""(scored tokens of a micro-batch) -> (loss of each token (n,), metrics of each token (n,) to be averaged)."""


@dataclass(frozen=True)
class MiniBatch:
    """Rows of one optimizer step: this rank's, and their numbers over all ranks."""

    micro_batches: list[Batch]  # with TRAJECTORY_TOKENS where a trajectory has several rows
    cp_sizes: list[int] | None  # number of context-parallel ranks that share each micro-batch; None for all of them
    num_tokens: int  # scored tokens over all ranks
    num_sequences: int  # trajectories with scored tokens over all ranks


@dataclass(frozen=True)
class Objective:
    """Loss that an update minimizes."""

    loss: TokenLoss
    aggregation: str  # aggregation of token losses, see `algorithms.aggregation`
    temperature: float
    outputs: TokenOutputs = EVERYTHING  # outputs of a language model that the loss needs
    max_length: int | None = None  # tokens of the longest possible response, for "seq-mean-token-sum-norm"


def count_non_finite(buffers: Iterable[Tensor]) -> Tensor:
    """Counts the buffers with an element that is not finite: () float64 on their device, the host does not wait."""
    # One pass without a temporary of the buffer's size: extremes of a buffer with NaN are NaN, and an infinity is an
    # extreme. Extremes of no elements are undefined.
    extremes = [torch.stack(buffer.aminmax()) for buffer in buffers if buffer.numel()]
    if not extremes:
        return torch.zeros(())
    return torch.stack(extremes).isfinite().all(1).logical_not().sum(dtype=torch.float64)


class UpdateGuard:
    """Rules of `GuardConfig`. Metrics: `skipped` and, where it can happen, `rolled_back`, 1 where it did."""

    def __init__(self, config: GuardConfig, name: str, logs: bool = True) -> None:
        self._config, self._name, self._logs = config, name, logs
        self.bad_in_a_row = 0

    @property
    def rolls_back(self) -> bool:
        """Whether a rollback is a possible verdict."""
        return self._config.max_kl is not None and self._config.action == "rollback"

    def check(self, sums: Mapping[str, float]) -> tuple[Verdict, dict[str, float]]:
        """Decides whether an update is applied, and returns the metrics.

        `sums` over all ranks are `loss`, NON_FINITE_BUFFERS and, where the loss reports it, `approx_kl`. Too many
        non-finite steps in a row raise a UserError, and so does a limit on a metric that is not reported.
        """
        verdict: Verdict = "step"
        if sums[NON_FINITE_BUFFERS] or not math.isfinite(sums["loss"]):
            verdict = "skip"
            self._count_bad(sums["loss"])
        else:
            self.bad_in_a_row = 0
            if self._kl_exceeded(sums):
                verdict = self._config.action
                what = "step skipped" if verdict == "skip" else "weights and learning rate rolled back"
                self._warn(f"approx_kl {sums['approx_kl']:.3g} is above guard.max_kl={self._config.max_kl}: {what}")
        metrics = {"skipped": float(verdict != "step")}
        return verdict, metrics | ({"rolled_back": float(verdict == "rollback")} if self.rolls_back else {})

    def _count_bad(self, loss: float) -> None:
        self.bad_in_a_row += 1
        what = "gradient is" if math.isfinite(loss) else "loss is"
        self._warn(f"{what} not finite: step skipped ({self.bad_in_a_row} in a row)")
        if self.bad_in_a_row == self._config.bad_steps:
            raise UserError(
                f"{self._name}: loss or gradient not finite in {self.bad_in_a_row} steps in a row. Lower "
                f"{self._name}.optimizer.lr, or look for the samples that cause it."
            )

    def _kl_exceeded(self, sums: Mapping[str, float]) -> bool:
        if self._config.max_kl is None:
            return False
        if "approx_kl" not in sums:
            raise UserError(f"{self._name}.guard.max_kl: the recipe's loss reports no approx_kl. Leave the key out.")
        return sums["approx_kl"] > self._config.max_kl

    def _warn(self, message: str) -> None:
        if self._logs:
            log.warning("%s: %s", self._name, message)


class Trainer(ABC):
    """Model with gradients and an optimizer, both only on the ranks of its placement.

    Attributes:
        optimizer: the optimizer of the backend; only on the ranks of the placement.
        scheduler: its learning-rate schedule, there too.
    """

    optimizer: Any
    scheduler: LearningRateSchedule
    _last_good: Snapshot | None = None

    def __init__(
        self, runner: Runner, config: OptimizerConfig, guard: GuardConfig | None = None, name: str = "actor"
    ) -> None:
        check_schedule(config, name)
        self.runner, self._config, self._name = runner, config, name
        is_first = torch.distributed.get_rank() == runner.placement.ranks[0]
        self._guard = UpdateGuard(guard or GuardConfig(), name, logs=is_first)
        if runner.is_member:
            self._build()
            self._last_good = self.snapshot() if self._guard.rolls_back else None

    def snapshot(self) -> Snapshot:
        """Returns an empty snapshot of the weights and the optimizer state."""
        return Snapshot(self._updated_storages, lambda: self.inner_optimizers)

    def update(self, mini_batch: MiniBatch, objective: Objective) -> dict[str, float]:
        """Updates the model on one mini-batch; all ranks of the placement call it. UserError, see `UpdateGuard.check`.

        The metrics are the same on every rank: `loss`; the loss's metrics and `entropy` as means over all scored
        tokens, or over sequences where pairs are compared; `grad_norm`, `lr`, and the metrics of guard and backend.
        """
        mode = objective.aggregation
        # Of the whole mini-batch: loss and gradient do not depend on its division into micro-batches and ranks.
        divisor = normalizer(mode, mini_batch.num_tokens, mini_batch.num_sequences, objective.max_length)

        def loss_closure(micro: MicroBatch[Any], output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            tokens = loss_tokens(micro, output, objective.outputs.teacher)
            of_trajectory = tokens.columns.get(TRAJECTORY_TOKENS)

            def mean(values: Tensor) -> Tensor:
                # In float64: parts of a mean from many micro-batches and ranks are added up.
                if "pair" in tokens and mode == "seq-mean-token-mean":
                    return aggregate(values.double(), tokens.mask, tokens.sequence_ids, mode, divisor)
                return values.double().sum() / max(mini_batch.num_tokens, 1)

            per_token, metrics = objective.loss(tokens)
            total = aggregate(per_token, tokens.mask, tokens.sequence_ids, mode, divisor, of_trajectory)
            if len(output) > 1:
                metrics = {"entropy": tokens.entropy, **metrics}
            means = {name: mean(values.detach()) for name, values in metrics.items()}
            return total, {"loss": total.detach().double(), **means}

        host_group = self.runner.host_group
        with self.runner.timer("update"):
            reports = self._compute_gradients(mini_batch, objective, loss_closure)
            self.runner.timer.barrier("update", host_group)
            # In host memory, where every rank adds the same numbers in the same order: the verdict must be one for all.
            sums = sum_over_ranks(reports, host_group)
            verdict, guard_metrics = self._guard.check(sums)
            loss_metrics = {name: value for name, value in sums.items() if name != NON_FINITE_BUFFERS}
            return loss_metrics | guard_metrics | self._apply(verdict)

    def _compute_gradients(
        self, mini_batch: MiniBatch, objective: Objective, loss_closure: LossClosure
    ) -> list[dict[str, float]]:
        """Runs forward and backward passes and returns this rank's reports, to be summed over all ranks."""
        runner, micro_batches, cp_sizes = self.runner, mini_batch.micro_batches, mini_batch.cp_sizes
        with runner.timer("optimizer"):
            loss_closure = self._clear_gradients(mini_batch, loss_closure)
        reports = runner.run(micro_batches, objective.temperature, loss_closure, False, cp_sizes, objective.outputs)
        selected = [report for report in runner.select_outputs(reports, cp_sizes) if report is not None]
        with runner.timer("optimizer"):
            further = self._complete_gradients()
            non_finite = count_non_finite(self._gradients())
        return to_host([*selected, {NON_FINITE_BUFFERS: non_finite} | further])

    def allocate_moments(self) -> None:
        """Creates the optimizer's moments if there are none yet: zeros, as the first step would create them."""
        if self._steps_taken() is None:
            self._make_moments(0.0)

    def stored_boxes(self) -> Iterator[StoredBox]:
        """Yields this rank's shards of the state for a checkpoint: all are read, each before the next is requested."""
        yield from self._state()
        if self._last_good is not None and self._last_good.taken:
            # A snapshot is bytes of storages: its values have tensors and boxes only in the place of the current state.
            with self._last_good.in_place():
                for box in self._state():
                    yield replace(box, namespace=LAST_GOOD + box.namespace)

    def counters(self) -> TrainerCounters:
        """Returns the counters that belong to `stored_boxes`."""
        last_good = None
        if self._last_good is not None and self._last_good.taken:
            with self._last_good.in_place():
                last_good = (self._steps_taken(),)
        schedule, moments = self.scheduler.num_steps, self._steps_taken()
        return TrainerCounters(
            schedule=schedule, moments=moments, last_good=last_good, bad_in_a_row=self._guard.bad_in_a_row
        )

    def load(self, fill: Callable[[StoredBox], None], counters: TrainerCounters) -> None:
        """Restores a state that was written under any layout, by any backend; `fill` writes the values of a box."""
        # First the older state, which the snapshot copies from the model; the current one then replaces it there.
        if self._last_good is not None and counters.last_good is not None:
            self._fill(fill, LAST_GOOD, *counters.last_good)
            self._last_good.take()
        self._fill(fill, "", counters.moments)
        self.scheduler = LearningRateSchedule(self.optimizer, self._config)
        self.scheduler.step(counters.schedule)
        self._guard.bad_in_a_row = counters.bad_in_a_row

    def _fill(self, fill: Callable[[StoredBox], None], prefix: str, moments: float | None) -> None:
        had_moments = self._steps_taken() is not None
        for inner in self.inner_optimizers:
            inner.state.clear()
        if moments is not None:
            self._make_moments(moments)
        for box in self._state():
            fill(replace(box, namespace=prefix + box.namespace))
        self._use_restored_weights()
        if had_moments:
            self.allocate_moments()

    def _apply(self, verdict: Verdict) -> dict[str, float]:
        """Steps, skips or rolls back; the verdict is the same on all ranks."""
        grad_norm = 0.0
        if verdict == "step":
            if self._last_good is not None:
                self._last_good.take()
            self.scheduler.step(1)
            grad_norm = self._step()
        elif verdict == "rollback" and self._last_good is not None:
            self._last_good.restore()
            self.scheduler = LearningRateSchedule(self.optimizer, self._config)
        return {"grad_norm": grad_norm, "lr": self.optimizer.param_groups[0]["lr"]}

    def gradient_storages(self) -> list[UntypedStorage]:
        """Returns the storages of gradients on the device, which an update clears before it begins."""
        return storages_here(self._gradients())

    @abstractmethod
    def _build(self) -> None:
        """Creates optimizer and schedule, on a rank of the placement."""

    @property
    @abstractmethod
    def inner_optimizers(self) -> list[torch.optim.Optimizer]:
        """The torch optimizers of this rank."""

    @abstractmethod
    def state_storages(self) -> list[UntypedStorage]:
        """Returns the storages of the optimizer state on the model's device that are not the weights themselves."""

    @abstractmethod
    def _updated_storages(self) -> list[UntypedStorage]:
        """Returns the storages that an update writes, except gradients; frozen weights are not among them."""

    @abstractmethod
    def _gradients(self) -> Iterator[Tensor]:
        """Yields this rank's parts of the gradients, or the buffers that they are in."""

    @abstractmethod
    def _clear_gradients(self, mini_batch: MiniBatch, loss_closure: LossClosure) -> LossClosure:
        """Clears gradients before an update; returns the loss to differentiate, with losses of the backend's layers."""

    @abstractmethod
    def _complete_gradients(self) -> Report:
        """Sums over ranks what the backward pass has not summed, and returns this rank's further reports."""

    @abstractmethod
    def _step(self) -> float:
        """Steps with clipped gradients, and returns their norm before clipping."""

    @abstractmethod
    def _state(self) -> Iterator[StoredBox]:
        """Yields this rank's share of the weights, in the precision of the optimizer, and of its moments if any."""

    @abstractmethod
    def _steps_taken(self) -> float | None:
        """Returns the number of steps in the moments; None before the first."""

    @abstractmethod
    def _make_moments(self, steps: float) -> None:
        """Creates zero moments that count as having taken a number of steps."""

    @abstractmethod
    def _use_restored_weights(self) -> None:
        """Makes the model compute with the weights that were restored into the optimizer."""


def to_host(reports: Sequence[Report]) -> list[dict[str, float]]:
    """Copies all scalars of the reports to the host together, so that it waits for the device once."""
    scalars = [torch.as_tensor(value).detach().double() for report in reports for value in report.values()]
    values = iter(torch.stack([scalar.to(scalars[0].device) for scalar in scalars]).tolist())
    return [{name: next(values) for name in report} for report in reports]


class LearningRateSchedule:
    """Schedule of an optimizer, to be stepped before each optimizer step.

    Step k of the warm-up, counted from 1, has the learning rate lr * k / warmup_steps.

    Attributes:
        num_steps: steps so far.
    """

    def __init__(self, optimizer: Any, config: OptimizerConfig) -> None:
        self._optimizer, self._config, self.num_steps = optimizer, config, 0
        self.step(0)

    def step(self, steps: int) -> None:
        """Counts steps and sets learning rate and weight decay of the parameter groups."""
        self.num_steps += steps
        rate = self._rate()
        for group in self._optimizer.param_groups:
            group["lr"] = rate
            # megatron-core's factor: 0 for biases and norms.
            group["weight_decay"] = self._config.weight_decay * group.get("wd_mult", 1.0)

    def _rate(self) -> float:
        c, step = self._config, self.num_steps
        if c.warmup_steps > 0 and step <= c.warmup_steps:
            return c.lr * step / c.warmup_steps
        if c.schedule == "constant" or c.decay_steps is None:
            return c.lr
        done = min(1.0, (step - c.warmup_steps) / (c.decay_steps - c.warmup_steps))
        left = 1 - done if c.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        return c.min_lr + left * (c.lr - c.min_lr)


def check_schedule(config: OptimizerConfig, name: str = "actor") -> None:
    """Checks that a decaying schedule has a number of steps."""
    if config.schedule != "constant" and config.decay_steps is None:
        raise UserError(
            f"{name}.optimizer.schedule: {config.schedule!r} needs a number of steps. Set "
            f"{name}.optimizer.decay_steps, the optimizer steps over which the learning rate falls to min_lr."
        )
