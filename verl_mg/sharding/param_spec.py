"""A line of a dialect: one parameter of a framework, its tensors, its rule and what cuts it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from verl_mg.models.hf_tensors import TensorSpec
from verl_mg.sharding.shard_rules import Rule, whole

Axis = Literal["whole", "tensor", "attention", "vocabulary", "expert"]
"""Which parallel axis cuts a parameter: none, tensor, attention's own tensor axis, the vocabulary's, the experts'."""


@dataclass(frozen=True, eq=False)
class ParamSpec:
    """One parameter of a dialect and the Hugging Face tensors in it.

    With tensors of experts, a name with `{expert}` stands for a parameter of each local expert; a name without
    it for one parameter that stacks all local experts along a new first dimension.
    """

    name: str
    sources: tuple[TensorSpec, ...]
    rule: Rule = whole
    axis: Axis = "whole"

    @property
    def per_expert(self) -> bool:
        """Whether the tensors are those of experts."""
        return self.sources[0].per_expert

    @property
    def stacked(self) -> bool:
        """Whether it stacks all local experts."""
        return self.per_expert and "{expert}" not in self.name


@dataclass(frozen=True)
class ParamBlock:
    """Weights under a common prefix: those of layer number `layer`, or of no layer."""

    prefix: str
    weights: tuple[ParamSpec, ...]
    layer: int | None = None
