"""Routing of tokens to experts, and routing replay.

Routing replay (arXiv:2510.11370): where a batch has the experts that the rollout chose, training chooses the same ones,
so that both compute the same function. The weights of these experts still come from the router and get gradients.
`training.routed_experts` describes the column.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import checkpoint, get_cuda_rng_tracker
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from verl_mg.batch import Batch
from verl_mg.choice import Choice
from verl_mg.engines.reports import equal_experts
from verl_mg.errors import UserError
from verl_mg.megatron.balance_losses import BalanceLosses
from verl_mg.megatron.core_version import fused
from verl_mg.megatron.packed_sequences import PackedSequences
from verl_mg.models.hf_config import ExpertsConfig, HFConfig
from verl_mg.training.microbatch import ROUTED_EXPERTS


def check_routed_experts(rows: Batch, config: HFConfig) -> None:
    """Checks shape and values of the column of prescribed experts; a dense model ignores it."""
    if config.experts is None or ROUTED_EXPERTS not in rows:
        return
    given, expected = rows[ROUTED_EXPERTS], (config.layers, config.experts.top_k)
    if tuple(given.shape[1:]) != expected:
        raise UserError(
            f"column {ROUTED_EXPERTS!r}: it has {tuple(given.shape[1:])} entries per token, and the model needs "
            f"{expected} (layers, experts per token). Pass the choices of this model, or leave the column out."
        )
    read = given[:, sorted(config.experts.layers)]
    if read.numel() and int(read.max()) >= config.experts.count:
        raise UserError(
            f"column {ROUTED_EXPERTS!r}: it contains expert {int(read.max())}, and the model has "
            f"{config.experts.count}, counted from 0. Write -1 where the choice is not known."
        )
    if place := equal_experts(given, config.experts):
        token, layer, same = place
        raise UserError(
            f"column {ROUTED_EXPERTS!r}: token {token} has expert {same} more than once in layer {layer}, and routers "
            "choose different ones. Write -1 where the choice is not known."
        )


class Router(TopKRouter):
    """Top-k router with scores in float32, as in `transformers`.

    Qwen3-MoE and Mixtral score by softmax. DeepSeek-V2 (arXiv:2405.04434, section 2.1.2) chooses experts from the
    groups of the highest scores; DeepSeek-V3 (arXiv:2412.19437, section 2.1.2) scores by sigmoid and chooses by scores
    plus `expert_bias`, which does not enter the weights of the experts. That bias is a buffer in float32 without
    gradient: it keeps the checkpoint's values, or `ExpertLoads` updates it. megatron-core's router rounds its scores to
    the dtype of the model before it compares them.
    """

    bias: Any
    given: Tensor | None = None
    """(t, k) prescribed experts of this micro-batch; a row with -1 leaves its token to the router."""
    packed: PackedSequences | None = None  # description of the sequences of this micro-batch
    losses: BalanceLosses | None = None  # auxiliary losses of the model; None without
    load: Tensor | None = None
    """(experts,) int64, tokens that chose each expert in the passes with gradients so far; None: not counted."""

    def __init__(self, *, experts: ExpertsConfig, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._experts = experts
        if experts.router_bias:
            del self.expert_bias  # megatron-core's attribute None, whose name a buffer cannot take
            bias = torch.zeros(experts.count, dtype=torch.float32, device=torch.cuda.current_device())
            self.register_buffer("expert_bias", bias)
        if experts.biases:
            del self.bias  # as `expert_bias`
            logit_bias = torch.empty(experts.count, dtype=self.weight.dtype, device=self.weight.device)
            self.bias = torch.nn.Parameter(logit_bias)
            # A tensor-parallel rank sees only its tokens: megatron-core sums such gradients over the group.
            self.bias.sequence_parallel = self.config.sequence_parallel

    def gating(self, hidden: Tensor) -> Tensor:
        """Computes logits: (t, 1, h) -> (t, 1, experts), in float32 where the model does."""
        # GPU: the router's product of 16-bit matrices has a float32 result.
        # GPU-TEST: tests/megatron/test_fake_cuda.py::test_train_family_on_cuda_has_values_of_transformers
        # GPU-RAN: h200-1
        if hidden.device.type != "cuda" or hidden.dtype is torch.float32 or not self._experts.float32:
            return super().gating(hidden)
        logits = _Logits.apply(hidden.flatten(0, 1), self.weight)
        return logits[:, None]

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Routes tokens to experts, for megatron-core's dispatchers: (t, experts) float32 weights and bool map."""
        weights, chosen = self.choose(logits.flatten(0, 1))
        zeros = weights.new_zeros(len(weights), self._experts.count)
        return zeros.scatter(1, chosen, weights), zeros.bool().scatter(1, chosen, True)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Chooses k experts for each token: (t, experts) logits -> (t, k) float32 weights, (t, k) int64 experts."""
        if self.losses is not None and torch.is_grad_enabled():  # once, as the loads below
            logits = self.losses.attach(logits, self.packed, self._experts)
        with torch.no_grad():
            bias = self.expert_bias if self._experts.router_bias else None
            scores, ratings = _scores(logits, bias, self._experts.sigmoid)
            chosen = self._choose(ratings)
        if self.load is not None and torch.is_grad_enabled():  # a pass that is recomputed counts once, the second time
            assert self.packed is not None and self.packed.occurrences is not None
            # A token that rows share counts once for each of them, as if every row were computed whole.
            counts = self.packed.occurrences[:, None].expand(chosen.shape)
            self.load.scatter_add_(0, chosen.flatten(), counts.flatten())
        # The choice has no gradient; the weights of the chosen experts have one, prescribed ones too.
        weights: Tensor = _Weights.apply(logits, scores, chosen, self._experts)
        return weights, chosen

    def _choose(self, ratings: Tensor) -> Tensor:
        """Chooses k experts for each token by ratings: (t, experts) -> (t, k)."""
        e = self._experts
        if e.groups > 1:
            by_group = ratings.unflatten(-1, (e.groups, -1))
            best = by_group.topk(e.group_score_topk, dim=-1).values
            groups = best.sum(-1).topk(e.topk_groups, dim=-1).indices
            ratings = _of_groups(by_group, groups)
        chosen = ratings.topk(e.top_k, dim=-1).indices
        return chosen if self.given is None else _replayed(self.given, chosen)


class _Weights(torch.autograd.Function):
    """Weights of the chosen experts: their scores, as parts of their sum where the model normalizes."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, scores: Tensor, chosen: Tensor, experts: ExpertsConfig) -> Tensor:
        ctx.save_for_backward(scores, chosen)
        ctx.experts, ctx.dtype = experts, logits.dtype
        return _weights(scores, chosen, experts.normalized, experts.scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        scores, chosen = ctx.saved_tensors
        e = ctx.experts
        of_logits = _gradient_of_logits(grad, scores, chosen, e.sigmoid, e.normalized, e.scale)
        return of_logits.to(ctx.dtype), None, None, None


@fused
def _scores(logits: Tensor, bias: Tensor | None, sigmoid: bool) -> tuple[Tensor, Tensor]:
    """Scores of experts, and the ratings by which they are chosen: (t, experts) float32 each."""
    scores = logits.float().sigmoid() if sigmoid else logits.float().softmax(-1)
    return scores, scores if bias is None else scores + bias


@fused
def _weights(scores: Tensor, chosen: Tensor, normalized: bool, scale: float) -> Tensor:
    weights = scores.gather(1, chosen)
    if normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * scale


@fused
def _gradient_of_logits(
    grad: Tensor, scores: Tensor, chosen: Tensor, sigmoid: bool, normalized: bool, scale: float
) -> Tensor:
    grad = grad * scale
    if normalized:  # weights are s / sum(s)
        parts = scores.gather(1, chosen)
        total = parts.sum(-1, keepdim=True)
        grad = (grad - (grad * parts).sum(-1, keepdim=True) / total) / total
    of_scores = torch.zeros_like(scores).scatter(1, chosen, grad)
    if sigmoid:
        return of_scores * scores * (1 - scores)
    return scores * (of_scores - (of_scores * scores).sum(-1, keepdim=True))


@fused
def _of_groups(by_group: Tensor, groups: Tensor) -> Tensor:
    """Excludes experts of other groups: (t, groups, n) ratings and (t, m) groups -> (t, groups * n)."""
    numbers = torch.arange(by_group.shape[1], device=groups.device)
    admitted = (groups[:, :, None] == numbers).any(1)
    return by_group.masked_fill(~admitted[..., None], -torch.inf).flatten(1)


@fused
def _replayed(given: Tensor, chosen: Tensor) -> Tensor:
    return torch.where((given >= 0).all(-1, keepdim=True), given.long(), chosen)


class _Logits(torch.autograd.Function):
    """Product of hidden states and the router's weight, half precision, in float32: no copies of both in float32."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight = ctx.saved_tensors
        return (grad @ weight.float()).to(hidden.dtype), (grad.T @ hidden.float()).to(weight.dtype)


class IndexRouter(Router):
    """Router for `experts.TokenDispatcher`, which reads the k experts of a token and not a map of all experts."""

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Routes tokens to experts: (t, 1, experts) logits -> (t, k) float32 weights, (t, k) int64 experts."""
        if self.config.moe_token_dispatcher_type != "alltoall":  # one of megatron-core's dispatchers
            return super().routing(logits, padding_mask)
        return self.choose(logits.flatten(0, 1))


class RoutedLayer(TransformerLayer):
    """Transformer layer with experts that passes the prescribed experts to its router, also when it is recomputed."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if self.mlp.moe_layer_recompute:
            # megatron-core would recompute with the experts of the micro-batch whose forward pass came last.
            self.mlp.moe_layer_recompute = False
            self.mlp.forward = partial(self._recomputed, self.mlp.forward)

    def chosen(self) -> Choice:
        """Returns what the experts compute with."""
        experts: Any = self.mlp.experts  # of ours, or of megatron-core over Transformer Engine
        if hasattr(experts, "chosen"):
            choice: Choice = experts.chosen()
            return choice
        permutation = f"{'fused' if self.config.moe_permute_fusion else 'separate'} permutation"
        if hasattr(getattr(experts, "linear_fc1", None), "num_gemms"):
            return Choice("experts", f"Transformer Engine's grouped product, {permutation}")
        slow = "a small product for each expert. Leave megatron.transformer.moe_grouped_gemm out."
        return Choice("experts", f"one after another, {permutation}", slow)

    def forward(self, *arguments: Any, packed_seq_params: PackedSequences, **options: Any) -> tuple[Tensor, Any]:
        """Runs the layer: (t, 1, h) -> ((t, 1, h), None), where t is T / (cp * tp)."""
        # megatron-core's layer passes none of this to its router.
        given = packed_seq_params.experts
        self.mlp.router.given = None if given is None else given.get(self.layer_number - 1)
        self.mlp.router.packed = packed_seq_params
        output: tuple[Tensor, Any] = super().forward(*arguments, packed_seq_params=packed_seq_params, **options)
        self.mlp.token_dispatcher.probs = None  # it would keep the autograd graph of this pass alive
        return output

    def _recomputed(self, forward: Callable[..., Any], hidden: Tensor, *arguments: Any, **options: Any) -> Any:
        """Runs the experts without storing activations; the backward pass computes them again, equally routed."""
        router, config = self.mlp.router, self.config
        given, packed = router.given, router.packed

        def routed(hidden: Tensor) -> Any:
            router.given, router.packed = given, packed
            output = forward(hidden, *arguments, **options)
            self.mlp.token_dispatcher.probs = None
            return output

        if config.fp8 or config.fp4:
            from megatron.core.extensions.transformer_engine import te_checkpoint

            return te_checkpoint(routed, False, get_cuda_rng_tracker, self.pg_collection.tp, hidden)
        return checkpoint(routed, False, hidden)
