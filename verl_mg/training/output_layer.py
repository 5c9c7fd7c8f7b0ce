"""Output layer of one rank, which has a part of the vocabulary, and the distribution that tokens were drawn from."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from verl_mg.training.microbatch import EXCLUDED, Support

# GPU: larger chunks of logits.
# GPU-TEST: tests/training/test_logprobs.py::test_vocab_parallel_logprobs_values_and_gradients_equal_full_logits
# GPU-RAN: h200-1, h100-1
CHUNK_BYTES = {"cuda": 2**30, "cpu": 2**24}
"""Bytes of one chunk of float32 logits on one rank, by the kind of device: large enough for efficient products."""
ALIGNED = 64  # rows of matrices on GPUs begin at multiples of so many elements, whatever the size of the vocabulary


@dataclass(frozen=True)
class OutputLayer:
    """Output layer of one rank, which turns hidden states into log-probabilities."""

    weight: Tensor  # (rows, h), this rank's vocabulary shard
    first_token: int  # token id of the shard's first row
    real_rows: int  # number of rows of the shard that are tokens; the others are padding
    group: dist.ProcessGroup | None  # tensor-parallel ranks; None: the rank has the whole vocabulary
    softcap: float | None = None  # bound c of logits z, as c * tanh(z / c) (Gemma 2, arXiv:2408.00118); None for none
    fused_gradient: bool = False  # add the weight's gradient to its buffer in the product, see `weight_gradients`
    scale: float = 1.0  # factor of the products of hidden states and weights

    def products(self, hidden: Tensor) -> Tensor:
        """Computes the float32 products (n, real_rows) of hidden states (n, h) and weights."""
        weight = self.weight[: self.real_rows].T
        # GPU: the product of 16-bit matrices has a float32 result: sums are not rounded.
        # GPU-TEST: tests/megatron/test_fake_cuda.py::test_train_family_on_cuda_has_values_of_transformers,
        # tests/training/test_logprobs.py::test_vocab_parallel_logprobs_of_bf16_weights_are_float32
        # GPU-RAN: h200-1, h100-1
        if hidden.device.type != "cuda":
            return (hidden @ weight).float()
        products = aligned_empty(len(hidden), self.real_rows, torch.float32, hidden.device)
        if hidden.dtype is torch.float32:
            return torch.mm(hidden, weight, out=products)
        return torch.mm(hidden, weight, out_dtype=torch.float32, out=products)

    def capped(self, products: Tensor) -> Tensor:
        """Turns products into logits, in place."""
        if self.scale != 1:
            products *= self.scale
        return products if self.softcap is None else products.div_(self.softcap).tanh_().mul_(self.softcap)

    def logits(self, hidden: Tensor) -> Tensor:
        """Computes the float32 logits (n, real_rows) of hidden states (n, h)."""
        return self.capped(self.products(hidden))

    def local_targets(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Returns each target's row in this shard (0 where it is in another one), and whether it is in this shard."""
        local = targets - self.first_token
        is_local = (local >= 0) & (local < self.real_rows)
        return torch.where(is_local, local, 0), is_local

    def chunks(self, tokens: int, copies: int = 1) -> list[slice]:
        """Divides tokens into chunks whose logits have at most CHUNK_BYTES, in `copies` tensors of their size."""
        # By the rows with padding, of which all ranks have equally many: so they take part in equally many collectives.
        return _slices(tokens, len(self.weight) * copies, self.weight.device, 1)

    def blocks(self, tokens: int, copies: int = 1) -> list[slice]:
        """Divides the rows of the shard into blocks, so that logits of all tokens for one have at most CHUNK_BYTES."""
        return _slices(self.real_rows, tokens * copies, self.weight.device, 2 * ALIGNED)

    def part(self, rows: slice) -> OutputLayer:
        """Returns the layer with only some of its rows."""
        return replace(
            self, weight=self.weight[rows], first_token=self.first_token + rows.start, real_rows=rows.stop - rows.start
        )


def _slices(count: int, others: int, device: torch.device, multiple: int) -> list[slice]:
    """Divides one side of a matrix, whose other one has `others` elements."""
    size = max(1, CHUNK_BYTES[device.type] // (4 * max(1, others)))
    size -= size % multiple if size > multiple else 0
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def aligned_empty(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocates a matrix whose rows are aligned in memory: kernels read and write several elements together."""
    return torch.empty(rows, -(-columns // ALIGNED) * ALIGNED, dtype=dtype, device=device)[:, :columns]


@dataclass(frozen=True)
class Draw:
    """Distribution that tokens were drawn from, by their logits."""

    temperature: float  # divisor of the logits
    support: Support | None = None  # candidates; None: all of the vocabulary

    def scale(self, logits: Tensor, chunk: slice, layer: OutputLayer, excluded: float = EXCLUDED) -> Tensor:
        """Scales and limits a chunk's logits (tokens, real_rows) of a layer as for the draw, in place."""
        scaled = logits if self.temperature == 1 else logits.div_(self.temperature)
        return self.support.limit(scaled, chunk, layer.first_token, excluded) if self.support else scaled
