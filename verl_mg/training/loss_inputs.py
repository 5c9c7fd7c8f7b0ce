"""Input and output of loss functions: the scored tokens of a micro-batch, whatever the backend of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from verl_mg.algorithms.losses import Metrics
from verl_mg.batch import COUNTED_BY, ColumnKind
from verl_mg.device import copy_to
from verl_mg.lazy_import import lazy_import
from verl_mg.training.microbatch import ROUTED_EXPERTS, SHARED_TOKENS, SHARED_WITH, TEACHER_HIDDEN, MicroBatch

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from verl_mg.training.logprobs import TeacherDivergence
else:
    torch = lazy_import("torch")

LossOutput: TypeAlias = "tuple[Tensor, Metrics]"
"""Result of a loss function: the loss of each scored token, (n,) with gradients, and metrics (n,) by name."""


@dataclass(frozen=True)
class LossInputs:
    """Scored tokens of a micro-batch as the input of a loss function; all tensors are flat, (n,).

    `inputs["name"]` is a column of the batch; a sequence column is expanded to its tokens. Two rows, n = 4:

        tokens      a b c d   e f g
        loss_mask   0 0 1 1   0 1 1
        scored          c d     f g
        output[0]       log p(c | a b), log p(d | a b c), log p(f | e), log p(g | e f)
        output[1]       entropies of these four distributions
        sequence_ids    0 0 1 1
        inputs["advantages"]   a token column:      0 0 .5 .5 0 -1 -1  ->  .5 .5 -1 -1
        inputs["reward"]       a sequence column:   1 0                ->   1  1  0  0
    """

    # Output of the model with gradients: log-probs and entropy (2, n), with a teacher or likeliest tokens further ones;
    # or values (1, n).
    output: Tensor
    mask: Tensor  # true for every token, (n,) bool
    sequence_ids: Tensor  # row of each token in the micro-batch, (n,) int64
    columns: Mapping[str, Tensor]  # columns of the batch at the scored tokens, (n, ...) by name
    teacher: TeacherDivergence | None = None  # comparison with teachers that the update requests

    @property
    def logprobs(self) -> Tensor:
        """Log-probs of the tokens at the sampling temperature, in nats, with gradients."""
        return self.output[0]

    @property
    def entropy(self) -> Tensor:
        """Entropy of the distribution that each token was sampled from, in nats, with gradients."""
        return self.output[1]

    @property
    def likeliest_logprobs(self) -> Tensor:
        """Log-probs of likeliest tokens in the place of each, (n, k) with gradients, see `TokenOutputs.likeliest`."""
        return self.output[2:].T

    @property
    def divergence(self) -> Tensor:
        """Divergence of the policy from the teacher in the place of each token, in nats, with gradients."""
        assert self.teacher is not None, "pass update(..., teacher=job.teachers.divergence(...))"
        return self.teacher.of_tokens(self.output, self.columns)

    @property
    def values(self) -> Tensor:
        """Outputs of the value head, with gradients; the column of earlier values is `inputs["values"]`."""
        return self.output[0]

    @property
    def old_logprobs(self) -> Tensor:
        """Log-probs before the first update on the batch, in nats."""
        # A batch without this column is used for one update: they are `logprobs`, as constants.
        return self.columns["old_logprobs"] if "old_logprobs" in self.columns else self.logprobs.detach()

    @property
    def ref_logprobs(self) -> Tensor:
        """Log-probs of the reference policy, in nats."""
        return self.columns["ref_logprobs"]

    @property
    def advantages(self) -> Tensor:
        """Advantages of the tokens."""
        return self.columns["advantages"]

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name]

    def __contains__(self, name: object) -> bool:
        return name in self.columns


def loss_tokens(micro: MicroBatch[Any], output: Tensor, teacher: TeacherDivergence | None = None) -> LossInputs:
    """Returns the input of a loss function, from the output (lines, n) of the model for the scored tokens.

    Lines: log-probs and entropies, and more with a teacher; one line of values with a value head.
    """
    columns = {}
    for name in micro.rows.names():
        kind = micro.rows.kind(name)
        if name in (ROUTED_EXPERTS, SHARED_WITH, SHARED_TOKENS, TEACHER_HIDDEN) or kind in COUNTED_BY:
            continue  # not of a loss
        column = micro.rows[name]
        if kind is ColumnKind.SEQUENCE:
            column = micro.rows.expand_to_tokens(column)
        columns[name] = copy_to(output.device, column[micro.token_index])
    return LossInputs(
        output=output,
        mask=torch.ones_like(output[0], dtype=torch.bool),
        sequence_ids=micro.sequence_ids,
        columns=columns,
        teacher=teacher,
    )
