"""Table of `transformers` 5: the parameters of its modules, which stack the experts of a layer, whole on every rank."""

from __future__ import annotations

from verl_mg.models.hf_config import HFConfig
from verl_mg.models.hf_tensors import EXPERT_NAMES, Experts, LayerSpec, ModelSpec, TensorSpec, tensors_of
from verl_mg.sharding.param_spec import ParamSpec

LAYER = "model.layers.{layer}."


def embedding_param(model: ModelSpec) -> ParamSpec:
    """Returns the input embedding."""
    return ParamSpec(model.embedding.name, (model.embedding,))


def output_params(model: ModelSpec) -> tuple[ParamSpec, ...]:
    """Returns the final norm and the output layer; a tied output is the embedding, and not among them."""
    tensors = (model.final_norm,) if model.output is model.embedding else (model.final_norm, model.output)
    return tuple(ParamSpec(tensor.name, (tensor,)) for tensor in tensors)


def layer_params(layer: LayerSpec, config: HFConfig) -> tuple[ParamSpec, ...]:
    """Returns the parameters of one transformer layer.

    Args:
        layer: the Hugging Face tensors of the layer.
        config: configuration of the model.
    """
    checkpoint_prefix, *_ = EXPERT_NAMES.get(config.architecture, (LAYER + "mlp.",))

    def single(tensor: TensorSpec) -> ParamSpec:
        return ParamSpec(tensor.name.replace(checkpoint_prefix, LAYER + "mlp.").removeprefix(LAYER), (tensor,))

    params = tuple(single(tensor) for tensor in tensors_of(layer) if not tensor.per_expert)
    if not isinstance(layer.mlp, Experts):
        return params
    each = layer.mlp.each
    stacked = (
        ParamSpec("mlp.experts.gate_up_proj", (each.gate, each.up)),
        ParamSpec("mlp.experts.down_proj", (each.down,)),
    )
    return params + stacked
