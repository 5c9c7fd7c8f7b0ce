"""From the last hidden state of a causal language model to its logits: a matrix product, a factor and a softcap."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from verl_mg.errors import UserError

SCALES = (("logit_scale", 1), ("logits_scaling", -1))
"""Fields of configurations that multiply logits, with the sign of their exponent (Cohere, Granite)."""
PROBES = (-60.0, -7.0, -0.5, 0.0, 0.25, 3.0, 40.0)
"""Products for which the module's own logits are compared with `LogitScale`: near 0, and where a softcap bends them."""


@dataclass(frozen=True)
class LogitScale:
    """Function of a model from products z of hidden states and output weights to logits: c * tanh(scale * z / c)."""

    scale: float = 1.0  # factor of the products
    softcap: float | None = None  # bound c of the logits; None for none

    def apply(self, products: Tensor) -> Tensor:
        """Returns the logits of products."""
        scaled = self.scale * products
        return scaled if self.softcap is None else self.softcap * torch.tanh(scaled / self.softcap)


def read_logit_scale(model: Any, where: str) -> LogitScale:
    """Returns the function from products to logits of a causal language model, compared with its own code."""
    # A model that scales its logits in a way that no field names would get wrong log-probs without any other sign.
    config, head = model.config.get_text_config(), model.get_output_embeddings()
    if head is None or getattr(head, "bias", None) is not None:
        raise UserError(f"{where}: its output layer has a bias or none. Use backend: megatron, or another model.")
    factor = 1.0
    for name, exponent in SCALES:
        if getattr(config, name, None):
            factor *= float(getattr(config, name)) ** exponent
    cap = getattr(config, "final_logit_softcapping", None)
    known = LogitScale(factor, float(cap) if cap else None)
    products = torch.tensor(PROBES)
    if not torch.allclose(_module_logits(model, products), known.apply(products), rtol=1e-5, atol=1e-5):
        raise UserError(
            f"{where}: {type(model).__name__} computes logits in a way that is not known. Use backend: megatron, or "
            "another model."
        )
    return known


def _module_logits(model: Any, products: Tensor) -> Tensor:
    """Returns the logits that the model's own `forward` makes of products, with its body and head left out."""
    output = model.get_output_embeddings()
    body, head = model.base_model_prefix, next(n for n, child in model.named_children() if child is output)
    kept = {name: model._modules[name] for name in (body, head)}
    try:
        # The body returns the products as hidden states, and the head passes them on: the model's scaling is left.
        model._modules |= {body: _Returns(products[None, :, None]), head: nn.Identity()}
        logits: Tensor = model(input_ids=torch.zeros(1, len(products), dtype=torch.int64)).logits
    finally:
        model._modules |= kept
    return logits.detach().flatten().float()


class _Returns(nn.Module):
    """Body of a model that returns given hidden states."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self._hidden = hidden

    def forward(self, *_: Any, **__: Any) -> Any:
        return _Output(last_hidden_state=self._hidden)


class _Output(SimpleNamespace):
    """Output of a body: fields that are not set are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: int) -> Any:
        return self.last_hidden_state if index == 0 else None
