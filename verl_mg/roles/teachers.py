from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from verl_mg.algorithms.divergence import Divergence
from verl_mg.batch import Batch, ColumnKind
from verl_mg.errors import UserError
from verl_mg.roles.context import JobContext
from verl_mg.roles.models import Actor, Policy
from verl_mg.roles.role import SUPPORT_COLUMNS, ForwardPass
from verl_mg.roles.teacher_rows import ReadingTeacher, Teacher
from verl_mg.rows.plan import PREFIX_COLUMNS
from verl_mg.training.logprobs import (
    LOGPROBS,
    OutputLayer,
    TeacherDivergence,
    TokenOutputs,
    check_vocabularies,
    load_teacher_layer,
)
from verl_mg.training.microbatch import TEACHER, TEACHER_HIDDEN, TEACHER_TOP

# Columns of a batch that teachers are given, without `routed_experts`: these are experts of the student.
SCORED_COLUMNS = (
    *("tokens", "loss_mask", "sample_id", "trajectory", "prompt_id", "prompt_length"),
    *PREFIX_COLUMNS,
    *SUPPORT_COLUMNS,
)


class Teachers:
    """Models that a policy learns from, one for each sample by the source of its prompt; all ranks call them together.

    `teachers` are by configuration key, such as `teachers.math`. `policies` are the teachers with fixed weights on
    ranks of the job, whose output layers can be read from their directories. `teacher_of` returns the number of the
    teacher, in the order of `teachers`, of a prompt's id.
    """

    def __init__(
        self,
        teachers: Mapping[str, Teacher],
        policies: Mapping[str, Policy],
        actor: Actor,
        teacher_of: Callable[[int], int],
        context: JobContext,
    ) -> None:
        self._teachers, self._policies, self._actor = teachers, policies, actor
        self._teacher_of, self._context = teacher_of, context
        self._layers: list[OutputLayer] | None = None

    def compute_logprobs(self, batch: Batch) -> Tensor:
        """Returns log p by the row's teacher of every token under the loss mask, in nats: a float32 token column."""
        # Where a teacher has another tokenizer, the last token of a piece of text has log p of all of it, see `spans`.
        return self._column(batch, "compute_logprobs", LOGPROBS)

    def score(self, batch: Batch, divergence: Divergence) -> None:
        """Sets the columns that the actor needs to compute a divergence from each row's teacher.

        These are `teacher_top` with `top_k`, otherwise `teacher` and `teacher_hidden`. UserError if a teacher has
        another vocabulary, or the divergence is over the whole one and a teacher does not know it.
        """
        if self._by_text:
            raise UserError(
                f"{self._by_text[0]}.tokenizer: distributions over two vocabularies cannot be compared. Leave it out, "
                "or use recipes/distillation.py, which compares log-probs of the text."
            )
        if divergence.top_k:
            batch.put(TEACHER_TOP, self._column(batch, "score", TokenOutputs(top=divergence.top_k)), ColumnKind.TOKEN)
            return
        if others := [key for key in self._teachers if key not in self._policies]:
            raise UserError(
                f"{others[0]}: only of a model with fixed weights on ranks of the job is the whole distribution known. "
                "Write algorithm.divergence.top_k."
            )
        # Hidden states travel, not logits: a token costs h numbers instead of V. The ranks that compute the student's
        # logits multiply them with the teacher's output layer. Narrower teachers are filled up with zeros.
        runners = [policy.runner for policy in self._policies.values()]
        width, dtypes = max(runner.output_head.hidden for runner in runners), {runner.dtype for runner in runners}
        # float32 contains the values of both half precisions.
        outputs = TokenOutputs(hidden=width, dtype=dtypes.pop() if len(dtypes) == 1 else torch.float32)
        column = self._column(batch, "score", outputs)
        batch.put(TEACHER_HIDDEN, column, ColumnKind.TOKEN)
        batch.put(TEACHER, self._numbers(batch), ColumnKind.SEQUENCE)

    def comparison(self, divergence: Divergence) -> TeacherDivergence:
        """Returns the argument `teacher` of the actor's update on a batch with the columns of `score`."""
        # Over the whole vocabulary each rank that computes the actor's logits has its part of the teachers' output
        # layers, which it reads the first time.
        if divergence.top_k:
            return TeacherDivergence(divergence)
        if self._layers is None:
            self._layers = list(self._load_layers())
        return TeacherDivergence(divergence, self._layers)

    def _load_layers(self) -> Iterator[OutputLayer]:
        shard = self._actor.runner.vocabulary_shard()
        for key, policy in self._policies.items():
            runner, head = policy.runner, policy.runner.output_head
            check_vocabularies(head, self._actor.runner.output_head, key)
            needed = {head.tensor: runner.table.huggingface()[head.tensor]}
            directory = self._context.directories.open(policy.runner.spec.path, needed)
            if shard is not None:
                yield load_teacher_layer(directory, head, runner.dtype, shard)

    @property
    def _by_text(self) -> list[str]:
        """Keys of the teachers with another tokenizer."""
        readers = ((key, teacher) for key, teacher in self._teachers.items() if isinstance(teacher, ReadingTeacher))
        return [key for key, reader in readers if reader.by_text]

    def spans(self, batch: Batch) -> Tensor | None:
        """Returns the span of text of each token, of which the last token has the teacher's log-prob of all of it.

        (tokens,) int64 for the batch of the last `compute_logprobs`, -1 for tokens without a span; None where all
        teachers read the student's tokens.
        """
        if not self._by_text:
            return None
        # Tokens of teachers with the student's tokenizer are spans by themselves; each reader's spans follow after all.
        spans, total, numbers = torch.arange(batch.total_tokens), batch.total_tokens, self._numbers(batch)
        for number, teacher in enumerate(self._teachers.values()):
            if isinstance(teacher, ReadingTeacher) and teacher.spans is not None:
                entries = batch.entries((numbers == number).nonzero().flatten())
                spans[entries] = torch.where(teacher.spans < 0, -1, teacher.spans + total)
                total += len(entries)
        return spans

    def _numbers(self, batch: Batch) -> Tensor:
        """Returns the number of each row's teacher, (n,) int64."""
        if len(self._teachers) == 1:
            return torch.zeros(len(batch), dtype=torch.int64)
        return torch.tensor([self._teacher_of(prompt) for prompt in batch["prompt_id"].tolist()], dtype=torch.int64)

    def _column(self, batch: Batch, call: str, outputs: TokenOutputs) -> Tensor:
        """Returns a token column of which each teacher computes its rows; 0 outside the loss mask."""
        scored, numbers = batch.select_columns(SCORED_COLUMNS), self._numbers(batch)
        rows = [(numbers == number).nonzero().flatten() for number in range(len(self._teachers))]
        # A single teacher scores the batch itself: a selection would be a copy, and no other call could share the rows.
        parts = [scored] if len(rows) == 1 else [scored.select(of_teacher) for of_teacher in rows]
        passes: list[ForwardPass] = []
        for (key, teacher), part in zip(self._teachers.items(), parts, strict=True):
            # The width of this teacher's states, which `deliver` puts into the first columns.
            size = self._policies[key].runner.output_head.hidden if outputs.hidden else 0
            passes.append(teacher.prepare(part, call, replace(outputs, hidden=size)))
        shape, dtype = outputs.shape, outputs.dtype

        def deliver(results: Sequence[Any]) -> Tensor:
            column = torch.zeros(batch.total_tokens, *shape, dtype=dtype)
            for of_rows, forward, result in zip(rows, passes, results, strict=True):
                values = forward.deliver(result)
                target = column[..., : values.shape[-1]] if shape else column
                target[batch.entries(of_rows)] = values
            return _without_padding(column, self._actor.runner.output_head.vocab) if outputs.top else column

        def work() -> list[Any]:
            return [forward.work() for forward in passes]

        return self._context.executor.column(f"teachers.{call}", batch.total_tokens, work, deliver, shape, dtype)


def _without_padding(top: Tensor, vocab: int) -> Tensor:
    """Marks a teacher's likeliest tokens that the student does not have as absent; (tokens, 2, k) log-probs and ids."""
    # Models pad their output layers differently: such tokens are rows without a token of the tokenizer.
    known = top[:, 1] < vocab
    return torch.stack([torch.where(known, top[:, 0], -torch.inf), torch.where(known, top[:, 1], 0)], 1)
