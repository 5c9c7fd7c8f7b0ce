"""Configuration of megatron-core by its field names."""

from __future__ import annotations

from typing import Any

from verl_mg.config.section import ConfigSection


class MegatronConfig(ConfigSection):
    """Fields of megatron-core's configurations by their own names, for what no other key sets.

    They are checked against the installed version. A field that another key sets, or that would change what a recipe
    computes, is an error that names the reason.
    """

    transformer: dict[str, Any] = {}
    """Fields of TransformerConfig for every model of the job, such as {fp8: hybrid, fp8_recipe: blockwise}. Updates
    change the biases of DeepSeek-V3's routers by moe_router_bias_update_rate, which is 0 unless it is set: 0.001 as in
    its pre-training balances the loads of experts. mtp_loss_scaling_factor trains the actor's layer of multi-token
    prediction, and with mtp_detach_heads nothing but the layer. moe_aux_loss_coeff and moe_z_loss_coeff are factors of
    losses for the balance of experts within each row, and for small logits of routers."""
    optimizer: dict[str, Any] = {}
    """Fields of OptimizerConfig for every trained model."""
    # Off by default there: overlap_grad_reduce and overlap_param_gather sum gradients into the norm in another order,
    # which changes the last bits of a run, and gain only where a step has few micro-batches.
    ddp: dict[str, Any] = {}
    """Fields of DistributedDataParallelConfig for every trained model, such as {overlap_grad_reduce: true}."""
