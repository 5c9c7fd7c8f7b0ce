"""Muon (K. Jordan, https://kellerjordan.github.io/posts/muon) with weight decay and the scale of AdamW's updates.

The momentum of a matrix is replaced by about the nearest matrix with orthogonal rows or columns: all its singular
values become nearly 1 (arXiv:2502.16982, section 2). A matrix is one of the checkpoint, so q, k and v, gate and up, and
every expert have their own, under every layout and whichever parameter they are fused into.

megatron-core's distributed optimizer cuts the flat weights among data-parallel ranks. Momentum and main weights stay
there; only the updates of a step are exchanged, and return orthogonalized (arXiv:2502.16982, section 2).
megatron-core's Muon needs the package emerging-optimizers, which is not on PyPI, and has its states whole on every
data-parallel rank, or whole matrices on some of them; in flat shards, checkpoints, snapshots and offload are as with
AdamW.

All other weights are trained by AdamW: embedding, output layer, norms, biases and value heads. Routers are matrices of
layers and trained by Muon, as in megatron-core 0.19.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from verl_mg.config import OptimizerConfig
from verl_mg.errors import UserError
from verl_mg.megatron.core_version import main_shard
from verl_mg.megatron.matrix_exchange import MatrixExchange, Part
from verl_mg.megatron.model_runner import ModelRunner
from verl_mg.megatron.streamed_adamw import MOMENTS, RandomAccessMemory, StreamedAdamW, dithered_to_bfloat16
from verl_mg.models.flops import NEWTON_SCHULZ_STEPS
from verl_mg.sharding.boxes import Shard, box_shape, contiguous_boxes, full_box, intersect, numel, translate_box

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of X, (X X^T) X and (X X^T)^2 X in an iteration, as in K. Jordan's and in torch.optim.Muon."""
SMALLEST_NORM = 1e-7  # norm of a matrix below which it is not scaled up to 1, as in torch.optim.Muon
UPDATE_RMS = 0.2
"""Root mean square of an update before the learning rate, about that of AdamW's (arXiv:2502.16982, section 2)."""


def orthogonalized(matrices: Tensor) -> Tensor:
    """Approximates U V^T of the singular value decompositions U S V^T by Newton-Schulz iterations of degree 5.

    Singular values of the result (k, m, n) are between about 0.7 and 1.2, where they were not tiny.
    """
    # X X^T has the smaller side of the matrix.
    if matrices.shape[1] > matrices.shape[2]:
        return orthogonalized(matrices.mT).mT
    a, b, c = COEFFICIENTS
    # The iterations converge from singular values up to about 1, and the Frobenius norm bounds the largest.
    norms = torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True, dtype=torch.float32)
    x = (matrices / norms.clamp(min=SMALLEST_NORM)).to(matrices.dtype)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def scaled_update(matrices: Tensor) -> Tensor:
    """Returns the orthogonalized matrices with the root mean square of AdamW's updates."""
    return orthogonalized(matrices) * (UPDATE_RMS * math.sqrt(max(matrices.shape[1:])))


class Muon(StreamedAdamW):
    """Muon for the shards of matrices, AdamW for all other weights."""

    def __init__(
        self,
        param_groups: list[dict[str, Any]],
        momentum: float,
        moments_dtype: torch.dtype,
        matrices: Sequence[Tensor],
        exchange: MatrixExchange,
        matrix_dtype: torch.dtype,
    ) -> None:
        super().__init__(param_groups, False, moments_dtype, RandomAccessMemory(on_host=False))
        self._momentum, self._matrices = momentum, tuple(matrices)
        self._exchange, self._matrix_dtype = exchange, matrix_dtype
        self._of_muon = frozenset(self._matrices)

    def moments(self, weight: Tensor) -> tuple[str, ...]:
        """Returns Adam's moments, or of a matrix only the first: Muon's momentum is the same average of gradients."""
        return MOMENTS[:1] if weight in self._of_muon else MOMENTS

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates all weights; a collective of the ranks of the exchange. Gradients of matrices are overwritten."""
        super().step()
        # Gradients of matrices are now the averages to orthogonalize, which needs no further memory for updates.
        updates = [weight.grad for weight in self._matrices]
        self._exchange.apply(updates, scaled_update, self._matrix_dtype)  # type: ignore[arg-type]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight in self._of_muon:
                    weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(weight.grad, alpha=-group["lr"])

    def _update(self, weight: Tensor, gradient: Tensor | None, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        """Makes AdamW's step, or replaces a gradient by Nesterov's average of it."""
        if weight not in self._of_muon:
            return super()._update(weight, gradient, state, group)
        assert gradient is not None
        state["step"] += 1
        average = state["exp_avg"].float()  # itself where it is float32
        average.lerp_(gradient, 1 - self._momentum)
        gradient.lerp_(average, self._momentum)
        if average is not state["exp_avg"]:
            state["exp_avg"].copy_(dithered_to_bfloat16(average, int(state["step"])))


def use_muon(optimizer: Any, runner: ModelRunner, config: OptimizerConfig, name: str = "actor") -> None:
    """Replaces the torch optimizers inside a new megatron-core optimizer by `Muon`; all ranks of the model call it."""
    if runner.lora:
        raise UserError(
            f"{name}.optimizer.kind: muon trains matrices of the model, not adapters. Write adamw, or remove "
            f"{name}.lora."
        )
    with runner.groups.active():  # all ranks of a pipeline stage: they have all parts of its layers
        group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    shapes = {
        name: entry.tensor.shape for name, entry in runner.table.tensor_index.entries.items() if entry.is_layer_matrix
    }
    shards = runner.shard_map().shards(torch.distributed.get_rank())
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        matrices: list[Tensor] = []
        parts: list[Part] = []
        for parameter_name, parameter in runner.parameters().items():
            located, shard = main_shard(part, parameter), shards[parameter_name]
            if located is not None and all(piece.tensor in shapes for piece in shard.pieces):
                main, start = located
                parts += _parts(shard, start, main.numel(), len(matrices))
                matrices.append(main)
        exchange = MatrixExchange(parts, shapes, group)
        moments_dtype = getattr(torch, config.moments_dtype)
        groups = part.optimizer.param_groups
        part.optimizer = Muon(groups, config.momentum, moments_dtype, matrices, exchange, runner.dtype)


def _parts(shard: Shard, start: int, count: int, number: int) -> Iterator[Part]:
    """Yields the boxes of matrices in a range of a flattened parameter."""
    offset = 0
    for at in contiguous_boxes(shard.shape, start, start + count):
        for piece in shard.pieces:
            common = intersect(at, piece.target)
            if common is not None:
                stacked = len(piece.target) - len(piece.source)
                box = translate_box(common[stacked:], piece.target[stacked:], piece.source)
                inside = translate_box(common, at, full_box(box_shape(at)))
                yield Part(piece.tensor, box, number, offset, box_shape(at), inside)
        offset += numel(at)
