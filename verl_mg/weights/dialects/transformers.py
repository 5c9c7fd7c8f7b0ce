"""The dialect of `transformers` 5: its modules, which stack the experts of a layer, whole on every rank."""

from __future__ import annotations

from verl_mg.weights.anatomy import MIXTURE_NAMES, Block, Experts, HFTensor, Model, tensors_of
from verl_mg.weights.dialects.weight import Weight
from verl_mg.weights.model_config import HFConfig

LAYER = "model.layers.{layer}."


def embedding(model: Model) -> Weight:
    """The input embedding."""
    return Weight(model.embedding.name, (model.embedding,))


def head(model: Model) -> tuple[Weight, ...]:
    """What stands behind the layers; a tied output is the embedding, written once."""
    once = (model.final_norm,) if model.output is model.embedding else (model.final_norm, model.output)
    return tuple(Weight(tensor.name, (tensor,)) for tensor in once)


def block(b: Block, c: HFConfig) -> tuple[Weight, ...]:
    """The parameters of one layer."""
    mixture, *_ = MIXTURE_NAMES.get(c.architecture, (LAYER + "mlp.",))

    def single(tensor: HFTensor) -> Weight:
        return Weight(tensor.name.replace(mixture, LAYER + "mlp.").removeprefix(LAYER), (tensor,))

    weights = tuple(single(tensor) for tensor in tensors_of(b) if not tensor.per_expert)
    if not isinstance(b.mlp, Experts):
        return weights
    each = b.mlp.each
    stacked = (
        Weight("mlp.experts.gate_up_proj", (each.gate, each.up)),
        Weight("mlp.experts.down_proj", (each.down,)),
    )
    return weights + stacked
