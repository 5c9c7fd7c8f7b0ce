"""Whether a step is taken: decided from what all ranks saw, so that all decide alike."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Literal

from verl_mg.config import GuardConfig
from verl_mg.errors import UserError

Verdict = Literal["step", "skip", "rollback"]

BROKEN = "broken gradients"
"""How many gradient buffers hold something that is not finite."""

log = logging.getLogger(__name__)


class UpdateGuard:
    """The rules of `GuardConfig`. Metrics: `skipped` and, where it can happen, `rolled_back`, 1 where it did.

    name: of the role, for messages. tells: whether this is the rank that writes them.
    """

    def __init__(self, config: GuardConfig, name: str, tells: bool = True) -> None:
        self._config, self._name, self._tells = config, name, tells
        self.bad_in_a_row = 0

    @property
    def rolls_back(self) -> bool:
        """Whether a rollback is among the verdicts."""
        return self._config.max_kl is not None and self._config.action == "rollback"

    def judge(self, told: Mapping[str, float]) -> tuple[Verdict, dict[str, float]]:
        """From the sums over all ranks: `loss`, `approx_kl` where the loss has it, and BROKEN.

        UserError after too many steps in a row that were not finite, or where a limit is set to what is not measured.
        """
        verdict: Verdict = "step"
        if told[BROKEN] or not math.isfinite(told["loss"]):
            verdict = "skip"
            self._count_bad(told["loss"])
        else:
            self.bad_in_a_row = 0
            if self._too_far(told):
                verdict = self._config.action
                what = "step left out" if verdict == "skip" else "weights and learning rate rolled back"
                self._tell(f"approx_kl {told['approx_kl']:.3g} is above guard.max_kl={self._config.max_kl}: {what}")
        seen = {"skipped": float(verdict != "step")}
        return verdict, seen | ({"rolled_back": float(verdict == "rollback")} if self.rolls_back else {})

    def _count_bad(self, loss: float) -> None:
        self.bad_in_a_row += 1
        what = "gradient is" if math.isfinite(loss) else "loss is"
        self._tell(f"{what} not finite: step left out ({self.bad_in_a_row} in a row)")
        if self.bad_in_a_row == self._config.bad_steps:
            raise UserError(
                f"{self._name}: loss or gradient not finite in {self.bad_in_a_row} steps in a row; lower "
                f"{self._name}.optimizer.lr, or look for the samples that cause it"
            )

    def _too_far(self, told: Mapping[str, float]) -> bool:
        if self._config.max_kl is None:
            return False
        if "approx_kl" not in told:
            raise UserError(f"{self._name}.guard.max_kl: the recipe's loss measures no approx_kl; leave it out")
        return told["approx_kl"] > self._config.max_kl

    def _tell(self, what: str) -> None:
        if self._tells:
            log.warning("%s: %s", self._name, what)
