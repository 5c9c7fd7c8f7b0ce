"""Table of `transformers` 5: the parameters of its modules, which stack the experts of a layer, whole on every rank.

A module that has its experts' matrices as (experts, in, out), as its files do, is described in the order of the
experts' tensors, (experts, out, in): that of gpt-oss.
"""

from __future__ import annotations

from verl_mg.models.hf_config import HFConfig
from verl_mg.models.hf_tensors import EXPERT_NAMES, LAYER
from verl_mg.models.tensor_tree import Experts, LayerSpec, ModelSpec, TensorSpec, tensors_of
from verl_mg.sharding.param_spec import ParamRow, optional_param


def embedding_param(model: ModelSpec) -> ParamRow:
    """Returns the input embedding."""
    return ParamRow(model.embedding.name, (model.embedding,))


def output_params(model: ModelSpec) -> tuple[ParamRow, ...]:
    """Returns the final norm and the output layer; a tied output is the embedding, and not among them."""
    tensors = (model.final_norm,) if model.output is model.embedding else (model.final_norm, model.output)
    return tuple(ParamRow(tensor.name, (tensor,)) for tensor in tensors)


def layer_params(layer: LayerSpec, config: HFConfig) -> tuple[ParamRow, ...]:
    """Returns the parameters of one transformer layer."""
    # `transformers` 5 renames other prefixes of experts, such as `block_sparse_moe.`, to `mlp.` while it loads.
    checkpoint_prefix, *_ = EXPERT_NAMES.get(config.architecture, (LAYER + "mlp.",))
    layer_prefix = config.prefix + "layers.{layer}."

    def single(tensor: TensorSpec) -> ParamRow:
        return ParamRow(tensor.name.replace(checkpoint_prefix, LAYER + "mlp.").removeprefix(layer_prefix), (tensor,))

    params = tuple(single(tensor) for tensor in tensors_of(layer) if not tensor.per_expert)
    if not isinstance(layer.mlp, Experts):
        return params
    each = layer.mlp.each
    order = (0, 2, 1) if each.down.stack and each.down.stack.transposed else ()
    return (
        *params,
        ParamRow("mlp.experts.gate_up_proj", each.gate_up, order=order),
        *optional_param("mlp.experts.gate_up_proj_bias", each.gate_up_bias),
        ParamRow("mlp.experts.down_proj", (each.down,), order=order),
        *optional_param("mlp.experts.down_proj_bias", each.down_bias),
    )
