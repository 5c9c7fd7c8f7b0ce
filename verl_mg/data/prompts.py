"""The prompts of a file, tokenised once, and taken in an order that a seed fixes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from verl_mg.data.records import Record, located_records
from verl_mg.data.rendering import render, tokenise
from verl_mg.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        id: its row in the file, from 0, blank lines not counted; neither dropping nor order changes it.
        tokens: `(prompt length,)` token ids, ready for the model.
        text: what was tokenised, so with the chat template or the instruction in it.
        answer: the answer field as text, whole; None where the record has none.
        record: the record as read.
    """

    id: int
    tokens: tuple[int, ...]
    text: str
    answer: str | None
    record: Record


class PromptSet:
    """Prompts in file order, and an endless shuffled walk over them.

    Epoch e visits every prompt once, in a permutation that the seed and e fix, so an epoch and a position
    say where the walk stands.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int = 0, dropped: int = 0) -> None:
        """Args: prompts: at least one; dropped: how many were left out of them for their length."""
        self.dropped = dropped
        self._prompts = list(prompts)
        self._by_id = {prompt.id: prompt for prompt in self._prompts}
        self._seed = seed
        self._epoch, self._position = 0, 0
        self._order = self._permutation(0)

    @classmethod
    def from_file(
        cls,
        path: str | Path,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        prompt_field: str = "prompt",
        answer_field: str = "answer",
        chat_template: bool = False,
        instruction: str = "",
        max_prompt_tokens: int,
        too_long: Literal["error", "drop"] = "error",
        seed: int = 0,
        tools: Sequence[dict[str, Any]] = (),
    ) -> Self:
        """Read and tokenise the prompts of a `.jsonl`, `.json` (lines) or `.parquet` file.

        A prompt that is a list of messages goes through the tokenizer's chat template; with
        `chat_template` so does a string, as one user message. Any other string is tokenised as it stands,
        with the special tokens that the tokenizer adds by itself.

        Args:
            instruction: appended to prompts that are strings.
            max_prompt_tokens: a longer prompt is an error, or is left out with `too_long="drop"`.
            seed: of the order in which `take` visits the prompts.
            tools: schemas that a chat template describes to the model.

        Raises:
            UserError: names `file:line` and the remedy.
        """
        located = located_records(path)
        answers = [_answer(record, answer_field, place) for place, record in located]
        rendered = [
            render(_field(record, prompt_field, place), tokenizer, chat_template, instruction, place, tools)
            for place, record in located
        ]
        rows = tokenise(rendered, tokenizer)
        for (place, _), row in zip(located, rows, strict=True):
            _check_length(len(row), max_prompt_tokens, too_long, place)
        columns = zip(rows, rendered, answers, located, strict=True)
        prompts = [
            Prompt(i, tuple(row), text.text, answer, record)
            for i, (row, text, answer, (_, record)) in enumerate(columns)
            if len(row) <= max_prompt_tokens
        ]
        if not prompts:
            raise UserError(
                f"{path}: all of its {len(located)} prompts are longer than {max_prompt_tokens} tokens; the "
                f"shortest has {min(map(len, rows))}: raise data.max_prompt_tokens to that or more"
            )
        return cls(prompts, seed=seed, dropped=len(located) - len(prompts))

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, position: int) -> Prompt:
        """The prompt at a position in file order, dropped ones not counted."""
        return self._prompts[position]

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self._prompts)

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

    def state(self) -> dict[str, int]:
        """Where the walk stands, JSON-able, for `load_state` on a set from the same file and seed."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self._seed,
            "prompts": len(self),
        }

    def load_state(self, state: dict[str, int]) -> None:
        """Go on from a `state()`.

        Raises:
            UserError: the state is of another number of prompts or another seed, so of another order.
        """
        for name, ours in (("prompts", len(self)), ("seed", self._seed)):
            if state[name] != ours:
                raise UserError(
                    f"the checkpoint was written with data of {name}={state[name]}, now {name}={ours}; "
                    "resume with the data settings of the first run, or start a new run"
                )
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._permutation(self._epoch)

    def _permutation(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self._seed, epoch]).permutation(len(self))


def _field(record: Record, name: str, place: str) -> Any:
    if record.get(name) is None:
        raise UserError(
            f"{place}: no field '{name}'; set data.prompt_field to one of those there: {', '.join(record)}"
        )
    return record[name]


def _answer(record: Record, name: str, place: str) -> str | None:
    value = record.get(name)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float):
        return str(value)
    raise UserError(f"{place}: the answer '{name}' is a {type(value).__name__}; write a string or a number")


def _check_length(tokens: int, limit: int, too_long: str, place: str) -> None:
    if tokens == 0:
        raise UserError(f"{place}: the prompt has no tokens; write at least one character or remove the line")
    if tokens > limit and too_long == "error":
        raise UserError(
            f"{place}: the prompt has {tokens} tokens, data.max_prompt_tokens is {limit}; "
            "raise it, or leave such prompts out with data.too_long=drop"
        )
