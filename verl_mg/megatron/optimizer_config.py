"""megatron-core's configurations of gradients and of the optimizer."""

from __future__ import annotations

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig

from verl_mg.config import MegatronConfig, OptimizerConfig
from verl_mg.megatron.config_fields import build_config, given_fields
from verl_mg.megatron.refused_fields import DDP, OPTIMIZER


def ddp_config(megatron: MegatronConfig) -> DistributedDataParallelConfig:
    """Creates the configuration of gradient buffers and their reduction."""
    given = given_fields("ddp", DistributedDataParallelConfig, megatron.ddp, DDP)
    # Gradients of bfloat16 weights are summed in float32 too, over micro-batches and over ranks.
    fields = {"use_distributed_optimizer": True, "grad_reduce_in_fp32": True}
    return build_config("ddp", DistributedDataParallelConfig, fields, given)


def optimizer_config(config: OptimizerConfig, megatron: MegatronConfig, dtype: torch.dtype) -> MegatronOptimizerConfig:
    """Creates the configuration of the optimizer."""
    given = given_fields("optimizer", MegatronOptimizerConfig, megatron.optimizer, OPTIMIZER)
    fields = {
        "optimizer": "adam",
        "lr": config.lr,
        "min_lr": config.min_lr,
        "weight_decay": config.weight_decay,
        "adam_beta1": config.betas[0],
        "adam_beta2": config.betas[1],
        "adam_eps": config.eps,
        "clip_grad": config.clip_grad,
        "use_distributed_optimizer": True,
        "bf16": dtype is torch.bfloat16,
        "params_dtype": dtype,
        "overlap_param_gather": ddp_config(megatron).overlap_param_gather,
    }
    if megatron.transformer.get("fp8"):
        fields["fp8_recipe"] = megatron.transformer.get("fp8_recipe", "delayed")
    return build_config("optimizer", MegatronOptimizerConfig, fields, given)
