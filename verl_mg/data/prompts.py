"""Prompts of a file, tokenized once, in an order that depends only on the seed.

record {"prompt": "2+3=", "answer": "5"} in line 1 of train.jsonl
Prompt(id=0, tokens=(8, 16, 9, 17), text="2+3=", answer="5", record={...}, place="train.jsonl:1",
       messages=[{"role": "user", "content": "2+3="}])        with a tokenizer of characters
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

import numpy as np

from verl_mg.data.fields import ANSWER, IMAGES, PROMPT, RecordFields, field_names, value_of
from verl_mg.data.images import ImageLimits, ImageSource, images_of
from verl_mg.data.records import Record, located_records, prepared
from verl_mg.data.rendering import RenderedPrompt, has_image_parts, render, render_with_images, tokenize
from verl_mg.data.trained_turns import TrainedRow, tools_of, trained_rows
from verl_mg.errors import UserError
from verl_mg.images import RowImages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl_mg.data.image_processor import ImageProcessor


@dataclass(frozen=True)
class Prompt:
    """One prompt with its record and answer."""

    id: int
    """Row in the file, from 0, blank lines not counted; neither dropping nor order changes it. With several sources the
    rows of the sources before are added."""
    tokens: tuple[int, ...]  # token ids, `(prompt_length,)`, ready for the model
    text: str  # text that was tokenized, chat template and instruction included
    answer: str | None  # answer field as text; None if the record has none
    record: Record
    source: str = ""  # name of the source; "" if there is only one
    place: str = ""  # place of the record, `file:line`, for errors
    messages: Sequence[dict[str, Any]] = ()
    """The prompt as messages, for agents; a string is one of the user, instruction included."""
    images: Sequence[ImageSource] = ()
    """Images of the prompt, in the order of their placeholders in the tokens; not loaded yet."""
    reward: str = ""
    """Key of the section with the source's reward, such as data.test.aime.reward; "" for the job's reward."""
    turns: Sequence[TrainedRow] = ()
    """Rows that train chosen turns of the conversation; none where the answer is trained."""

    def load_images(self) -> RowImages:
        """Returns the images of the prompt; UserError where one of them cannot be read or decoded."""
        return tuple(image.load() for image in self.images)

    @property
    def where(self) -> str:
        """Place and beginning of the text, for errors."""
        return f"{self.place or f'data row {self.id + 1}'} ({self.text[:40]!r})"


class Prompts(Protocol):
    """Endless sequence of prompts: `PromptSet`, `Mixture`, or `Curriculum` around either."""

    @property
    def dropped(self) -> int:
        """Number of prompts left out for their length."""

    def __len__(self) -> int:
        """Returns the number of prompts of all sources, without dropped ones."""

    def __iter__(self) -> Iterator[Prompt]:
        """Iterates over all prompts, source by source, in file order."""

    def first(self, n: int) -> list[Prompt]:
        """Returns the first `n` prompts of each source, in file order."""

    def by_id(self, prompt_id: int) -> Prompt:
        """Returns the prompt with that `id`. Raises KeyError if there is none or it was dropped."""

    def take(self, n: int) -> list[Prompt]:
        """Returns the next `n` prompts."""

    def state(self) -> dict[str, Any]:
        """Returns the position as JSON, for `load_state` with the same data and settings."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resumes from a `state()`. Raises UserError if it belongs to other data."""


class PromptSet:
    """Prompts in file order, and an endless shuffled sequence of them.

    Epoch e contains every prompt once, in a permutation determined by the seed, the source's name and e, so epoch and
    position are the whole state.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int = 0, dropped: int = 0, source: str = "") -> None:
        """Starts at the first epoch of at least one prompt, in file order; `dropped` were left out for their length."""
        self.dropped = dropped
        self._prompts = list(prompts)
        # Ids, not positions: dropped prompts leave gaps, and ids are the same whatever the limit of length.
        self._by_id = {prompt.id: prompt for prompt in self._prompts}
        self._seed, self._source = seed, source
        self._epoch, self._position = 0, 0
        self._order = self._permutation(0)

    @classmethod
    def from_file(
        cls,
        path: str | Path,
        tokenizer: PreTrainedTokenizerBase,
        *,
        prompt_field: str | None = None,
        answer_field: str | None = None,
        chosen_field: str = "chosen",
        rejected_field: str = "rejected",
        chat_template: bool = False,
        instruction: str = "",
        system_prompt: str = "",
        prepare: str | None = None,
        max_prompt_tokens: int,
        overlong_prompts: Literal["error", "drop"] = "error",
        loss_on: Literal["answer", "last", "all", "flagged"] = "answer",
        seed: int = 0,
        tools: Sequence[dict[str, Any]] = (),
        source: str = "",
        reward: str = "",
        first_id: int = 0,
        report: Callable[[str], None] | None = None,
        processor: ImageProcessor | None = None,
        image_field: str = IMAGES,
        max_image_pixels: int = 1 << 24,
        max_images: int = 8,
    ) -> Self:
        """Reads and tokenizes the prompts of a file or folder. Errors name `file:line` and the remedy.

        A list of messages is rendered by the tokenizer's chat template; with `chat_template` a string is too, as one
        user message, and so is any prompt with images. Any other string is tokenized unchanged, with the special
        tokens that the tokenizer adds.

        Args:
            path: file or folder as in `read_records`.
            tokenizer, processor: of the model; None: a model that reads no images.
            prompt_field, answer_field: fields of prompt and answer; None: as `RecordFields.find` chooses.
            chosen_field, rejected_field: fields of a preference's answers. If both are conversations, a record needs
                no prompt field.
            chat_template: render strings as a user message.
            instruction, system_prompt: text appended to strings, and first message of conversations without a system's.
            prepare: name of a function of a record that returns the one to use, or None to leave it out.
            max_prompt_tokens, overlong_prompts: longest prompt, in tokens; a longer one is an error or is dropped.
            loss_on: what demonstrations train: the answer, or turns of the conversation in the prompt's field, which
                `max_prompt_tokens` then limits as a whole.
            seed, source, first_id: random seed of the order, name of the source, and id of the first row.
            tools: schemas that a chat template describes to the model.
            reward: key of the section with the source's reward; "" for the job's.
            report: receives one line about fields that were found and not configured, unless they are the usual ones.
            image_field: field of the images.
            max_image_pixels, max_images: largest width times height of an image, and number of images of a prompt.
        """
        located = located_records(path)
        if prepare is not None:
            located = prepared(located, prepare)
        ended = prompt_field if loss_on != "answer" else None  # the prompt is what is before the last turn
        fields = RecordFields.find([record for _, record in located], prompt_field, answer_field or ended)
        if report and fields != RecordFields(prompt_field or PROMPT, answer_field or ANSWER):
            report(f"{path}: {fields.description}")
        answers = [fields.answer_of(record, place) for place, record in located]
        if answer_field not in (None, ANSWER) and all(answer is None for answer in answers):
            place, record = located[0]
            raise UserError(
                f"{place}: no field '{answer_field}', here and in all lines below. Set data.answer_field to one of: "
                f"{', '.join(sorted(field_names(record)))}."
            )
        # All lists below have one entry for each record; too long ones are dropped at the end, when ids are given.
        media = (image_field,) if processor else ()
        values = [fields.prompt_of(record, chosen_field, rejected_field, place, media) for place, record in located]
        limits = ImageLimits(max_image_pixels, max_images)
        images = [images_of(record, image_field, place, limits) if processor else () for place, record in located]
        rendered = [
            render_with_images(value, of_prompt, processor, instruction, place, tools, system_prompt)
            if processor and (of_prompt or has_image_parts(value))
            else render(value, tokenizer, chat_template, instruction, place, tools, system_prompt)
            for value, of_prompt, (place, _) in zip(values, images, located, strict=True)
        ]
        rows = tokenize(rendered, tokenizer)
        turns: list[Sequence[TrainedRow]] = [() for _ in located]
        if loss_on != "answer":
            conversations = [value_of(record, fields.prompt) for _, record in located]
            turns = [
                trained_rows(
                    value, loss_on, tokenizer, place, tools_of(record, place) or tools, system_prompt, of_prompt
                )
                for value, of_prompt, (place, record) in zip(conversations, images, located, strict=True)
            ]
        lengths = [
            max(len(row), *(len(turn.tokens) for turn in of_row), 0) for row, of_row in zip(rows, turns, strict=True)
        ]
        what = "prompt" if loss_on == "answer" else "conversation"
        for (place, _), length in zip(located, lengths, strict=True):
            _check_length(length, max_prompt_tokens, overlong_prompts, place, what)
        columns = zip(lengths, rows, rendered, answers, images, turns, located, strict=True)
        prompts = [
            Prompt(i, tuple(row), text.text, answer, record, source, place, text.messages, of_prompt, reward, of_row)
            for i, (length, row, text, answer, of_prompt, of_row, (place, record)) in enumerate(columns, start=first_id)
            if length <= max_prompt_tokens
        ]
        if not prompts:
            raise UserError(
                f"{path}: all {len(located)} prompts are longer than {max_prompt_tokens} tokens; the "
                f"shortest has {min(lengths)}. Raise data.max_prompt_tokens to that or more."
            )
        return cls(prompts, seed=seed, dropped=len(located) - len(prompts), source=source)

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, position: int) -> Prompt:
        """Returns the prompt at a position in file order, dropped ones not counted."""
        return self._prompts[position]

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self._prompts)

    def first(self, n: int) -> list[Prompt]:
        """Returns the first `n` prompts in file order."""
        return self._prompts[:n]

    def by_id(self, prompt_id: int) -> Prompt:
        """Returns the prompt with that `id`. Raises KeyError if there is none or it was dropped."""
        return self._by_id[prompt_id]

    def take(self, n: int) -> list[Prompt]:
        """Returns the next `n` prompts, which may begin in one epoch and end in a later one."""
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
        """Returns epoch and position as JSON, for `load_state` on a set of the same file and seed."""
        return {"epoch": self._epoch, "position": self._position, **self._identity()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resumes from a `state()`; UserError for one of other data or another seed, and so another order."""
        check_state(state, self._identity())
        epoch, position = state.get("epoch"), state.get("position")
        if not (isinstance(epoch, int) and isinstance(position, int) and epoch >= 0 and 0 <= position <= len(self)):
            raise UserError(
                f"checkpoint: damaged: position {position!r} of epoch {epoch!r} with {len(self)} prompts. "
                "Move it away to resume from the one before."
            )
        self._epoch, self._position = epoch, position
        self._order = self._permutation(self._epoch)

    def _identity(self) -> dict[str, Any]:
        return {"kind": "set", "prompts": len(self), "seed": self._seed}

    def _permutation(self, epoch: int) -> np.ndarray:
        # Made of seed, epoch and source each time: a checkpoint needs no state of a generator, and sources of one size
        # have different orders.
        return np.random.default_rng([self._seed, epoch, *self._source.encode()]).permutation(len(self))


def check_state(state: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raises UserError if a checkpoint was written with other data.

    Args:
        state: state of the checkpoint.
        ours: the part of the state that identifies the data of this run.
    """
    for name, value in ours.items():
        if state.get(name) != value:
            raise UserError(
                f"checkpoint: written with data of {name}={state.get(name)}, now {name}={value}. "
                "Resume with the data settings of the first run, or start a new run."
            )


def _check_length(tokens: int, limit: int, overlong_prompts: str, place: str, what: str) -> None:
    if tokens == 0:
        raise UserError(f"{place}: the prompt has no tokens. Write at least one character or remove the line.")
    if tokens > limit and overlong_prompts == "error":
        raise UserError(
            f"{place}: the {what} has {tokens} tokens, data.max_prompt_tokens is {limit}. "
            f"Raise it, or leave such {what}s out with data.overlong_prompts=drop."
        )


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FIELD = re.compile(r"\{(\w+)\}")


def teacher_prompt(
    prompt: Prompt,
    template: str | None,
    tokenizer: PreTrainedTokenizerBase,
    key: str,
    tools: Sequence[dict[str, Any]] = (),
) -> list[int]:
    """Returns the tokens of a prompt as a teacher reads it.

    The template takes the place of the prompt's text, or of its last message, which the chat template then renders.

    Args:
        prompt: the prompt of the student; UserError if it has images or misses a field of the template.
        template: text with {prompt}, {answer} and names of fields of the record in braces; None: the prompt as it
            is.
        tokenizer: tokenizer of the teacher.
        key: configuration key of the template, for errors.
        tools: schemas that a chat template describes to the model.
    """
    if prompt.images:
        raise UserError(f"{prompt.where}: {key} is for prompts without images. Leave such records out.")
    if isinstance(prompt.messages[-1]["content"], str) and is_templated(prompt):
        *context, last = prompt.messages
        text = _filled(template, prompt, last["content"], key)
        rendered = render([*context, last | {"content": text}], tokenizer, True, "", prompt.where, tools)
    else:
        rendered = RenderedPrompt(_filled(template, prompt, prompt.text, key), False, [])
    return tokenize([rendered], tokenizer)[0]


def is_templated(prompt: Prompt) -> bool:
    """Returns whether a chat template rendered a prompt; otherwise its text is its only message's."""
    return len(prompt.messages) != 1 or prompt.messages[0]["content"] != prompt.text


def _filled(template: str | None, prompt: Prompt, text: str, key: str) -> str:
    # All fields are replaced in one pass: braces in a prompt are text.
    if template is None:
        return text

    def value_of(match: re.Match[str]) -> str:
        name = match[1]
        value = {"prompt": text, "answer": prompt.answer}.get(name, prompt.record.get(name))
        if value is None:
            known = ", ".join(sorted({"prompt", "answer", *prompt.record}))
            raise UserError(f"{prompt.where}: no field {name!r} for {key}. Write one of: {known}.")
        return str(value)

    return _FIELD.sub(value_of, template)
