"""Attention of megatron-core's layers over packed sequences, with its context parallelism and rotary embeddings.

Shapes: T tokens of a micro-batch, all sequences one after the other on one axis without padding; a context-parallel
rank has T / cp of them outside attention, and a tensor-parallel rank T / (cp * tp) outside the projections.

    cp2, one sequence of T = 8 tokens, heads a b    rank 0                        rank 1
    a2a (Ulysses, the default)    outside           tokens 0 1 2 3                tokens 4 5 6 7
                                  in attention      head a of tokens 0 to 7       head b of tokens 0 to 7
    p2p, all_gather (`zigzag`)    outside           tokens 0 1 6 7                tokens 2 3 4 5
                                  in attention      queries 0 1 6 7, all keys     queries 2 3 4 5, all keys

Rotary position embeddings (arXiv:2104.09864) are computed in float32, each by one kernel on a GPU. A rotary pair is two
elements of a head that are rotated together: one half of the head apart as in Llama, or neighbours as in some models of
DeepSeek. The inverse rotation is the derivative, so that the backward pass needs no input.

Shapes of rotations: x (T, heads, d + n), of which d elements are rotated; cos and sin (T, 1, d) float32, with two equal
halves.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from verl_mg import device
from verl_mg.choice import Choice
from verl_mg.megatron.core_version import fused
from verl_mg.megatron.packed_sequences import PackedSequences, attend_to_gathered, gather_tokens
from verl_mg.training.packed_attention import (
    BY_BLOCKS,
    Scores,
    attend,
    attend_by_blocks,
    attend_where,
    has_ragged_kernel,
    heads_of_rank,
    kernel,
    to_heads,
    to_tokens,
)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first d elements of each head (T, heads, d + n), whose pairs are d / 2 apart; copies the others."""
    return _Rotation.apply(x, cos, sin)


def rotate_end(x: Tensor, cos: Tensor, sin: Tensor, neighbours: bool) -> Tensor:
    """Rotates the last d elements of each head, and copies the others.

    With `neighbours` the result has the first elements of all pairs before the second ones. Where queries and keys are
    permuted so, their products are unchanged.
    """
    return _RotationOfEnd.apply(x, cos, sin, neighbours)


def join_rotated(plain: Tensor, shared: Tensor, cos: Tensor, sin: Tensor, neighbours: bool) -> Tensor:
    """Appends to each head (T, heads, n) the rotated elements (T, 1, d) that all heads share."""
    return _Join.apply(plain, shared, cos, sin, neighbours)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # Nothing of the size of an activation: all layers share these two.
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, sin, -1.0), None, None


class _RotationOfEnd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, neighbours: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.neighbours = neighbours
        return _end_rotated(x, cos, sin, neighbours)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _end_rotated_back(grad, cos, sin, ctx.neighbours), None, None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plain: Tensor, shared: Tensor, cos: Tensor, sin: Tensor, neighbours: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.neighbours = neighbours
        return _joined(plain, shared, cos, sin, neighbours)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        plain, end = _parts(grad, cos)
        return plain, _summed_back(end, cos, sin, ctx.neighbours), None, None, None


@fused
def _rotated(x: Tensor, cos: Tensor, sin: Tensor, direction: float) -> Tensor:
    width = cos.shape[-1]
    half = width // 2
    # Angles and products are float32, and the result is rounded once.
    wide = x[..., :width].float()
    rotated = wide * cos
    rotated[..., :half].addcmul_(wide[..., half:], sin[..., :half], value=-direction)
    rotated[..., half:].addcmul_(wide[..., :half], sin[..., half:], value=direction)
    rotated = rotated.to(x.dtype)
    return rotated if width == x.shape[-1] else torch.cat([rotated, x[..., width:]], dim=-1)


@fused
def _end_rotated(x: Tensor, cos: Tensor, sin: Tensor, neighbours: bool) -> Tensor:
    plain, end = _parts(x, cos)
    return torch.cat([plain, _turned(end, cos, sin, neighbours)], dim=-1)


@fused
def _end_rotated_back(grad: Tensor, cos: Tensor, sin: Tensor, neighbours: bool) -> Tensor:
    plain, end = _parts(grad, cos)
    return torch.cat([plain, _turned_back(end.float(), cos, sin, neighbours).to(grad.dtype)], dim=-1)


@fused
def _joined(plain: Tensor, shared: Tensor, cos: Tensor, sin: Tensor, neighbours: bool) -> Tensor:
    rotated = _turned(shared, cos, sin, neighbours)
    return torch.cat([plain, rotated.expand(-1, plain.shape[1], -1)], dim=-1)


@fused
def _summed_back(grad: Tensor, cos: Tensor, sin: Tensor, neighbours: bool) -> Tensor:
    # The heads share the elements: their gradients are summed in float32, before the one rotation back.
    summed = grad.sum(1, keepdim=True, dtype=torch.float32)
    return _turned_back(summed, cos, sin, neighbours).to(grad.dtype)


def _parts(x: Tensor, cos: Tensor) -> tuple[Tensor, Tensor]:
    width = cos.shape[-1]
    return x[..., : x.shape[-1] - width], x[..., x.shape[-1] - width :]


def _turned(x: Tensor, cos: Tensor, sin: Tensor, neighbours: bool) -> Tensor:
    a, b = (x[..., 0::2], x[..., 1::2]) if neighbours else x.chunk(2, dim=-1)
    cos, sin = _of_pairs(cos, sin)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)  # float32, as `cos`


def _turned_back(x: Tensor, cos: Tensor, sin: Tensor, neighbours: bool) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    cos, sin = _of_pairs(cos, sin)
    pairs = a * cos + b * sin, b * cos - a * sin
    return torch.stack(pairs, dim=-1).flatten(-2) if neighbours else torch.cat(pairs, dim=-1)


def _of_pairs(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    half = cos.shape[-1] // 2
    return cos[..., :half], sin[..., :half]


class PackedAttention(MegatronModule):
    """Causal attention within each packed sequence, rotary embedding included.

    It has this tensor-parallel rank's heads; context-parallel ranks divide them among themselves, see `to_heads`,
    or exchange keys and values, see `local_context`. `packed_attention` has the kernels.

    Attributes:
        softmax_offset: (heads / tp,) parameter of the attention sinks; None without. It is a further score of each
            head's softmax, without a value.
    """

    kind = "attention"  # name of such layers in the table of a start

    def __init__(
        self,
        config: TransformerConfig,
        *_: Any,
        window: int | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        **__: Any,
    ) -> None:
        super().__init__(config=config)
        self.window, self.softcap = window, softcap
        self.scale = config.softmax_scale
        self.softmax_offset: torch.nn.Parameter | None = None
        if sinks:
            # The parameter has megatron-core's name, and is cut with the heads.
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            options: dict[str, Any] = {"device": torch.cuda.current_device(), "dtype": config.params_dtype}
            self.softmax_offset = torch.nn.Parameter(torch.empty(heads, **options))
            set_tensor_model_parallel_attributes(self.softmax_offset, is_parallel=True, dim=0, stride=1)

    def chosen(self) -> Choice:
        """Returns what this layer's attention computes with."""
        place, config, scores = device.current_device(), self.config, self._scores(None)
        part = f"{self.kind}, {scores.kind}"
        if config.context_parallel_size > 1 and config.cp_comm_type != "a2a":
            by_blocks = has_ragged_kernel(place, config.params_dtype)
            return Choice(part, f"{BY_BLOCKS if by_blocks else 'masks of all pairs'}, over gathered keys")
        return kernel(place, config.params_dtype, scores).choice(part)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> Tensor:
        """Computes attention of (T / cp, heads, d) queries to (T / cp, heads * d); masks are not read."""
        packed = packed_seq_params
        assert packed and packed.cp_group
        if packed.zigzag:
            # The rotary embeddings are of this rank's tokens here, and of all tokens after an exchange of heads.
            return self.local_context(*self.with_positions(query, key, value, packed), packed).flatten(1)
        heads = to_heads(query, key, value, packed.cp_group)
        query, key, value = self.with_positions(*heads, packed)
        if packed.keys is not None:
            # The backward pass sums the gradients of all sequences that share a key.
            key, value = key[packed.keys], value[packed.keys]
        return to_tokens(self._attend(query, key, value, packed), packed.cp_group).flatten(1)

    def local_context(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        """Computes attention of this rank's tokens, two chunks of each sequence, to the tokens of all ranks."""
        assert packed.cp_group is not None
        order, group, scores = packed.gathered_order, packed.cp_group, self._scores(None)
        key, value = gather_tokens(key, order, group), gather_tokens(value, order, group)
        if has_ragged_kernel(query.device, query.dtype):
            # By a block mask; the path below has a mask of all pairs of tokens, memory of the square of the length.
            return attend_by_blocks(query, key, value, packed, scores)
        with_mask = partial(attend_where, scores=scores)
        return attend_to_gathered(with_mask, query, key, value, packed.lengths, self.window, group.size(), group.rank())

    def with_positions(
        self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Applies rotary embeddings to queries and keys; values are unchanged."""
        return self.rotated(query, packed), self.rotated(key, packed), value

    def rotated(self, x: Tensor, packed: PackedSequences) -> Tensor:
        """Applies the rotary embedding to queries or keys."""
        assert packed.cos is not None and packed.sin is not None
        return rotate(x, packed.cos, packed.sin)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        return attend(query, key, value, packed, self._scores(packed.cp_group))

    def _scores(self, group: dist.ProcessGroup | None) -> Scores:
        """Returns the treatment of scores; group: ranks that divide the heads among themselves."""
        sinks = None if self.softmax_offset is None else heads_of_rank(self.softmax_offset, group)
        return Scores(self.scale, self.window, self.softcap, sinks)
