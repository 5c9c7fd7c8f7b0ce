"""The prompts of a file, tokenised once, and taken in an order that a seed fixes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

import numpy as np

from verl_mg.data.fields import answer_of, prompt_of
from verl_mg.data.records import Record, located_records
from verl_mg.data.rendering import render, tokenise
from verl_mg.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


ANSWER = "answer"
"""The field of the answer unless another is named; records may lack it."""


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        id: its row in the file, from 0, blank lines not counted; neither dropping nor order changes it. With several
            sources the rows of those named before count on.
        tokens: `(prompt length,)` token ids, ready for the model.
        text: what was tokenised, so with the chat template or the instruction in it.
        answer: the answer field as text, whole; None where the record has none.
        record: the record as read.
        source: the name of the source it is from; "" where there is one only.
        place: `file:line` of the record, for errors.
    """

    id: int
    tokens: tuple[int, ...]
    text: str
    answer: str | None
    record: Record
    source: str = ""
    place: str = ""

    @property
    def where(self) -> str:
        """How an error names it."""
        return f"{self.place or f'data row {self.id + 1}'} ({self.text[:40]!r})"


class Prompts(Protocol):
    """What a job takes prompts from: `PromptSet`, `Mixture`, or `Curriculum` around either."""

    @property
    def dropped(self) -> int:
        """How many prompts were left out for their length."""

    def __len__(self) -> int:
        """Prompts of all sources, those dropped not counted."""

    def __iter__(self) -> Iterator[Prompt]:
        """Source after source, in file order."""

    def first(self, n: int) -> list[Prompt]:
        """The first `n` of each source, in file order."""

    def by_id(self, prompt_id: int) -> Prompt:
        """The prompt of that `id`; KeyError where there is none or it was dropped."""

    def take(self, n: int) -> list[Prompt]:
        """The next `n` of an endless walk."""

    def state(self) -> dict[str, Any]:
        """Where the walk stands, JSON-able, for `load_state` on the same data and settings."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state()`; UserError where it is of other data."""


class PromptSet:
    """Prompts in file order, and an endless shuffled walk over them.

    Epoch e visits every prompt once, in a permutation that the seed, the source's name and e fix, so an epoch and a
    position say where the walk stands.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int = 0, dropped: int = 0, source: str = "") -> None:
        """Args: prompts: at least one; dropped: how many were left out of them for their length."""
        self.dropped = dropped
        self._prompts = list(prompts)
        self._by_id = {prompt.id: prompt for prompt in self._prompts}
        self._seed, self._source = seed, source
        self._epoch, self._position = 0, 0
        self._order = self._permutation(0)

    @classmethod
    def from_file(
        cls,
        path: str | Path,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        prompt_field: str = "prompt",
        answer_field: str = ANSWER,
        chosen_field: str = "chosen",
        rejected_field: str = "rejected",
        chat_template: bool = False,
        instruction: str = "",
        max_prompt_tokens: int,
        overlong_prompts: Literal["error", "drop"] = "error",
        seed: int = 0,
        tools: Sequence[dict[str, Any]] = (),
        source: str = "",
        first_id: int = 0,
    ) -> Self:
        """Read and tokenise the prompts of a file or folder that `read_records` reads.

        A prompt that is a list of messages goes through the tokenizer's chat template; with
        `chat_template` so does a string, as one user message. Any other string is tokenised as it stands,
        with the special tokens that the tokenizer adds by itself.

        Args:
            chosen_field: where it and `rejected_field` are conversations, a record needs no prompt beside them.
            instruction: appended to prompts that are strings.
            max_prompt_tokens: a longer prompt is an error, or is left out with `overlong_prompts="drop"`.
            seed: of the order in which `take` visits the prompts.
            tools: schemas that a chat template describes to the model.
            source: the name that the prompts bear.
            first_id: the id of the first row.

        Raises:
            UserError: names `file:line` and the remedy.
        """
        located = located_records(path)
        answers = [answer_of(record, answer_field, place) for place, record in located]
        if answer_field != ANSWER and all(answer is None for answer in answers):
            place, record = located[0]
            raise UserError(
                f"{place}: no field '{answer_field}', and none in the lines below; set data.answer_field to one of: "
                f"{', '.join(sorted(record))}"
            )
        values = [prompt_of(record, prompt_field, chosen_field, rejected_field, place) for place, record in located]
        rendered = [
            render(value, tokenizer, chat_template, instruction, place, tools)
            for value, (place, _) in zip(values, located, strict=True)
        ]
        rows = tokenise(rendered, tokenizer)
        for (place, _), row in zip(located, rows, strict=True):
            _check_length(len(row), max_prompt_tokens, overlong_prompts, place)
        columns = zip(rows, rendered, answers, located, strict=True)
        prompts = [
            Prompt(i, tuple(row), text.text, answer, record, source, place)
            for i, (row, text, answer, (place, record)) in enumerate(columns, start=first_id)
            if len(row) <= max_prompt_tokens
        ]
        if not prompts:
            raise UserError(
                f"{path}: all of its {len(located)} prompts are longer than {max_prompt_tokens} tokens; the "
                f"shortest has {min(map(len, rows))}: raise data.max_prompt_tokens to that or more"
            )
        return cls(prompts, seed=seed, dropped=len(located) - len(prompts), source=source)

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, position: int) -> Prompt:
        """The prompt at a position in file order, dropped ones not counted."""
        return self._prompts[position]

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self._prompts)

    def first(self, n: int) -> list[Prompt]:
        """The first `n` prompts in file order."""
        return self._prompts[:n]

    def by_id(self, prompt_id: int) -> Prompt:
        """The prompt of that `id`; KeyError where there is none or it was dropped."""
        return self._by_id[prompt_id]

    def take(self, n: int) -> list[Prompt]:
        """The next `n` prompts of the walk; where an epoch ends the next one goes on, none is skipped."""
        taken: list[Prompt] = []
        while len(taken) < n:
            if self._position == len(self):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._permutation(self._epoch)
            chosen = self._order[self._position : self._position + n - len(taken)]
            taken += [self._prompts[i] for i in chosen]
            self._position += len(chosen)
        return taken

    def state(self) -> dict[str, Any]:
        """Where the walk stands, JSON-able, for `load_state` on a set from the same file and seed."""
        return {"epoch": self._epoch, "position": self._position, **self._identity()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state()`.

        Raises:
            UserError: the state is of another number of prompts or another seed, so of another order.
        """
        check_state(state, self._identity())
        epoch, position = state.get("epoch"), state.get("position")
        if not (isinstance(epoch, int) and isinstance(position, int) and epoch >= 0 and 0 <= position <= len(self)):
            raise UserError(
                f"the checkpoint's walk over {len(self)} prompts stands at prompt {position!r} of epoch {epoch!r}; "
                "it is damaged: move it away to go on from the one before"
            )
        self._epoch, self._position = epoch, position
        self._order = self._permutation(self._epoch)

    def _identity(self) -> dict[str, Any]:
        return {"kind": "set", "prompts": len(self), "seed": self._seed}

    def _permutation(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self._seed, epoch, *self._source.encode()]).permutation(len(self))


def check_state(state: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """UserError where a checkpoint was written with other data than ours."""
    for name, value in ours.items():
        if state.get(name) != value:
            raise UserError(
                f"the checkpoint was written with data of {name}={state.get(name)}, now {name}={value}; "
                "resume with the data settings of the first run, or start a new run"
            )


def _check_length(tokens: int, limit: int, overlong_prompts: str, place: str) -> None:
    if tokens == 0:
        raise UserError(f"{place}: the prompt has no tokens; write at least one character or remove the line")
    if tokens > limit and overlong_prompts == "error":
        raise UserError(
            f"{place}: the prompt has {tokens} tokens, data.max_prompt_tokens is {limit}; "
            "raise it, or leave such prompts out with data.overlong_prompts=drop"
        )
