"""The tensors of a `transformers` module, to be written in place, under the names of its checkpoint."""

import torch
from torch import nn

# The module stacks its experts, the checkpoint stores one tensor an expert and projection.
CHECKPOINT_PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def live_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Checkpoint name -> tensor sharing the module's memory; a tied tensor once, under its first name."""
    named: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        parent, _, leaf = name.rpartition(".")
        if tensor.dim() == 3 and parent.endswith(".experts") and leaf in CHECKPOINT_PROJECTIONS:
            named.update(_experts(parent, leaf, tensor.detach()))
        else:
            named[name] = tensor.detach()
    return named


def _experts(parent: str, leaf: str, stacked: torch.Tensor) -> dict[str, torch.Tensor]:
    """(out, in) views, one an expert and projection, of stacked (experts, out of all projections, in)."""
    projections = CHECKPOINT_PROJECTIONS[leaf]
    return {
        f"{parent}.{expert}.{projection}.weight": view
        for projection, block in zip(projections, stacked.chunk(len(projections), dim=1), strict=True)
        for expert, view in enumerate(block.unbind(0))
    }
