"""From the last hidden state of a causal language model to its logits: a matrix product, a factor and a softcap."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from verl_mg.errors import UserError, one_line
from verl_mg.models.hf_config import other_choice

SMALL, LARGE = 2.0**-14, 2.0**30
"""Products so small that a softcap does not bend them, and so large that only a softcap is left of them."""
PROBES = (-60.0, -7.0, -0.5, 0.0, 0.25, 3.0, 40.0)
"""Products for which the module's logits are compared with `LogitScale`: near 0, and where a softcap bends them."""
DIGITS = 6  # of a measured scale that rounding leaves right


@dataclass(frozen=True)
class LogitScale:
    """Function of a model from products z of hidden states and output weights to logits: c * tanh(scale * z / c)."""

    scale: float = 1.0  # factor of the products
    softcap: float | None = None  # bound c of the logits; None for none

    def apply(self, products: Tensor) -> Tensor:
        """Returns the logits of products."""
        scaled = self.scale * products
        return scaled if self.softcap is None else self.softcap * torch.tanh(scaled / self.softcap)

    @classmethod
    def measured(cls, logits: Callable[[Tensor], Tensor]) -> LogitScale | None:
        """Returns what a module does with products, found without a name of a field; None for anything else."""
        products = torch.tensor((SMALL, LARGE, *PROBES))
        values = logits(products)
        slope, far = float(values[0]) / SMALL, float(values[1])
        # Of 1/3 and of 1.0 a float32 product leaves seven digits.
        short = round(slope, DIGITS)
        scale = short if abs(short - slope) <= 1e-6 * abs(slope) else slope
        known = cls(scale, None if abs(far) > 0.5 * abs(slope) * LARGE else abs(far))
        return known if torch.allclose(values, known.apply(products), rtol=1e-5, atol=1e-5) else None


def body_of(module: Any) -> Any:
    """Returns the model of `transformers` that computes the hidden states of a causal language model."""
    if module.base_model is not module:
        return module.base_model
    # Its name is not the one that the class says (Llama 4).
    return next((child for child in module.children() if isinstance(child, PreTrainedModel)), module)


def read_logit_scale(model: Any, model_dir: Path) -> LogitScale:
    """Returns the function from products to logits of a causal language model, measured on its code."""
    where, head = model_dir / "config.json", model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise UserError(f"{where}: its output layer has a bias or is no matrix. {other_choice(model_dir)}")
    try:
        scale = LogitScale.measured(lambda products: _module_logits(model, products))
        reason = ""
    except Exception as error:  # of code that was not written for a probe: of any kind
        scale, reason = None, f" ({one_line(error)})"
    if scale is None:
        raise UserError(
            f"{where}: {type(model).__name__} computes logits in a way that is not known{reason}. "
            f"{other_choice(model_dir)}"
        )
    return scale


@torch.no_grad()
def _module_logits(model: Any, products: Tensor) -> Tensor:
    """Returns the logits that the model's `forward` makes of products, with its body and head left out."""
    body, hidden = body_of(model), products[None, :, None]
    # The body returns the products as hidden states, and the head passes them on: the model's scaling is left.
    parts = [body, *(child for child in body.children() if isinstance(child, PreTrainedModel))]
    head, ids = model.get_output_embeddings(), torch.zeros(1, len(products), dtype=torch.int64)
    with _replaced(parts, lambda *_, **__: _Output(hidden)), _replaced([head], lambda states: states):
        logits: Tensor = model(input_ids=ids).logits
    return logits.flatten().float()


@contextmanager
def _replaced(modules: list[nn.Module], forward: Callable[..., Any]) -> Iterator[None]:
    """Gives modules another `forward`; their parameters and fields stay, which the code around them may read."""
    for module in modules:
        vars(module)["forward"] = forward
    try:
        yield
    finally:
        for module in modules:
            del vars(module)["forward"]


class _Output(SimpleNamespace):
    """Output of a body: fields that are not set are None."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__(last_hidden_state=hidden)

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state, *[None] * 4)[index]
