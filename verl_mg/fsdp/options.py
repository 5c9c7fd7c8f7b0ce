"""Checks of a role that the backend is to train, without its module."""

from __future__ import annotations

from verl_mg.config import OptimizerConfig, TrainableConfig
from verl_mg.errors import UserError


def check_trainable(role: TrainableConfig, name: str) -> None:
    """Checks that the backend can train a role as it is configured."""
    check_optimizer(role.optimizer, name)
    if isinstance(role.recompute, list):
        raise UserError(f"{name}.recompute: no parts of layers with backend: fsdp. Write true or false.")


def check_optimizer(config: OptimizerConfig, name: str) -> None:
    """Checks that the backend has the optimizer of a configuration."""
    for key, given, value in (
        ("kind", config.kind, "adamw"),
        ("moments_dtype", config.moments_dtype, "float32"),
        ("cpu_offload", config.cpu_offload, False),
    ):
        if given != value:
            hint = (
                " Write fsdp.cpu_offload=true, which keeps the weights in host memory too."
                if key == "cpu_offload"
                else ""
            )
            raise UserError(f"{name}.optimizer.{key}: {given} is not possible with backend: fsdp. Write {value}.{hint}")
