"""Everything that a role's model is built from, made once for a role and handed to its runner whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from verl_mg.config import FsdpConfig, LoraConfig, MegatronConfig, Recompute
from verl_mg.sharding.megatron import Kernels
from verl_mg.sharding.model_table import Head


@dataclass(frozen=True)
class ModelSpec:
    """Model of a role: a new option of models is a field here, and the place that uses it."""

    path: Path  # Hugging Face directory
    dtype: torch.dtype  # type in which the model computes, and in which its weights are sent and exported
    head: Head = "language"
    hidden_offset: int = 1
    """Offset from a token to the hidden state that scores it: 1 for language-model heads, 0 for reward heads."""
    keeps_multi_token: bool = False
    """Load the layer of multi-token prediction, which engines and exports need; modules of `transformers` have none."""
    trained: bool = True  # the weights, or adapters to them, are trained
    from_checkpoint: bool = False
    """Leave what is trained uninitialized, for a checkpoint that is restored before the first pass."""
    # A job gives its own; a model that is loaded only to be read, as by tools, has rows of the usual length.
    longest_row: int = 1024  # tokens of the longest row, up to which the family's module is checked
    replays_routing: bool = False
    """Batches have the experts that the rollout chose: a family's module is checked for their replay."""
    recompute: Recompute = False
    lora: LoraConfig | None = None
    kernels: Kernels = "torch"
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
