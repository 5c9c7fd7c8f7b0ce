"""Arithmetic of rows of logits, each of one token and a part of the vocabulary: sums, divergences, gradients.

`TorchRows` has it as operations of torch, `vocabulary_kernels.TritonRows` as one kernel for each of its methods. With
q = softmax(z) of the student's logits z, the target y, the entropy H, the divergence D and its derivatives s by log q:

    d log q(y) / dz = [y] - q        d H / dz = -q (log q + H)        d D / dz = s - q sum(s)

Sums over the vocabulary are first of a part, relative to the largest logit of the part. With the parts' maxima
m and the maximum M of all, a sum of exponentials is the sum of exp(m - M) times that of each part, so that two
all-reduces combine all tokens of a micro-batch. Of a token with logits 1 3 | 2 on two ranks, and target 1:

    rank 0   m = 3   total e^-2 + 1   picked  0        M = 3   total = e^-2 + 1 + e^-1     log q(1) = 0 - log(total)
    rank 1   m = 2   total 1          picked -
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from verl_mg.algorithms.divergence import Divergence
from verl_mg.training.output_layer import Draw, OutputLayer

Extra = Literal["entropy", "squares"] | None
"""Outputs in addition to log-probs: entropies, or the sums of squared probabilities, which have no gradients."""
LOWEST = -1e30
"""Maximum of a part of the vocabulary that has no tokens: its exponentials are 0, and products with it are finite."""
HIGHEST, TOTAL, OTHER = 0, 1, 2  # lines of sums, of which the last exists with `Extra`; then one for each target


@dataclass(frozen=True)
class RowGradient:
    """Derivatives of the loss by what rows of logits result in, and what their gradient is computed from."""

    normalizer: Tensor  # (2, n), see `Outputs`
    targets: Tensor  # (n, c)
    of_logprobs: Tensor  # (n, c)
    entropy: Tensor  # (n,)
    of_entropy: Tensor | None  # (n,)
    teacher: TeacherGradient | None = None


@dataclass(frozen=True)
class TeacherGradient:
    """The same of the divergence from a teacher."""

    rows: Any  # of the teacher, of the implementation that the student's have
    divergence: Divergence
    normalizer: Tensor  # (2, n)
    slopes: Tensor  # (n,) sums of the slopes of the divergence over the vocabulary
    of_divergence: Tensor  # (n,)


class Rows(ABC):
    """Rows of logits (n, v), of the draw of n tokens, for the v tokens of the vocabulary that a layer has.

    Args:
        products: products of the tokens' hidden states and the layer's weights, which the rows may change.
        tokens: places of the tokens among all tokens of the draw.
        learns: whether `gradient` is called.
    """

    copies: int  # tensors as large as the logits that exist at the same time
    copies_with_teacher: int

    @abstractmethod
    def __init__(
        self, products: Tensor, layer: OutputLayer, draw: Draw, tokens: slice, learns: bool = False
    ) -> None: ...

    @abstractmethod
    def sums(self, targets: Tensor, extra: Extra, out: Tensor, reused: bool) -> None:
        """Fills `out` (lines, n) with sums over this part and logits of targets (n, c), relative to the largest.

        `reused`: other methods are called afterwards.
        """

    @abstractmethod
    def normalize(self, normalizer: Tensor) -> None:
        """Turns logits into log-probs, before `divergence` and `gradient`."""

    @abstractmethod
    def divergence(self, teacher: Any, divergence: Divergence, normalizers: tuple[Tensor, Tensor]) -> Tensor:
        """Returns (2, n) the terms of a divergence and its slopes, summed over this part."""

    @abstractmethod
    def gradient(self, of: RowGradient, dtype: torch.dtype) -> Tensor:
        """Returns the gradient (n, v) of the products. The rows are not used afterwards."""


class TorchRows(Rows):
    """Rows that operations of torch change in place: logits, relative to the largest one after `sums`, log-probs."""

    copies = 1
    copies_with_teacher = 6

    def __init__(self, products: Tensor, layer: OutputLayer, draw: Draw, tokens: slice, learns: bool = False) -> None:
        self._layer = layer
        capped = layer.capped(products)
        self._slope = 1 - (capped / layer.softcap) ** 2 if learns and layer.softcap is not None else None
        self._values = draw.scale(capped, tokens, layer)
        self._highest: Tensor | None = None

    def sums(self, targets: Tensor, extra: Extra, out: Tensor, reused: bool) -> None:
        """Fills `out` by operations of torch."""
        logits = self._values
        # A shard that is all padding has no maximum.
        highest = logits.amax(-1).clamp_(min=LOWEST) if logits.shape[1] else out.new_full((len(logits),), LOWEST)
        logits -= highest[:, None]
        self._highest, out[HIGHEST] = highest, highest
        out[lines(extra) :] = 0
        if logits.shape[1]:
            local, is_local = self._layer.local_targets(targets)
            out[lines(extra) :] = (logits.gather(1, local) * is_local).T
        exponentials = logits.exp() if extra == "entropy" or reused else logits.exp_()
        out[TOTAL] = exponentials.sum(-1)
        if extra:
            out[OTHER] = exponentials.mul_(logits if extra == "entropy" else exponentials).sum(-1)

    def normalize(self, normalizer: Tensor) -> None:
        """Subtracts the normalizer."""
        highest, logarithm = normalizer
        relative = highest if self._highest is None else highest - self._highest
        self._values.sub_((relative + logarithm)[:, None])

    def divergence(self, teacher: Any, divergence: Divergence, normalizers: tuple[Tensor, Tensor]) -> Tensor:
        """Returns sums of terms and slopes."""
        both = teacher._values, self._values
        return torch.stack([divergence.terms(*both).sum(-1), divergence.slopes(*both).sum(-1)])

    def gradient(self, of: RowGradient, dtype: torch.dtype) -> Tensor:
        """Returns the gradient of the products."""
        values, layer = self._values, self._layer
        of_divergence = None
        if of.teacher is not None:
            of_divergence = of.teacher.divergence.slopes(of.teacher.rows._values, values)
            of_divergence -= values.exp().mul_(of.teacher.slopes[:, None])
            of_divergence *= of.teacher.of_divergence[:, None]
        total = of.of_logprobs.sum(1)
        # In place: the slopes above were computed from log-probs.
        if of.of_entropy is None:
            values.exp_().mul_(-total[:, None])
        else:
            probabilities = values.exp()
            values.add_(of.entropy[:, None]).mul_(-of.of_entropy[:, None])
            values.sub_(total[:, None]).mul_(probabilities)
        if layer.real_rows:
            local, is_local = layer.local_targets(of.targets)
            values.scatter_add_(1, local, of.of_logprobs * is_local)
        if of_divergence is not None:
            values += of_divergence
        if self._slope is not None:
            values *= self._slope
        if layer.scale != 1:
            values *= layer.scale
        return values.to(dtype)


@dataclass(frozen=True)
class Outputs:
    """Results of the sums of rows over the whole vocabulary."""

    normalizer: Tensor  # (2, n) largest logit, and the logarithm of the sum of exponentials relative to it
    logprobs: Tensor  # (n, c)
    other: Tensor | None  # (n,), see `Extra`


def lines(extra: Extra) -> int:
    """Returns the number of lines of sums before the lines of the targets."""
    return 3 if extra else 2


def combine(sums: Tensor, targets: Tensor, extra: Extra, layer: OutputLayer) -> Outputs:
    """Adds the sums (lines, n) of all parts of the vocabulary."""
    highest, group = sums[HIGHEST], layer.group
    if group is not None and group.size() > 1:
        highest = highest.clone()
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        sums = _relative_to(highest, sums, targets, extra, layer)
        dist.all_reduce(sums[TOTAL:], group=group)
    total, logarithm = sums[TOTAL], sums[TOTAL].log()
    other = None
    if extra:
        other = logarithm - sums[OTHER] / total if extra == "entropy" else sums[OTHER] / total**2
    return Outputs(torch.stack([highest, logarithm]), (sums[lines(extra) :] - logarithm).T, other)


def _relative_to(highest: Tensor, sums: Tensor, targets: Tensor, extra: Extra, layer: OutputLayer) -> Tensor:
    """Returns sums over a part of the vocabulary relative to another logit than the largest one of the part."""
    shift = sums[HIGHEST] - highest
    factor = shift.exp()
    relative = torch.empty_like(sums)
    relative[TOTAL] = sums[TOTAL] * factor
    if extra == "entropy":
        relative[OTHER] = (sums[OTHER] + shift * sums[TOTAL]) * factor
    elif extra:
        relative[OTHER] = sums[OTHER] * factor**2
    _, is_local = layer.local_targets(targets)
    relative[lines(extra) :] = (sums[lines(extra) :] + shift) * is_local.T
    return relative
