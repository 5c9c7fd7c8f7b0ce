"""Guard of optimizer steps: skips or rolls back bad updates, decided alike on all ranks."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor

from verl_mg.config import GuardConfig
from verl_mg.errors import UserError

Verdict = Literal["step", "skip", "rollback"]
"""Decision on an update: apply it, leave it out, or restore the state before the last one."""

NON_FINITE_BUFFERS = "non-finite gradient buffers"
"""Name of the reported number of gradient buffers with an element that is not finite."""

log = logging.getLogger(__name__)


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
