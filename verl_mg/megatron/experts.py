"""Layer of experts with torch's kernels: tokens are sorted by expert, and all experts of a rank are one product.

megatron-core's own local modules multiply one expert after the other and sort a (tokens, experts) map of the routing.
Here a token is represented by the indices of its k experts, and nothing waits for the device with ep1-etp1; otherwise
the host waits once for each pass over a layer, for the sizes of the all-to-all.

Biases of experts, and the clamped activation between their two products, are as gpt-oss has them:

    gate_up = x W1 + b1      rows of W1 and b1 alternate between gate and up
    y       = p (a W2 + b2)  = (p a) W2 + p b2, where a is the activation and p the weight of the expert

The factor p is applied to a and to b2, so that the second product needs no copy of its result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    all_to_all,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from verl_mg.choice import Choice
from verl_mg.device import copy_to
from verl_mg.megatron.core_version import fused
from verl_mg.megatron.layers import gated
from verl_mg.models.hf_config import ExpertsConfig
from verl_mg.training.weight_gradients import added_to_buffer, gradient_buffer, wgrad_gemm_accum_fp32


class ExpertsLayer(MoELayer):
    """megatron-core's layer of experts with `TokenDispatcher` in place of its all-to-all dispatcher."""

    token_dispatcher: Any

    def __init__(self, config: TransformerConfig, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        # megatron-core builds one with its process groups, which ours uses.
        replaced = self.token_dispatcher
        if config.moe_token_dispatcher_type == "alltoall":
            self.token_dispatcher = TokenDispatcher(
                config, replaced.tp_ep_group, ep=replaced.ep_group, etp=replaced.tp_group
            )
            if self.use_shared_expert and self.shared_expert_overlap:
                self.token_dispatcher.set_shared_experts(self.shared_experts)


@dataclass(frozen=True)
class Ends:
    """Ends of the experts' tokens, which are sorted by expert."""

    places: Tensor  # (experts,) int32


@dataclass(frozen=True)
class _Copies:
    """Copies of tokens, sorted by a key: copy i is of token source[i].

    Two tokens with the experts (1, 0) and (0, 2) have the copies 1 0 0 2, before they are sorted by expert:

        order   1 2 0 3        source   0 1 0 1        places   2 0 1 3        each   2
    """

    source: Tensor  # (copies,) int64
    places: Tensor  # (copies,) int64, inverse of `order`
    # (copies,) int64, the place of each copy before it was sorted: token t had the places from t * each on.
    order: Tensor
    each: int

    @classmethod
    def sorted_by(cls, keys: Tensor) -> tuple[_Copies, Tensor]:
        """Sorts copies by keys (tokens, each), stably; returns the sorted keys too."""
        by_key, order = keys.flatten().sort(stable=True)
        return cls(*_sources(order, keys.shape[1]), order, keys.shape[1]), by_key

    def take(self, tokens: Tensor) -> Tensor:
        """Copies tokens (tokens, h) to (copies, h); the backward pass sums the copies in a fixed order."""
        return _Take.apply(tokens, self)

    def total(self, copies: Tensor) -> Tensor:
        """Sums the copies (copies, h) of each token to (tokens, h)."""
        return _Total.apply(copies, self)

    def sums(self, copies: Tensor) -> Tensor:
        """Sums without autograd, see `total`."""
        if self.each == 1:
            return copies.index_select(0, self.places)
        # Gathers and adds in one kernel, in a fixed order, which an addition at indices does not have on GPUs.
        return F.embedding_bag(self.places.view(-1, self.each), copies, mode="sum")


@fused
def _sources(order: Tensor, each: int) -> tuple[Tensor, Tensor]:
    """`_Copies.source` and `_Copies.places` of an order."""
    numbers = torch.arange(len(order), device=order.device)
    return order // each, torch.zeros_like(order).scatter(0, order, numbers)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, copies: _Copies) -> Tensor:
        ctx.copies = copies
        return tokens.index_select(0, copies.source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.copies.sums(grad.contiguous()), None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, copies: _Copies) -> Tensor:
        ctx.copies = copies
        return copies.sums(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.copies.source), None


class TokenDispatcher(MoETokenDispatcher):
    """Sends each token to the ranks of its experts and sums what they return.

    Called by megatron-core's layer of experts, in this order: t tokens of this rank, k experts of each, n tokens that
    this rank's experts process.

        dispatch_preprocess     (t, 1, h), experts (t, k)   ->  t * k copies, sorted by expert
        token_dispatch          all-to-all over ep          ->  copies for this rank's experts, by sending rank
        dispatch_postprocess    all-gather over etp, sort   ->  (n, h), sorted by expert
        combine_preprocess, token_combine, combine_postprocess      the same backwards
    """

    def __init__(
        self,
        config: TransformerConfig,
        tp_ep_group: dist.ProcessGroup,
        ep: dist.ProcessGroup,
        etp: dist.ProcessGroup,
    ) -> None:
        self.config, self.shared_experts, self.use_nccl_stream = config, None, False
        self._sent: list[int] = []
        self._received: list[int] = []
        self._of_etp: list[int] = []
        self._all, self._ep, self._etp = tp_ep_group, ep, etp
        self._experts = torch.arange(config.num_moe_experts, dtype=torch.int16, device=torch.cuda.current_device())
        self._local = config.num_moe_experts // ep.size()

    def dispatch_preprocess(self, tokens: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Sorts copies of tokens (t, 1, h) by their experts (t, k) to (t * k, h), and their weights to (t * k,)."""
        self._shape = tokens.shape
        self._copies, by_expert = _Copies.sorted_by(routing_map.short())  # short keys are sorted in fewer passes
        self._ends = torch.searchsorted(by_expert, self._experts, right=True, out_int32=True)
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(tokens)
        weights = probs.flatten().index_select(0, self._copies.order)
        return self._copies.take(tokens.flatten(0, -2)), weights

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Sends copies and weights to the ranks of their experts."""
        if self._all.size() > 1:
            self._exchange_sizes()
        if self.shared_experts is not None:
            self.shared_experts.wait_current_stream()
        received = self._over_ep(hidden_states, self._received, self._sent)
        if self.shared_experts is not None:
            self.shared_experts.linear_fc1_forward_and_act(received)
        # Weights travel separately: they are float32, and states have the dtype of the model.
        return received, self._over_ep(probs, self._received, self._sent)

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor | Ends, Tensor]:
        """Gathers the copies of all etp ranks, sorted by expert: (n, h), their counts or ends, and weights (n,)."""
        if self._etp.size() > 1:
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, group=self._etp, output_split_sizes=self._of_etp
            )
            probs = gather_from_sequence_parallel_region(probs, group=self._etp, output_split_sizes=self._of_etp)
        if self._all.size() == 1:
            return hidden_states, Ends(self._ends), probs
        self._by_expert, _ = _Copies.sorted_by(self._expert_of_received[:, None])
        return self._by_expert.take(hidden_states), self._counts, probs.index_select(0, self._by_expert.order)

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Restores the order in which the copies arrived, and sums the parts of all etp ranks."""
        if self._all.size() > 1:
            hidden_states = self._by_expert.total(hidden_states)
        if self._etp.size() > 1:
            hidden_states = reduce_scatter_to_sequence_parallel_region(
                hidden_states, group=self._etp, input_split_sizes=self._of_etp
            )
        return hidden_states

    def token_combine(self, hidden_states: Tensor, *_: Any) -> Tensor:
        """Sends the results to the ranks of the tokens."""
        if self.shared_experts is not None:
            self.shared_experts.wait_current_stream()
        returned = self._over_ep(hidden_states, self._sent, self._received)
        if self.shared_experts is not None:
            self.shared_experts.linear_fc2_forward(returned)
            self.shared_experts.post_forward_comm()
        return returned

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Sums the results of each token's experts, to (t, 1, h)."""
        output = self._copies.total(hidden_states).view(self._shape)
        return output if self.shared_experts is None else output + self.shared_experts.get_output()

    def _over_ep(self, values: Tensor, received: list[int], sent: list[int]) -> Tensor:
        if self._ep.size() == 1:
            return values
        return all_to_all(self._ep, values, received, sent, use_nccl_stream=self.use_nccl_stream)

    def _exchange_sizes(self) -> None:
        """Computes from the number of copies for each expert on each rank what is sent, received and sorted."""
        sent = torch.diff(self._ends, prepend=self._ends.new_zeros(1))
        parts = [torch.empty_like(sent) for _ in range(self._all.size())]
        dist.all_gather(parts, sent, group=self._all)
        ep, etp = self._ep.size(), self._etp.size()
        counts = torch.stack(parts).view(ep, etp, ep, self._local)  # [from ep rank, etp rank, to ep rank, expert]
        # The one wait of a pass: sizes of an all-to-all must be known on the host.
        on_host = counts.cpu()
        local, rank = self._ep.rank(), self._etp.rank()
        self._sent = on_host[local, rank].sum(-1).tolist()
        self._received = on_host[:, rank, local].sum(-1).tolist()
        self._of_etp = on_host[:, :, local].sum((0, 2)).tolist()
        segments = on_host[:, :, local].transpose(0, 1)  # [etp rank, from ep rank, expert], as copies arrive
        experts = torch.arange(self._local, dtype=torch.int16).expand_as(segments)
        expert_of_received = torch.repeat_interleave(experts.flatten(), segments.flatten())
        self._expert_of_received = copy_to(counts.device, expert_of_received)
        self._counts = counts[:, :, local].sum((0, 1))


class GroupedExperts(MegatronModule):
    """All experts of a rank: two stacks of weights, each multiplied in one grouped product."""

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        *_: Any,
        pg_collection: Any,
        experts: ExpertsConfig,
        **__: Any,
    ) -> None:
        super().__init__(config=config)
        etp: dist.ProcessGroup = pg_collection.expt_tp
        width, biases = config.moe_ffn_hidden_size // etp.size(), experts.biases
        shape = (num_local_experts, 2 * width, config.hidden_size)
        self.linear_fc1 = _Stack(shape, 1, config, biases, parts=1 if experts.alternating else 2)
        self.linear_fc2 = _Stack((num_local_experts, config.hidden_size, width), 2, config, biases)
        self._adds_bias = etp.rank() == 0  # to the sum of the results of all etp ranks
        self._gelu, self._clamped = config.activation_func is not F.silu, experts.clamped
        selective = config.recompute_granularity == "selective"
        self._recompute_activation = selective and "moe_act" in config.recompute_modules

    def chosen(self) -> Choice:
        """Returns what the experts compute with."""
        weights = [stack.weight for stack in (self.linear_fc1, self.linear_fc2)]
        if all(_aligned(weight.new_empty(1, weight.shape[2]), weight.mT) for weight in weights):
            return Choice("experts", "torch's grouped product")
        slow = "widths are no multiples of 16 bytes. Choose an etp whose parts of an expert are."
        return Choice("experts", "one after another", slow)

    def forward(self, tokens: Tensor, counts: Tensor | Ends, weights: Tensor) -> tuple[Tensor, None]:
        """Applies each expert to its tokens (n, h), sorted by expert, times the float32 weights (n,)."""
        ends = counts.places if isinstance(counts, Ends) else counts.to(tokens.device).cumsum(0, dtype=torch.int32)
        hidden = self.linear_fc1(tokens, ends)
        if self.linear_fc1.bias is not None:
            hidden = add_bias(hidden, self.linear_fc1.bias, ends)
        if self._recompute_activation:
            checkpoint = CheckpointWithoutOutput()
            output = self.linear_fc2(checkpoint.checkpoint(self._activated, hidden, weights), ends)
            checkpoint.discard_output_and_register_recompute(output)
        else:
            output = self.linear_fc2(self._activated(hidden, weights), ends)
        if self.linear_fc2.bias is not None:
            output = add_bias(output, self.linear_fc2.bias, ends, weights, self._adds_bias)
        return output, None

    def _activated(self, hidden: Tensor, weights: Tensor) -> Tensor:
        """Activates (n, 2 f) to (n, f), times the weights (n,)."""
        if self._clamped:
            return _ClampedSwiGLU.apply(hidden, weights, self._clamped.alpha, self._clamped.limit)
        return gated(hidden, weights, self._gelu)


class _Stack(torch.nn.Module):
    def __init__(
        self, shape: tuple[int, int, int], sharded_dim: int, config: TransformerConfig, has_bias: bool, parts: int = 1
    ) -> None:
        super().__init__()
        options: Any = {"device": torch.cuda.current_device(), "dtype": config.params_dtype}
        self.weight = torch.nn.Parameter(torch.empty(shape, **options))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=sharded_dim, stride=parts)
        # megatron-core's mark of gradients that are summed over the expert-data-parallel ranks only.
        self.weight.allreduce = False  # type: ignore[attr-defined]
        # Its user adds it: with the factor of each token, or on one rank only.
        self.bias = torch.nn.Parameter(torch.empty(shape[:2], **options)) if has_bias else None
        if self.bias is not None:
            set_tensor_model_parallel_attributes(self.bias, is_parallel=sharded_dim == 1, dim=1, stride=parts)
            self.bias.allreduce = False  # type: ignore[attr-defined]
        self._fused_gradient = config.gradient_accumulation_fusion

    def forward(self, tokens: Tensor, ends: Tensor) -> Tensor:
        """Multiplies tokens (n, in) with the weights of their experts to (n, out)."""
        return _GroupedProduct.apply(tokens, self.weight, ends, self._fused_gradient)


def grouped_product(tokens: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiplies tokens (n, in), sorted by expert, with the matrices (experts, out, in) of their experts."""
    return _GroupedProduct.apply(tokens, weights, ends, False)


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, ends: Tensor, fused: bool) -> Tensor:
        ctx.save_for_backward(tokens, weight, ends)
        ctx.buffer = gradient_buffer(weight, fused)
        return _grouped_product(tokens, weight.mT, ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        tokens, weight, ends = ctx.saved_tensors
        grad = grad.contiguous()  # grouped_mm refuses expanded gradients
        grad_tokens, grad_weight = _grouped_product(grad, weight, ends), None
        if ctx.needs_input_grad[1] and ctx.buffer is None:
            grad_weight = torch.zeros_like(weight)
            _add_grouped(grad, tokens, ends, grad_weight)
        elif ctx.needs_input_grad[1]:
            _add_grouped(grad, tokens, ends, ctx.buffer)
            grad_weight = added_to_buffer(weight)
        return grad_tokens, grad_weight, None, None


def _grouped_product(tokens: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiplies tokens (n, in), sorted by expert, with weights (experts, in, out) to (n, out)."""
    if _aligned(tokens, weights):
        return F.grouped_mm(tokens, weights, offs=ends)
    product = tokens.new_empty(len(tokens), weights.shape[2])
    # Rows that are not aligned occur in very small models, as in tests.
    for part, of_expert, weight in zip(*_by_expert(ends, product, tokens), weights, strict=True):
        torch.mm(of_expert, weight, out=part)
    return product


def _add_grouped(grad: Tensor, tokens: Tensor, ends: Tensor, buffer: Tensor) -> None:
    """Adds the gradient of each expert's weight to a buffer (experts, out, in)."""
    # GPU: one grouped product for all experts in float32 too.
    # GPU-TEST: tests/megatron/test_fake_cuda.py::test_train_experts_on_cuda_runs_on_every_rank
    # GPU-RAN: h200-1
    if _aligned(grad, tokens) and (grad.device.type == "cuda" or tokens.dtype is not buffer.dtype):
        buffer += F.grouped_mm(grad.T, tokens, offs=ends)
        return
    for of_expert, grads, inputs in zip(buffer, *_by_expert(ends, grad, tokens), strict=True):
        wgrad_gemm_accum_fp32(inputs, grads, of_expert)


def _aligned(*matrices: Tensor) -> bool:
    """Returns whether torch's grouped product takes the matrices: its rows must begin at multiples of 16 bytes."""
    widths = {stride for matrix in matrices for stride in matrix.stride() if stride > 1}
    return all(width * matrices[0].itemsize % 16 == 0 for width in widths)


def _by_expert(ends: Tensor, *tokens: Tensor) -> list[tuple[Tensor, ...]]:
    """Divides tokens, sorted by expert, into the tokens of each expert; the host waits for their numbers."""
    sizes = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
    return [part.split(sizes) for part in tokens]


def add_bias(product: Tensor, bias: Tensor, ends: Tensor, scale: Tensor | None = None, added: bool = True) -> Tensor:
    """Adds to each token (n, w), sorted by expert and changed in place, the bias of its expert times `scale` (n,).

    `ends` (experts,) int32: where the tokens of each expert end. `added=False`: another rank adds the bias to its part
    of the sum; it has its whole gradient here too.
    """
    return _AddBias.apply(product, bias, ends, scale, added)


class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, product: Tensor, bias: Tensor, ends: Tensor, scale: Tensor | None, added: bool) -> Tensor:
        # Not the product, which the gradients do not depend on: it may be overwritten.
        ctx.save_for_backward(bias, ends, scale)
        ctx.added = added
        ctx.mark_dirty(product)
        if added:
            rows = bias.index_select(0, _experts(ends, len(product)))
            product += rows if scale is None else (rows * scale[:, None]).to(product.dtype)
        return product

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, Tensor | None, None]:
        bias, ends, scale = ctx.saved_tensors
        wide, bias_grad, scale_grad = grad.float(), None, None
        if ctx.needs_input_grad[1]:
            weighted = wide if scale is None else wide * scale[:, None]
            sizes = torch.diff(ends, prepend=ends.new_zeros(1)).long()
            # A sum in the order of the tokens, which an addition at indices does not have on GPUs. Unsafe, for checks
            # of the lengths would make the host wait for the device.
            bias_grad = torch.segment_reduce(weighted, "sum", lengths=sizes, axis=0, unsafe=True).to(bias.dtype)
        if ctx.needs_input_grad[3] and ctx.added:
            scale_grad = (wide * bias.index_select(0, _experts(ends, len(grad)))).sum(-1)
        return grad, bias_grad, None, scale_grad, None


def _experts(ends: Tensor, tokens: int) -> Tensor:
    """Returns the expert of each token, (tokens,) int32."""
    return torch.bucketize(torch.arange(tokens, dtype=ends.dtype, device=ends.device), ends, right=True, out_int32=True)


class _ClampedSwiGLU(torch.autograd.Function):
    """Clamped SwiGLU of (n, 2 f) times a factor (n,); the backward pass needs only the arguments."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, alpha: float, limit: float) -> Tensor:
        ctx.save_for_backward(x, scale)
        ctx.constants = alpha, limit
        return _clamped(x, scale, alpha, limit)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, scale = ctx.saved_tensors
        return *_clamped_backward(grad, x, scale, *ctx.constants), None, None


@fused
def _clamped(x: Tensor, scale: Tensor, alpha: float, limit: float) -> Tensor:
    gate, up = x[..., ::2].float().clamp(max=limit), x[..., 1::2].float().clamp(-limit, limit)
    return ((up + 1) * gate * torch.sigmoid(alpha * gate) * scale[:, None]).to(x.dtype)


@fused
def _clamped_backward(grad: Tensor, x: Tensor, scale: Tensor, alpha: float, limit: float) -> tuple[Tensor, Tensor]:
    gate, up = x[..., ::2].float(), x[..., 1::2].float()
    inside, within = gate <= limit, up.abs() <= limit
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + 1
    gain = torch.sigmoid(alpha * gate)
    activated, grad = gate * gain, grad.float()
    scale_grad = (grad * activated * up).sum(-1)
    grad = grad * scale[:, None]
    gate_grad = grad * up * gain * (1 + alpha * gate * (1 - gain)) * inside
    up_grad = grad * activated * within
    return torch.stack((gate_grad, up_grad), dim=-1).flatten(-2).to(x.dtype), scale_grad
