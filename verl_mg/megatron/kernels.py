"""Choice between the kernels of Transformer Engine and of torch."""

from __future__ import annotations

from typing import Literal

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE

from verl_mg.errors import UserError
from verl_mg.models.hf_config import HFConfig
from verl_mg.sharding.megatron import Kernels


def resolve_kernels(setting: Literal["auto", Kernels], dtype: torch.dtype, model: HFConfig | None = None) -> Kernels:
    """Returns the kernels of a model."""
    # With `auto` they are Transformer Engine's for bfloat16 on GPUs where it is installed. It multiplies float32
    # matrices in TensorFloat-32, which has 10 bits of precision: models in float32 use torch's kernels unless it is
    # requested.
    if setting == "torch":
        return "torch"
    problem = _problem(model)
    if setting == "auto":
        return "torch" if problem or dtype is torch.float32 else "transformer_engine"
    if problem:
        raise UserError(f"model.kernels: {problem}")
    return "transformer_engine"


def _problem(model: HFConfig | None) -> str | None:
    """Returns why Transformer Engine cannot be used, with the remedy; None where it can."""
    if model and model.attention_sinks:
        return (
            f"the modules of Transformer Engine have no attention sinks and no biases of experts here, which "
            f"{model.architecture} needs. Set model.kernels=auto or torch."
        )
    if model and model.indexer:
        return (
            f"the modules of Transformer Engine have no sparse attention here, which {model.architecture} needs. Set "
            "model.kernels=auto or torch."
        )
    if not torch.cuda.is_available():
        return "Transformer Engine needs a GPU, and torch finds none here. Set model.kernels=auto or torch."
    if not HAVE_TE:
        return (
            "Transformer Engine cannot be imported. Install launch/requirements-gpu.txt, see docs/install_on_gpus.md, "
            "or set model.kernels=torch."
        )
    return None
