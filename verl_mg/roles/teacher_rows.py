"""Rows that a teacher reads in place of the student's rows, and the way of its columns back to these.

    student      [prompt a b] [c d e]                       another prompt: the same response after other tokens
    teacher      [other prompt x y z] [c d e]               column of c d e ──▶ the same tokens of the student

    student      [prompt] [be low] text "below"             another tokenizer: spans of text that begin and end
    teacher      [prompt] [b el ow]                         together; log-probs of b, el, ow add up at the token "low"

`TeacherRows.restore` moves a column of the teacher's rows back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from verl_mg.batch import SUPPORT_IDS, SUPPORT_SIZES, Batch
from verl_mg.data.token_alignment import aligned_spans, retokenized, token_ends
from verl_mg.engines.scoring_server import ScoringServer, TokenScore
from verl_mg.errors import UserError
from verl_mg.roles.role import ForwardPass
from verl_mg.training.logprobs import LOGPROBS, TokenOutputs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Teacher(Protocol):
    """Model that scores tokens: a `Policy` of the job, or one on a server."""

    def prepare(self, batch: Batch, call: str, outputs: TokenOutputs = LOGPROBS) -> ForwardPass:
        """Returns the two parts of scoring a batch.

        Args:
            batch: this rank's rows of the student.
            call: method name for error messages.
            outputs: what is computed for each token under the loss mask.
        """


@dataclass(frozen=True)
class TeacherRows:
    """Rows of a teacher, in the order of the student's."""

    batch: Batch
    """Columns tokens, loss_mask and sample_id."""
    restore: Callable[[Tensor], Tensor]
    """Makes a token column of the student's rows from one of these."""
    spans: Tensor | None = None
    """(tokens of the student's rows,) int64, number of each token's span; -1 without one. The last token of a span has
    the teacher's log-prob of all of it. None: each token is a span."""


class RowReader(Protocol):
    """Makes the rows that a teacher reads."""

    def read(self, batch: Batch) -> TeacherRows:
        """Returns the teacher's rows of a batch with the columns prompt_id and prompt_length."""


class ReadingTeacher:
    """Teacher that reads other rows than the student, made by `reader`; with `by_text` of another tokenizer."""

    def __init__(self, teacher: Teacher, reader: RowReader, by_text: bool = False) -> None:
        self._teacher, self._reader, self.by_text = teacher, reader, by_text
        self.spans: Tensor | None = None
        """Spans of the tokens of the batch that was read last, see `TeacherRows`."""

    def prepare(self, batch: Batch, call: str, outputs: TokenOutputs = LOGPROBS) -> ForwardPass:
        """Returns the two parts of scoring the teacher's rows of a batch."""
        rows = self._reader.read(batch)
        self.spans = rows.spans
        forward = self._teacher.prepare(rows.batch, call, outputs)
        return ForwardPass(forward.name, forward.work, lambda result: rows.restore(forward.deliver(result)))


class OtherPrompts:
    """Reader of a teacher with another prompt and the student's response (self-distillation, arXiv:2601.19897).

    `tokens_of` returns the tokens of the teacher's prompt, given the id of the student's; a row has at most `longest`
    tokens. `key` is the configuration key of the prompt, for errors.
    """

    def __init__(self, tokens_of: Callable[[int], list[int]], longest: int, key: str) -> None:
        self._tokens_of, self._longest, self._key = tokens_of, longest, key

    def read(self, batch: Batch) -> TeacherRows:
        """Returns the rows with their prompts replaced; UserError if one becomes too long, or is of an agent."""
        # Contexts of agents are no prompts that a template could replace.
        if "prefix_of" in batch:
            raise UserError(f"{self._key}: the samples are of agents, which have several contexts. Leave it out.")
        ids = batch["prompt_id"].tolist()
        prompts: Mapping[int, list[int]] = {number: self._tokens_of(number) for number in set(ids)}
        lengths = torch.tensor([len(prompts[number]) for number in ids], dtype=torch.int64)
        rows = Batch(batch.lengths - batch["prompt_length"] + lengths)
        if len(rows) and (length := int(rows.lengths.max())) > self._longest:
            raise UserError(
                f"{self._key}: a response with the teacher's prompt has {length} tokens, more than the {self._longest} "
                "positions of the model. Shorten the template, or lower rollout.max_new_tokens."
            )
        # Responses are the same tokens in both batches, in the same order: masks over them map one column to the other.
        responses = batch.positions >= batch.expand_to_tokens(batch["prompt_length"])
        answered = rows.positions >= rows.expand_to_tokens(lengths)
        tokens = torch.empty(rows.total_tokens, dtype=torch.int64)
        tokens[answered] = batch["tokens"][responses]
        flat = [token for number in ids for token in prompts[number]]
        tokens[~answered] = torch.tensor(flat, dtype=torch.int64)
        mask = torch.zeros(rows.total_tokens, dtype=torch.bool)
        mask[answered] = batch["loss_mask"][responses]
        rows["tokens"], rows["loss_mask"], rows["sample_id"] = tokens, mask, batch["sample_id"]
        if SUPPORT_IDS in batch:  # only tokens of responses have candidates
            sizes = torch.zeros(rows.total_tokens, dtype=torch.int32)
            sizes[answered] = batch[SUPPORT_SIZES][responses]
            rows[SUPPORT_SIZES], rows[SUPPORT_IDS] = sizes, batch[SUPPORT_IDS]

        def restore(column: Tensor) -> Tensor:
            restored = column.new_zeros(batch.total_tokens, *column.shape[1:])
            restored[responses] = column[answered]
            return restored

        return TeacherRows(rows, restore)


class OtherTokens:
    """Reader of a teacher with another tokenizer, which reads the text of prompt and response.

    `prompt_of` returns the teacher's tokens of a prompt, given its id. The tokens `stop_ids` end a response of the
    student; in their place the teacher reads its own. `key` is that of the teacher's tokenizer, for errors.
    """

    def __init__(
        self,
        prompt_of: Callable[[int], list[int]],
        student: PreTrainedTokenizerBase,
        teacher: PreTrainedTokenizerBase,
        stop_ids: frozenset[int],
        key: str,
    ) -> None:
        self._prompt_of, self._student, self._teacher = prompt_of, student, teacher
        self._stop_ids, self._key = stop_ids, key

    def read(self, batch: Batch) -> TeacherRows:
        """Returns rows of the teacher's tokens; UserError if rows are of agents, or a tokenizer is not a fast one."""
        # Only a fast tokenizer reports the places of its tokens; log-probs are summed over spans of the student's
        # tokens.
        if "prefix_of" in batch:
            raise UserError(f"{self._key}: the samples are of agents, which have several contexts. Leave it out.")
        rows: list[list[int]] = []
        masks: list[Tensor] = []
        spans: list[Tensor] = []
        places: list[Tensor] = []
        columns = zip(batch["prompt_id"].tolist(), batch["prompt_length"].tolist(), strict=True)
        total, offset = 0, 0
        for row, (prompt_id, length) in enumerate(columns):
            tokens, mask = batch.row("tokens", row)[length:], batch.row("loss_mask", row)[length:]
            prompt = self._prompt_of(prompt_id)
            theirs, of_student, of_teacher = self._aligned(tokens.tolist())
            count = int(of_student.max()) + 1 if len(of_student) else 0
            # A span is scored only if the policy has generated all of its tokens: the teacher has one number for them.
            written = torch.ones(count).scatter_reduce_(0, of_student, mask.float(), "amin") > 0
            last = torch.zeros(count, dtype=torch.int64)
            last.scatter_reduce_(0, of_student, torch.arange(len(of_student)), "amax")
            rows.append([*prompt, *theirs])
            masks += [torch.zeros(len(prompt), dtype=torch.bool), written[of_teacher]]
            numbers = torch.where(written[of_student], of_student + total, -1)
            spans += [torch.full((length,), -1), numbers]
            places += [torch.full((len(prompt),), -1), (last + length + offset)[of_teacher]]
            total, offset = total + count, offset + int(batch.lengths[row])
        read = Batch.from_rows(rows)
        read["loss_mask"] = torch.cat([torch.zeros(0, dtype=torch.bool), *masks])
        read["sample_id"] = batch["sample_id"]
        where = torch.cat([torch.zeros(0, dtype=torch.int64), *places])

        def restore(column: Tensor) -> Tensor:
            scored = read["loss_mask"]
            return column.new_zeros(batch.total_tokens).index_add_(0, where[scored], column[scored])

        return TeacherRows(read, restore, torch.cat([torch.zeros(0, dtype=torch.int64), *spans]))

    def _aligned(self, tokens: list[int]) -> tuple[list[int], Tensor, Tensor]:
        """Returns the teacher's tokens of a response, and the spans of the student's and of the teacher's tokens."""
        stops = bool(tokens) and tokens[-1] in self._stop_ids and self._teacher.eos_token_id is not None
        text, ends = token_ends(tokens[:-1] if stops else tokens, self._student)
        theirs, places = retokenized(text, self._teacher, self._key)
        of_student, of_teacher = aligned_spans(ends, places, len(text))
        # Stop tokens have no text to align: the student's and the teacher's are a span together.
        if stops:
            behind = max(of_student, default=-1) + 1
            theirs, of_student, of_teacher = (
                [*theirs, int(self._teacher.eos_token_id)],
                [*of_student, behind],
                [*of_teacher, behind],
            )
        return theirs, torch.tensor(of_student, dtype=torch.int64), torch.tensor(of_teacher, dtype=torch.int64)


class RemoteTeacher:
    """Teacher on a server outside the job, which each rank asks about its rows, `parallel` requests at a time."""

    def __init__(self, server: ScoringServer, parallel: int) -> None:
        self._server, self._parallel = server, parallel

    def prepare(self, batch: Batch, call: str, outputs: TokenOutputs = LOGPROBS) -> ForwardPass:
        """Returns the requests for log-probs or likeliest tokens, which are sent where a model would compute."""
        assert not outputs.hidden  # servers return no hidden states

        def work() -> Tensor:
            return asyncio.run(self._score(batch, outputs.top)).to(outputs.dtype)

        # Each rank scores its own rows, so nothing is delivered.
        return ForwardPass(f"{self._server.key}.{call}", work, lambda column: column)

    async def _score(self, batch: Batch, k: int) -> Tensor:
        """Returns the column: log-probs (tokens,), or log-probs and ids (tokens, 2, k) of the likeliest tokens."""
        slots = asyncio.Semaphore(self._parallel)
        rows = batch["loss_mask"].split(batch.lengths.tolist())

        async def of_row(row: int, scored: Tensor) -> Tensor:
            # Nothing predicts the first token of a row.
            places = [place for place in scored.nonzero().flatten().tolist() if place > 0]
            column = torch.zeros(len(scored), 2, k) if k else torch.zeros(len(scored))
            if places:
                async with slots:
                    scores = await self._server.score(batch.row("tokens", row).tolist(), places[0], k)
                column[places] = _as_tensor([scores[place - places[0]] for place in places], k)
            return column

        columns = await asyncio.gather(*(of_row(row, scored) for row, scored in enumerate(rows)))
        empty = torch.zeros(0, 2, k) if k else torch.zeros(0)
        return torch.cat([empty, *columns])


def _as_tensor(scores: Sequence[TokenScore], k: int) -> Tensor:
    if not k:
        return torch.tensor([score.logprob for score in scores])
    return torch.tensor([score.likeliest for score in scores]).transpose(1, 2)
