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

Each matrix has one owner among the ranks that have a part of it, so that it is computed once. Two all-to-alls move what
the owner does not have itself:

    rank 0   [q  k/]      q, k/, /k: boxes of the matrices q and k in the shards of the ranks
    rank 1   [/k  v]

             to the owners            there                 back to the shards
    rank 0   q, k/ + /k        ->     f(q), f(k)     ->     f(q), first rows of f(k)
    rank 1   v                 ->     f(v)           ->     last rows of f(k), f(v)

The owners work in rounds, which bound the memory; in a round each has its own matrices, so that all ranks compute.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from verl_mg import device
from verl_mg.config import OptimizerConfig
from verl_mg.errors import UserError
from verl_mg.megatron.core_version import main_shard, optimizer_parts
from verl_mg.megatron.model_runner import MegatronRunner
from verl_mg.megatron.streamed_adamw import MOMENTS, MomentMemory, StreamedAdamW, dithered_to_bfloat16
from verl_mg.models.flops import NEWTON_SCHULZ_STEPS
from verl_mg.sharding.boxes import (
    Box,
    Shard,
    box_shape,
    contiguous_boxes,
    full_box,
    intersect,
    numel,
    slices,
    translate_box,
)

ROUND_ELEMENTS = 2**25
"""Elements of the matrices of an owner in a round, unless a single one is larger: 64 MiB in bfloat16. So the memory of
an exchange does not grow with the model."""

Shape = tuple[int, ...]
Named = tuple[str, Box]  # a matrix, and a box in it


@dataclass(frozen=True)
class Part:
    """A box of a matrix in a flat shard of a weight."""

    matrix: str
    box: Box  # box in the matrix
    shard: int  # index of the shard
    start: int  # first element, in the shard, of a range that contains the box
    around: Shape  # shape of the range
    inside: Box  # box of the same elements in the range; dimensions before the matrix's have length 1

    def view(self, shards: Sequence[Tensor]) -> Tensor:
        """Returns the elements, in the order of the box, as a view of the shard."""
        flat = shards[self.shard][self.start : self.start + math.prod(self.around)]
        return flat.view(self.around)[slices(self.inside)]


@dataclass(frozen=True)
class Assignment:
    """Owner of a matrix, and the round in which it is computed."""

    owner: int  # rank in the group
    round: int


def assign(held: Sequence[Sequence[Named]], shapes: Mapping[str, Shape]) -> dict[str, Assignment]:
    """Chooses an owner for each matrix: the least busy of the ranks that have a part of it."""
    # The largest matrices come first, so that the work of the ranks differs by little more than a small matrix.
    elements: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for rank, parts in enumerate(held):
        for name, box in parts:
            elements[name][rank] += numel(box)
    work, filled = [0.0] * len(held), [0] * len(held)
    assigned = {}
    # Every rank computes the assignment itself: the order must be the same on all.
    for name in sorted(elements, key=lambda name: (-math.prod(shapes[name]), shapes[name], name)):
        owner = min(elements[name], key=lambda rank: (work[rank], -elements[name][rank], rank))
        work[owner] += math.prod(shapes[name]) * min(shapes[name])  # proportional to FLOPs of products of the matrix
        assigned[name] = Assignment(owner, filled[owner] // ROUND_ELEMENTS)
        filled[owner] += math.prod(shapes[name])
    return assigned


class MatrixExchange:
    """Plan of the transfers of the matrices in the shards of a group of ranks."""

    def __init__(self, parts: Sequence[Part], shapes: Mapping[str, Shape], group: dist.ProcessGroup) -> None:
        self._group = group
        # Once in a run: the boxes of shards do not change.
        held: list[list[Named]] = [[] for _ in range(group.size())]
        dist.all_gather_object(held, [(part.matrix, part.box) for part in parts], group=group)
        assigned = assign(held, shapes)
        count = 1 + max((to.round for to in assigned.values()), default=-1)
        self._rounds = [_Round(group.size()) for _ in range(count)]
        for part in parts:
            to = assigned[part.matrix]
            self._rounds[to.round].sent[to.owner].append(part)
        for name, to in assigned.items():
            if to.owner == group.rank():
                self._rounds[to.round].owned[name] = shapes[name]
        for rank, boxes in enumerate(held):
            for name, box in boxes:
                to = assigned[name]
                if to.owner == group.rank():
                    self._rounds[to.round].received[rank].append((name, box))

    def apply(self, shards: Sequence[Tensor], function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
        """Replaces the matrices in the flat shards by functions of them, sent in `dtype`; a collective of the group.

        `function` maps matrices (k, m, n) of one shape to others of that shape.
        """
        for planned in self._rounds:
            views = [part.view(shards) for parts in planned.sent for part in parts]
            sent_sizes = [sum(numel(part.box) for part in parts) for parts in planned.sent]
            received_sizes = [sum(numel(box) for _, box in boxes) for boxes in planned.received]
            sent = self._flat(views, dtype)
            received = self._all_to_all(sent, sent_sizes, received_sizes)
            boxes = [named for boxes in planned.received for named in boxes]
            results = _mapped(boxes, received, planned.owned, function)
            computed = self._flat([results[name][slices(box)] for name, box in boxes], dtype)
            returned = self._all_to_all(computed, received_sizes, sent_sizes)
            for view, values in zip(views, returned.split([view.numel() for view in views]), strict=True):
                view.copy_(values.view(view.shape))

    def _flat(self, values: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        none = torch.empty(0, dtype=dtype, device=device.current_device())
        return torch.cat([part.to(dtype).flatten() for part in values]) if values else none

    def _all_to_all(self, values: Tensor, sizes: list[int], received_sizes: list[int]) -> Tensor:
        if self._group.size() == 1:
            return values
        received = values.new_empty(sum(received_sizes))
        dist.all_to_all_single(received, values, received_sizes, sizes, group=self._group)
        return received


class _Round:
    """Transfers of a round, by the rank at the other end."""

    def __init__(self, ranks: int) -> None:
        self.sent: list[list[Part]] = [[] for _ in range(ranks)]
        self.received: list[list[Named]] = [[] for _ in range(ranks)]
        self.owned: dict[str, Shape] = {}


def _mapped(
    boxes: Sequence[Named], values: Tensor, shapes: Mapping[str, Shape], function: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """Assembles matrices from their boxes and applies the function to all of one shape together."""
    groups = [(shape, list(names)) for shape, names in groupby(shapes, key=lambda name: shapes[name])]
    stacks = [values.new_empty(len(names), *shape) for shape, names in groups]
    matrices: dict[str, Tensor] = {}
    for (_, names), stack in zip(groups, stacks, strict=True):
        matrices.update(zip(names, stack, strict=True))
    for (name, box), part in zip(boxes, values.split([numel(box) for _, box in boxes]), strict=True):
        target = matrices[name][slices(box)]
        # Replicas of a box have equal values, so the last one may win.
        target.copy_(part.view(target.shape))
    for (_, names), stack in zip(groups, stacks, strict=True):
        matrices.update(zip(names, function(stack), strict=True))
    return matrices


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
        super().__init__(param_groups, False, moments_dtype, MomentMemory(on_host=False))
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


def use_muon(optimizer: Any, runner: MegatronRunner, config: OptimizerConfig, name: str = "actor") -> None:
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
    for part in optimizer_parts(optimizer):
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
                inside = translate_box(common, at, full_box(box_shape(at)))
                yield Part(piece.tensor, piece.source_of(common), number, offset, box_shape(at), inside)
        offset += numel(at)
