"""Which experts a token goes to, and with what weight.

Routing replay (arXiv:2510.11370): where a batch tells which experts the rollout took, training takes the same ones, so
that both compute the same network. A router's weights of these experts are still its own, and get gradients.

    batch["routed_experts"]     token column, int16, (sum(lengths), layers, k): the k different experts of a token in
                                each layer; -1: not known, the router decides. A layer without experts has entries
                                like any other, which are not read.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from verl_mg.batch import Batch
from verl_mg.errors import UserError
from verl_mg.megatron.attention import PackedSequences
from verl_mg.megatron.process_groups import Cut
from verl_mg.models.hf_config import ExpertsConfig, HFConfig

COLUMN = "routed_experts"


def check_routed_experts(rows: Batch, config: HFConfig) -> None:
    """UserError where the rows have a choice of experts that is not one of this model's; a dense model ignores it."""
    if config.experts is None or COLUMN not in rows:
        return
    given, expected = rows[COLUMN], (config.layers, config.experts.top_k)
    if tuple(given.shape[1:]) != expected:
        raise UserError(
            f"column {COLUMN!r} has {tuple(given.shape[1:])} entries a token, and the model takes {expected} "
            "(layers, experts a token); give it the choices of this model, or leave the column out"
        )
    read = given[:, sorted(config.experts.layers)]
    if read.numel() and int(read.max()) >= config.experts.count:
        raise UserError(
            f"column {COLUMN!r} names expert {int(read.max())}, and the model has {config.experts.count}, from 0; "
            "write -1 where the choice is not known"
        )


def routed_experts(rows: Batch, filler: int, cut: Cut) -> Tensor | None:
    """(T / (cp * tp), layers, k): what the column tells of the tokens that the routers of this rank see.

    `filler`: the tokens behind the rows that make T a multiple of cp * tp.
    """
    if COLUMN not in rows:
        return None
    known = rows[COLUMN]
    given = torch.cat([known, known.new_full((filler, *known.shape[1:]), -1)])
    return given.chunk(cut.context * cut.tp)[cut.context_index * cut.tp + cut.tp_index]


class Router(TopKRouter):
    """The highest of all experts by scores in float32, as `transformers` routes.

    Qwen3-MoE and Mixtral score by softmax. DeepSeek-V2 (arXiv:2405.04434, section 2.1.2) takes experts from the groups
    of the highest scores; DeepSeek-V3 (arXiv:2412.19437, section 2.1.2) scores by sigmoid and chooses by scores plus
    `expert_bias`, which is not in the weights of the experts. That bias is a buffer in float32 without gradient and
    stays as the checkpoint has it. Megatron's own router rounds its scores to the type of the model before it compares
    them, and moves the bias.

    `given`: (t, k), experts to take instead of the highest; -1 in a row leaves its token to the router.
    """

    given: Tensor | None = None

    def __init__(self, *, experts: ExpertsConfig, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._experts = experts
        if experts.router_bias:
            del self.expert_bias  # None
            bias = torch.zeros(experts.count, dtype=torch.float32, device=torch.cuda.current_device())
            self.register_buffer("expert_bias", bias)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(t, 1, experts) -> the weights (t, experts) float32, 0 for experts not taken, and which are taken, bool."""
        logits = logits.flatten(0, 1).float()
        scores = logits.sigmoid() if self._experts.sigmoid else logits.softmax(-1)
        chosen = self._choose(scores.detach())
        if self.given is not None:
            chosen = torch.where((self.given >= 0).all(-1, keepdim=True), self.given.long(), chosen)
        weights = scores.gather(1, chosen)
        if self._experts.normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        nothing = torch.zeros_like(scores)
        weights = weights * self._experts.scale
        return nothing.scatter(1, chosen, weights), nothing.bool().scatter(1, chosen, True)

    def _choose(self, scores: Tensor) -> Tensor:
        """(t, experts) -> the experts of each token (t, k)."""
        e = self._experts
        if e.router_bias:
            scores = scores + self.expert_bias
        if e.groups > 1:
            by_group = scores.unflatten(-1, (e.groups, -1))
            ratings = by_group.topk(e.group_score_topk, dim=-1).values.sum(-1)
            out = torch.ones_like(ratings, dtype=torch.bool)
            out = out.scatter(1, ratings.topk(e.topk_groups, dim=-1).indices, False)
            scores = by_group.masked_fill(out[..., None], -torch.inf).flatten(1)
        return scores.topk(e.top_k, dim=-1).indices


class RoutedLayer(TransformerLayer):
    """A layer with experts, whose router is given the choices of this micro-batch, again when it is recomputed."""

    def forward(self, *arguments: Any, packed_seq_params: PackedSequences, **options: Any) -> tuple[Tensor, Any]:
        """Hidden states (t, 1, h) -> the same, and None. t is T / (cp * tp)."""
        given = packed_seq_params.experts
        self.mlp.router.given = None if given is None else given[:, self.layer_number - 1]
        output: tuple[Tensor, Any] = super().forward(*arguments, packed_seq_params=packed_seq_params, **options)
        self.mlp.token_dispatcher.probs = None  # it would keep the graph of this pass
        return output
