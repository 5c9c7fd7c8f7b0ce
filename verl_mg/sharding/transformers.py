"""The dialect of `transformers` 5: its modules, which stack the experts of a layer, whole on every rank."""

from __future__ import annotations

from verl_mg.models.hf_config import HFConfig
from verl_mg.models.hf_tensors import MIXTURE_NAMES, Experts, LayerSpec, ModelSpec, TensorSpec, tensors_of
from verl_mg.sharding.param_spec import ParamSpec

LAYER = "model.layers.{layer}."


def embedding(model: ModelSpec) -> ParamSpec:
    """The input embedding."""
    return ParamSpec(model.embedding.name, (model.embedding,))


def head(model: ModelSpec) -> tuple[ParamSpec, ...]:
    """What stands behind the layers; a tied output is the embedding, written once."""
    once = (model.final_norm,) if model.output is model.embedding else (model.final_norm, model.output)
    return tuple(ParamSpec(tensor.name, (tensor,)) for tensor in once)


def block(b: LayerSpec, c: HFConfig) -> tuple[ParamSpec, ...]:
    """The parameters of one layer."""
    mixture, *_ = MIXTURE_NAMES.get(c.architecture, (LAYER + "mlp.",))

    def single(tensor: TensorSpec) -> ParamSpec:
        return ParamSpec(tensor.name.replace(mixture, LAYER + "mlp.").removeprefix(LAYER), (tensor,))

    weights = tuple(single(tensor) for tensor in tensors_of(b) if not tensor.per_expert)
    if not isinstance(b.mlp, Experts):
        return weights
    each = b.mlp.each
    stacked = (
        ParamSpec("mlp.experts.gate_up_proj", (each.gate, each.up)),
        ParamSpec("mlp.experts.down_proj", (each.down,)),
    )
    return weights + stacked
