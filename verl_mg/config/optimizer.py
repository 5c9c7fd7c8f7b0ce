"""Configuration of the optimizer of a trained role, and its schedule of learning rates."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveInt

from verl_mg.config.section import ConfigSection, refused_values


class OptimizerConfig(ConfigSection):
    """AdamW or Muon, with decoupled weight decay. The schedule counts optimizer steps, not iterations."""

    kind: Literal["adamw", "muon"] = "adamw"
    """Optimizer. muon: orthogonalized momentum for the matrices of layers (arXiv:2502.16982), AdamW for all other
    weights. Its updates are as large as AdamW's, so learning rate and weight decay mean the same. A matrix needs 4
    bytes per weight less."""
    lr: float = Field(1e-6, gt=0)
    """Peak learning rate. The default is usual for reinforcement learning of models with billions of weights."""
    min_lr: float = Field(0.0, ge=0)
    """Learning rate at the end of the decay."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the decay after warm-up."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps in which the learning rate rises linearly from 0."""
    warmup_ratio: float | None = Field(None, gt=0, lt=1)
    """Share of the schedule in which the learning rate rises, instead of `warmup_steps`. The schedule has `decay_steps`
    or, where these are null, the optimizer steps of the whole job, at whose end the decay then ends too."""
    decay_steps: PositiveInt | None = None
    """Optimizer step at which the decay ends. null: no decay, except with `warmup_ratio`."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay per step, as a factor of the learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of Adam's two moments."""
    momentum: float = Field(0.95, ge=0, lt=1)
    """Decay rate of Muon's momentum, which is Nesterov's. adamw does not use it."""
    eps: float = Field(1e-8, gt=0)
    """Term added to Adam's denominator."""
    clip_grad: float = Field(1.0, ge=0)
    """Largest norm of the gradient; a larger one is scaled down. 0: no clipping."""
    cpu_offload: bool = False
    """Keep the moments in host memory and compute the step there: slower, saves 8 bytes per weight on the device."""
    moments_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the moments. bfloat16 halves their memory; they are rounded such that they are right on average."""
    nvme_folder: Path | None = None
    """Folder on a local disk for the moments, with `cpu_offload`, where host memory is too small for them. The space of
    all ranks of a machine is reserved in it, and free again when the job ends. null: host memory."""

    _refused = refused_values(
        momentum=(
            lambda momentum, others: momentum != 0.95 and others.get("kind") == "adamw",
            "it is Muon's, and adamw has betas. Write kind=muon, or leave it out",
        ),
        # Muon's step is matrix products, which are to be computed on the device.
        cpu_offload=(
            lambda on, others: on and others.get("kind") == "muon",
            "muon needs its momentum on the device. Write moments_dtype=bfloat16, or kind=adamw",
        ),
        nvme_folder=(
            lambda folder, others: folder is not None and not others.get("cpu_offload"),
            "requires cpu_offload. Write cpu_offload=true",
        ),
        warmup_ratio=(
            lambda ratio, others: ratio is not None and others.get("warmup_steps"),
            "warmup_steps is given too. Leave one of them out",
        ),
        decay_steps=(
            lambda steps, others: steps is not None and steps <= others.get("warmup_steps", 0),
            "decay ends within the warm-up. Must be larger than warmup_steps",
        ),
    )

    def with_steps(self, total_steps: int) -> OptimizerConfig:
        """Returns the same with the steps of warm-up and decay in place of `warmup_ratio`, if there is one.

        `total_steps`: optimizer steps of the whole job. A ratio of 0.1 of 1,000 steps is `warmup_steps=100`,
        `decay_steps=1000`.
        """
        if self.warmup_ratio is None:
            return self
        steps = self.decay_steps or total_steps
        # A schedule of a few steps has at least one step after its warm-up.
        warmup = min(math.ceil(self.warmup_ratio * steps), steps - 1)
        return self.model_copy(update={"warmup_ratio": None, "warmup_steps": warmup, "decay_steps": steps})
