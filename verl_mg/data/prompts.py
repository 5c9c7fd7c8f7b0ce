"""Prompts of a file, tokenized once, in an order that depends only on the seed, and mixtures of several by weight.

record {"prompt": "2+3=", "answer": "5"} in line 1 of train.jsonl
Prompt(id=0, tokens=(8, 16, 9, 17), text="2+3=", answer="5", record={...}, place="train.jsonl:1",
       messages=[{"role": "user", "content": "2+3="}])        with a tokenizer of characters

Mixture of weights a 3, b 1:   a a b a | a a b a | ...   of n prompts 3 n / 4 come from a, within one prompt
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from math import lcm
from typing import TYPE_CHECKING, Any

from verl_mg.data.file_formats import Record
from verl_mg.data.images import ImageSource
from verl_mg.data.rendering import RenderedPrompt, render, tokenize
from verl_mg.data.trained_turns import TrainedRow
from verl_mg.errors import UserError
from verl_mg.images import RowImages
from verl_mg.lazy_import import lazy_import

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerBase
else:
    np = lazy_import("numpy")

_FIELD = re.compile(r"\{(\w+)\}")


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
    templated: bool = False  # whether a chat template wrote the text

    def load_images(self) -> RowImages:
        """Returns the images of the prompt; UserError where one of them cannot be read or decoded."""
        return tuple(image.load() for image in self.images)

    @property
    def where(self) -> str:
        """Place and beginning of the text, for errors."""
        return f"{self.place or f'data row {self.id + 1}'} ({self.text[:40]!r})"


class PromptSet:
    """Prompts in file order, and an endless shuffled sequence of them.

    Epoch e contains every prompt once, in a permutation determined by the seed, the source's name and e, so epoch and
    position are the whole state.
    """

    def __init__(
        self, prompts: Sequence[Prompt], *, seed: int = 0, dropped: int = 0, source: str = "", records: str = ""
    ) -> None:
        """Starts at the first epoch of at least one prompt, in file order; `dropped` were left out for their length.

        `records` is a digest of all records, dropped ones included, by which changed data are noticed on resume.
        """
        self.dropped = dropped
        self._prompts = list(prompts)
        # Ids, not positions: dropped prompts leave gaps, and ids are the same whatever the limit of length.
        self._by_id = {prompt.id: prompt for prompt in self._prompts}
        self._seed, self._source, self._records = seed, source, records
        self._epoch, self._position = 0, 0
        self._order = self._permutation(0)

    @property
    def digests(self) -> dict[str, str]:
        """Digest of the records, by the name of the source."""
        return {self._source: self._records}

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
        return {"epoch": self._epoch, "position": self._position, "records": self._records, **self._identity()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resumes from a `state()`; UserError for one of other data or another seed, and so another order."""
        check_state(state, self._identity())
        if state.get("records", self._records) != self._records:  # earlier versions wrote none
            name = f"data.train.{self._source}" if self._source else "data.train"
            raise UserError(
                f"checkpoint: the records of {name} are others than when it was written, although as many. Restore "
                "the data files of the first run, or start a new run."
            )
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
    """Raises UserError if a checkpoint was written with other data."""
    for name, value in ours.items():
        if state.get(name) != value:
            raise UserError(
                f"checkpoint: written with data of {name}={state.get(name)}, now {name}={value}. "
                "Resume with the data settings of the first run, or start a new run."
            )


def teacher_prompt(
    prompt: Prompt,
    template: str | None,
    tokenizer: PreTrainedTokenizerBase,
    key: str,
    tools: Sequence[dict[str, Any]] = (),
) -> list[int]:
    """Returns the tokens of a prompt as a teacher reads it: the template replaces its text, or its last message.

    A template is text with {prompt}, {answer} and names of fields of the record in braces.
    """
    if prompt.images:
        raise UserError(f"{prompt.where}: {key} is for prompts without images. Leave such records out.")
    if prompt.templated and isinstance(prompt.messages[-1]["content"], str):
        *context, last = prompt.messages
        text = _filled(template, prompt, last["content"], key)
        rendered = render([*context, last | {"content": text}], tokenizer, True, "", prompt.where, tools)
    else:
        rendered = RenderedPrompt(_filled(template, prompt, prompt.text, key), False, [])
    return tokenize([rendered], tokenizer)[0]


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


class Mixture:
    """Sets by name, each with its share of the prompts and its separately shuffled epochs."""

    def __init__(self, sets: Mapping[str, PromptSet], weights: Mapping[str, float]) -> None:
        """Starts at the first epoch of every set; weights are above 0, and no prompt id is in two sets."""
        self._sets = dict(sets)
        self._given = [[name, float(weights[name])] for name in self._sets]
        # As integers made from the decimal digits: 0.1 and 0.2 are then exactly 1 to 2, however long the run.
        exact = {name: Fraction(str(weight)) for name, weight in self._given}
        scale = lcm(*(weight.denominator for weight in exact.values()))
        self._weights = {name: int(weight * scale) for name, weight in exact.items()}
        self._taken = dict.fromkeys(self._sets, 0)
        self._by_id = {prompt.id: prompt for prompt in self}
        assert len(self._by_id) == len(self), "two sources share a prompt id"

    @property
    def dropped(self) -> int:
        """Number of prompts of all sources left out for their length."""
        return sum(prompts.dropped for prompts in self._sets.values())

    @property
    def digests(self) -> dict[str, str]:
        """Digests of the records, by the name of the source."""
        return {name: digest for prompts in self._sets.values() for name, digest in prompts.digests.items()}

    def __len__(self) -> int:
        return sum(map(len, self._sets.values()))

    def __iter__(self) -> Iterator[Prompt]:
        return chain.from_iterable(self._sets.values())

    def first(self, n: int) -> list[Prompt]:
        """Returns the first `n` prompts of each source, in file order."""
        return [prompt for prompts in self._sets.values() for prompt in prompts.first(n)]

    def by_id(self, prompt_id: int) -> Prompt:
        """Returns the prompt with that `id`. Raises KeyError if there is none or it was dropped."""
        return self._by_id[prompt_id]

    def take(self, n: int, draw: Callable[[PromptSet, int], list[Prompt]] = PromptSet.take) -> list[Prompt]:
        """Returns the next `n` prompts, sources interleaved."""
        order = [self._next_source() for _ in range(n)]
        drawn = {name: iter(draw(self._sets[name], count)) for name, count in Counter(order).items()}
        return [next(drawn[name]) for name in order]

    def state(self) -> dict[str, Any]:
        """Returns the position in every source as JSON, for `load_state` with the same sources and weights."""
        sources = {name: prompts.state() for name, prompts in self._sets.items()}
        return self._identity() | {"taken": dict(self._taken), "sources": sources}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resumes every source from a `state()`; UserError for one of other sources, weights or seed."""
        check_state(state, self._identity())
        for name, prompts in self._sets.items():
            prompts.load_state(state["sources"][name])
        self._taken = dict(state["taken"])

    def _identity(self) -> dict[str, Any]:
        return {"kind": "mixture", "weights": self._given}

    def _next_source(self) -> str:
        turn, total = sum(self._taken.values()) + 1, sum(self._weights.values())
        # The source that misses most of its share, of equals the first: none is ever a whole prompt ahead, and every
        # iteration has the configured mixture, which random sampling has only on average.
        name = max(self._sets, key=lambda name: self._weights[name] * turn - total * self._taken[name])
        self._taken[name] += 1
        return name


def longest_row(prompts: Iterable[Prompt], limits: Mapping[str, int], limit: int, positions: int) -> int:
    """Returns the most tokens that a prompt and its response have, which must be within a model's positions.

    New tokens are at most `limits` by the name of a set, and `limit` elsewhere.
    """
    longest = 0
    for prompt in prompts:
        new = limits.get(prompt.source, limit)
        if (longest := max(longest, len(prompt.tokens) + new)) > positions:
            raise UserError(
                f"{prompt.place}: the prompt has {len(prompt.tokens)} tokens, with max_new_tokens={new} that is more "
                f"than the {positions} positions of the model; lower rollout.max_new_tokens or that of the set, or "
                "lower data.max_prompt_tokens with data.overlong_prompts=drop"
            )
    return longest
