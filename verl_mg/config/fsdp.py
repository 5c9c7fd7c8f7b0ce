"""Configuration of the FSDP backend."""

from __future__ import annotations

from pydantic import PositiveInt

from verl_mg.config.section import ConfigSection


class FsdpConfig(ConfigSection):
    """Options of the roles with `backend: fsdp`."""

    replicas: PositiveInt = 1
    """Copies of the model, each sharded over its part of the ranks (HSDP): with as many as there are nodes, weights are
    gathered within a node. Must divide the data-parallel size."""
    reshard_after_forward: bool = True
    """Free the gathered weights of a layer after its forward pass and gather them again in the backward pass. false:
    more memory, less communication."""
    freeze_vision_tower: bool = False
    """Do not train the vision tower of vision-language models, nor what connects it with the language model."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in host memory, where the optimizer step is computed as well."""
