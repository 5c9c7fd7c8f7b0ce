"""A mixture of experts in plain torch with given experts, inside the model of `transformers`."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM


class GivenExperts(torch.nn.Module):
    """The feed-forward of Qwen3-MoE; tokens come in the order of `given` (tokens, k), pass after pass."""

    def __init__(self, block: torch.nn.Module, given: Tensor) -> None:
        super().__init__()
        self.gate, self.experts = block.gate, block.experts
        self.given, self.at = given, 0
        self.taken: list[Tensor] = []

    def forward(self, hidden: Tensor) -> Tensor:
        """(1, tokens, h) -> the same."""
        x, end = hidden[0], self.at + hidden.shape[1]
        given, self.at = self.given[self.at : end], end % len(self.given)
        scores = F.softmax(x @ self.gate.weight.T, dim=-1)
        own = scores.topk(given.shape[1], dim=-1).indices
        taken = torch.stack([g.long() if min(g) >= 0 else o for g, o in zip(given, own, strict=True)])
        self.taken.append(taken)
        weights = torch.stack([scores[range(len(x)), slot] for slot in taken.T], dim=1)
        weights = weights / weights.sum(1, keepdim=True)
        output = torch.zeros_like(x)
        for expert in range(scores.shape[1]):
            gate, up = (x @ self.experts.gate_up_proj[expert].T).chunk(2, dim=1)
            weight = (weights * (taken == expert)).sum(1, keepdim=True)
            output = output + weight * ((F.silu(gate) * up) @ self.experts.down_proj[expert].T)
        return output[None]


def with_experts(model: Path, given: Tensor) -> torch.nn.Module:
    """The model, every mixture of which takes the experts of its layer in `given` (tokens, layers, k)."""
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    for number, layer in enumerate(net.model.layers):
        if hasattr(layer.mlp, "experts"):
            layer.mlp = GivenExperts(layer.mlp, given[:, number])
    return net
