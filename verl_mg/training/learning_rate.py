"""Learning rate and weight decay of each optimizer step."""

from __future__ import annotations

import math
from typing import Any

from verl_mg.config import OptimizerConfig
from verl_mg.errors import UserError


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
