"""Prompts of a job, from the section `data` of the configuration.

The fields of a record that are its prompt and its answer are found in the layouts of this project and of others.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from verl_mg.config import DataConfig, SourceConfig
from verl_mg.data.file_formats import Record, plain
from verl_mg.data.images import ImageLimits, ImageSource, images_of
from verl_mg.data.prompt_feed import Curriculum, Prompts
from verl_mg.data.prompts import Mixture, Prompt, PromptSet
from verl_mg.data.records import located_records, prepared
from verl_mg.data.rendering import (
    RenderedPrompt,
    check_same_context,
    content_of,
    context_of,
    fault_of,
    has_image_parts,
    is_conversation,
    render,
    render_with_images,
    tokenize,
    unwritten_tokens,
)
from verl_mg.data.trained_turns import TrainedRow, tools_of, trained_rows
from verl_mg.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl_mg.data.image_processor import ImageProcessor

Located = tuple[str, Record]
OF_SOURCE = {"prompt_field", "answer_field", "instruction", "chat_template", "system_prompt", "prepare"}
"""Keys of a source that replace the same keys of `data`."""

PROMPT, ANSWER = "prompt", "answer"  # fields that are read if nothing else is written and records have them
MESSAGES = "messages"  # field of a conversation that ends with its answer, the format of OpenAI's fine-tuning
GROUND_TRUTH = "reward_model.ground_truth"  # field of the answer in Parquet files for verl
LABEL = "label"  # field of the answer in JSONL files for slime
IMAGES = "images"  # field of verl's and TRL's records with the images that its prompt refers to
EXACT = 2.0**53  # floats below it, of a whole value, are exact
MEDIA = (IMAGES, "videos", "audios")  # fields of verl's records to which prompts refer by `<image>` and the like


def reward_key(which: str, name: str) -> str:
    """Returns the key of the section with the reward of a source.

    Args:
        which, name: train or test, and the name of the source.
    """
    return f"data.{which}.{name}.reward"


def read_prompts(
    data: DataConfig,
    which: Literal["train", "test"],
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int = 0,
    tools: Sequence[dict[str, Any]] = (),
    report: Callable[[str], None] | None = None,
    processor: ImageProcessor | None = None,
) -> Prompts:
    """Reads the prompts of `data.train` or `data.test`. Errors name `file:line` or the key, and the remedy.

    Args:
        data, which: the section `data`, and its key to read.
        tokenizer, processor: of the model; None: a model that reads no images.
        seed: random seed of the order.
        tools: schemas that a chat template describes to the model.
        report: receives one line for each source whose fields were found and not configured.

    Returns:
        A `PromptSet` for a path, a `Mixture` for sources by name; for training a `Curriculum` around either if
        `data.curriculum` excludes any pass rate.
    """
    where = data.train if which == "train" else data.test
    if where is None:
        raise UserError("data.test: not set. Write data.test=FILE.")
    reader = _Reader(data, which, tokenizer, processor, seed, tools, report)
    if not isinstance(where, dict):
        prompts: PromptSet | Mixture = reader.read("", SourceConfig(path=where))
    else:
        sets: dict[str, PromptSet] = {}
        for name, source in where.items():
            # Ids do not change with the limit of length.
            rows = sum(len(part) + part.dropped for part in sets.values())
            sets[name] = reader.read(name, source, rows)
        prompts = Mixture(sets, {name: source.weight for name, source in where.items()})
    band = data.curriculum
    if which == "test" or (band.low <= 0 and band.high >= 1):
        return prompts
    return Curriculum(prompts, **band.model_dump())


@dataclass(frozen=True)
class _RecordFields:
    """Names of the fields of prompt and answer; a dot separates a field from one inside it."""

    prompt: str
    answer: str

    @classmethod
    def find(cls, records: Sequence[Record], prompt: str | None, answer: str | None) -> _RecordFields:
        """Chooses the fields that a set of records has; configured names, where they are not None, are never replaced.

        The prompt is `prompt`, or else `messages`. The answer is the first of `answer`, `reward_model.ground_truth`
        and `label` that a record has, or else the last assistant message of `messages`.
        """
        # From all records: a field that only the first one misses must not change the layout of the set.
        prompt = prompt or next((name for name in (PROMPT, MESSAGES) if _is_in(records, name)), PROMPT)
        otherwise = MESSAGES if prompt == MESSAGES else ANSWER
        candidates = (ANSWER, GROUND_TRUTH, LABEL)
        answer = answer or next((name for name in candidates if _is_in(records, name)), otherwise)
        return cls(prompt, answer)

    def __str__(self) -> str:
        answer = f"the last assistant message of '{MESSAGES}'" if self.answer == MESSAGES else f"'{self.answer}'"
        return f"prompts from '{self.prompt}', answers from {answer}"

    def prompt_of(self, record: Record, chosen: str, rejected: str, place: str, media: Sequence[str] = ()) -> Any:
        """Returns the prompt of a record: a string or messages, not yet validated.

        If the record has no such field but `chosen` and `rejected` are whole conversations, or if the prompt's field
        is `chosen`, the prompt is the messages of both before their last one. The prompt in `messages` is what comes
        before an assistant message at the end. `media` are the fields of MEDIA that the model reads.
        """
        # A prompt whose image is dropped without a word would be trained as if it could be answered without.
        unread = (name for name in MEDIA if name not in media and isinstance(record.get(name), list) and record[name])
        if field := next(unread, None):
            raise UserError(
                f"{place}: the record has '{field}', which the model does not read. Leave out such records, or the "
                "field if their prompts are complete without it."
            )
        value = _value_of(record, self.prompt)
        if value is None or self.prompt == chosen:
            contexts = [context_of(record.get(field)) for field in (chosen, rejected)]
            if all(contexts):
                check_same_context((contexts[0], contexts[1]), chosen, rejected, place)
                return contexts[0]
        if value is None:
            raise UserError(
                f"{place}: no field '{self.prompt}'. Set data.prompt_field to one of: "
                f"{', '.join(_field_names(record))}."
            )
        if self.prompt in (MESSAGES, self.answer) and is_conversation(value) and value[-1]["role"] == "assistant":
            return value[:-1]
        return value

    def answer_of(self, record: Record, place: str) -> str | None:
        """Returns the answer of a record as text; None if it has none."""
        value = _value_of(record, self.answer)
        if is_conversation(value):
            value = content_of(value[-1], place) if value[-1]["role"] == "assistant" else None
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, float) and value.is_integer() and abs(value) < EXACT:
            return str(int(value))  # tables turn integers into 5.0 where one of them is missing
        if isinstance(value, int | float):
            return str(value)
        # Answers are texts: what verl's or slime's records give as a list or mapping is written as JSON.
        if self.answer in (GROUND_TRUTH, LABEL) and isinstance(value, list | dict):
            return json.dumps(value, ensure_ascii=False, default=str)
        if self.answer == MESSAGES:
            raise UserError(f"{place}: {fault_of(value, 'a conversation')}. Write messages with texts or calls.")
        raise UserError(
            f"{place}: the answer '{self.answer}' is a {type(value).__name__}. Write a string or a number, or set "
            f"data.answer_field to one of: {', '.join(_field_names(record))}."
        )


def _value_of(record: Record, name: str) -> Any:
    """Returns the value of a field, None where there is none: `a.b` is the field `b` of `a` unless `a.b` is a field."""
    if name in record or "." not in name:
        return record.get(name)
    value: Any = record
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _field_names(record: Record) -> list[str]:
    """Returns the names of a record's fields, and of the fields inside of a mapping in its place."""
    inside = {field: [f"{field}.{inner}" for inner in value] if isinstance(value, dict) else [field]
              for field, value in record.items()}  # fmt: skip
    return [name for names in inside.values() for name in names]


def _digest(located: Iterable[Located]) -> str:
    """Returns a digest of the contents of records; which file they are from, and where that is, does not matter."""
    digest, folder_of = hashlib.blake2b(digest_size=16), functools.cache(lambda file: Path(file).parent.resolve())
    for place, record in located:
        text = json.dumps(plain(record), sort_keys=True, ensure_ascii=False, default=_digest_of_value)
        # After a move, absolute paths such as of Harbor's tasks begin with another folder.
        folder = json.dumps(str(folder_of(place.rpartition(":")[0])), ensure_ascii=False)
        text = text.replace(folder, '"."').replace(f"{folder[:-1]}/", '"./')
        digest.update(text.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _digest_of_value(value: Any) -> str:
    # Not `repr`, in which an object may have its address.
    is_bytes = isinstance(value, bytes | bytearray | memoryview)
    return hashlib.blake2b(value).hexdigest() if is_bytes else type(value).__name__


def _is_in(records: Sequence[Record], name: str) -> bool:
    return any(_value_of(record, name) is not None for record in records)


@dataclass(frozen=True)
class _Reader:
    """Reads and tokenizes the prompts of sources, with the arguments of `read_prompts`."""

    data: DataConfig
    which: str
    tokenizer: PreTrainedTokenizerBase
    processor: ImageProcessor | None
    seed: int
    tools: Sequence[dict[str, Any]]
    report: Callable[[str], None] | None

    def read(self, name: str, source: SourceConfig, first_id: int = 0) -> PromptSet:
        """Reads the prompts of a source, whose ids begin with `first_id`."""
        data = self.data.model_copy(update=source.model_dump(include=OF_SOURCE, exclude_none=True))
        # An evaluation generates answers; it trains no turns.
        loss_on = data.loss_on if self.which == "train" else "answer"
        located = located_records(source.path)
        if data.prepare is not None:
            located = prepared(located, data.prepare)
        fields = self._fields(data, loss_on, source.path, located)
        # All lists have one entry for each record; too long ones are dropped at the end, when ids are given.
        answers = [fields.answer_of(record, place) for place, record in located]
        if data.answer_field not in (None, ANSWER) and all(answer is None for answer in answers):
            place, record = located[0]
            raise UserError(
                f"{place}: no field '{data.answer_field}', here and in all lines below. Set data.answer_field to one "
                f"of: {', '.join(sorted(_field_names(record)))}."
            )
        limits = ImageLimits(data.max_image_pixels, data.max_images)
        images = [
            images_of(record, data.image_field, place, limits) if self.processor else () for place, record in located
        ]
        texts = self._texts(data, fields, located, images)
        rows = tokenize(texts, self.tokenizer)
        if self.report and (line := unwritten_tokens(texts, rows, self.tokenizer)):
            self.report(f"{source.path}: {line}")
        turns: list[Sequence[TrainedRow]] = [() for _ in located]
        if loss_on != "answer":
            turns = [
                trained_rows(
                    _value_of(record, fields.prompt),
                    loss_on,
                    self.tokenizer,
                    place,
                    tools_of(record, place) or self.tools,
                    data.system_prompt,
                    of_prompt,
                )
                for of_prompt, (place, record) in zip(images, located, strict=True)
            ]
        lengths = [
            max(len(row), *(len(turn.tokens) for turn in of_row), 0) for row, of_row in zip(rows, turns, strict=True)
        ]
        limit, what = data.max_prompt_tokens, "prompt" if loss_on == "answer" else "conversation"
        for (place, _), length in zip(located, lengths, strict=True):
            if length == 0:
                raise UserError(f"{place}: the prompt has no tokens. Write at least one character or remove the line.")
            if length > limit and data.overlong_prompts == "error":
                raise UserError(
                    f"{place}: the {what} has {length} tokens, data.max_prompt_tokens is {limit}. "
                    f"Raise it, or leave such {what}s out with data.overlong_prompts=drop."
                )
        reward = reward_key(self.which, name) if source.reward else ""
        columns = zip(lengths, rows, texts, answers, images, turns, located, strict=True)
        prompts = [
            Prompt(
                i,
                tuple(row),
                text.text,
                answer,
                record,
                name,
                place,
                text.messages,
                of_prompt,
                reward,
                of_row,
                text.templated,
            )
            for i, (length, row, text, answer, of_prompt, of_row, (place, record)) in enumerate(columns, start=first_id)
            if length <= limit
        ]
        if not prompts:
            raise UserError(
                f"{source.path}: all {len(located)} prompts are longer than {limit} tokens; the shortest has "
                f"{min(lengths)}. Raise data.max_prompt_tokens to that or more."
            )
        dropped, digest = len(located) - len(prompts), _digest(located)
        return PromptSet(prompts, seed=self.seed, dropped=dropped, source=name, records=digest)

    def _fields(self, data: DataConfig, loss_on: str, path: Path, located: Sequence[Located]) -> _RecordFields:
        ended = data.prompt_field if loss_on != "answer" else None  # the prompt is what is before the last turn
        records = [record for _, record in located]
        fields = _RecordFields.find(records, data.prompt_field, data.answer_field or ended)
        if self.report and fields != _RecordFields(data.prompt_field or PROMPT, data.answer_field or ANSWER):
            self.report(f"{path}: {fields}")
        return fields

    def _texts(
        self,
        data: DataConfig,
        fields: _RecordFields,
        located: Sequence[Located],
        images: Sequence[Sequence[ImageSource]],
    ) -> list[RenderedPrompt]:
        """Renders messages by the chat template, strings too if they have images or with `chat_template`."""
        media = (data.image_field,) if self.processor else ()
        texts = []
        for (place, record), of_prompt in zip(located, images, strict=True):
            value = fields.prompt_of(record, data.chosen_field, data.rejected_field, place, media)
            common = (data.instruction, place, self.tools, data.system_prompt)
            if self.processor and (of_prompt or has_image_parts(value)):
                texts.append(render_with_images(value, of_prompt, self.processor, *common))
            else:
                texts.append(render(value, self.tokenizer, data.chat_template, *common))
        return texts
