"""Mixtures with given experts: in plain torch, or behind the routers of `transformers`."""

import copy
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.helpers.tiny_models import oracle


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


class ForcedChoices:
    """Put behind a router of DeepSeek in `transformers`: another choice of experts, with the weights they then have."""

    def __init__(self, given: Tensor) -> None:
        self.given, self.at = given, 0

    def __call__(self, gate: Any, _: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        logits, _, own = output
        given, self.at = self.given[self.at :][: len(own)], (self.at + len(own)) % len(self.given)
        taken = torch.where((given >= 0).all(1, keepdim=True), given.long(), own)
        if not hasattr(gate, "routed_scaling_factor"):  # gpt-oss
            return logits, logits.gather(1, taken).softmax(-1), taken
        biased = hasattr(gate, "e_score_correction_bias")
        weights = (logits.sigmoid() if biased else logits.softmax(-1)).gather(1, taken)
        if biased and gate.norm_topk_prob:
            weights = weights / weights.sum(1, keepdim=True)
        return logits, weights * gate.routed_scaling_factor, taken


def net_with_choices(model: Path, given: Tensor) -> torch.nn.Module:
    """The model of `transformers`, whose routers give the experts of their layers in `given` (tokens, layers, k)."""
    net = copy.deepcopy(oracle(model))
    for number, layer in enumerate(net.model.layers):
        router = getattr(layer.mlp, "gate", getattr(layer.mlp, "router", None))
        if router is not None:
            router.register_forward_hook(ForcedChoices(given[:, number]))
    return net
