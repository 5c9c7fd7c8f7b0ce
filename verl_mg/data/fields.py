"""Fields of a record that are its prompt and its answer, in the layouts of this project and of others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from verl_mg.data.records import Record
from verl_mg.data.rendering import check_same_context, content_of, context_of, is_conversation
from verl_mg.errors import UserError

PROMPT, ANSWER = "prompt", "answer"  # fields that are read if nothing else is written and records have them
MESSAGES = "messages"  # field of a conversation that ends with its answer, the format of OpenAI's fine-tuning
GROUND_TRUTH = "reward_model.ground_truth"  # field of the answer in Parquet files for verl
LABEL = "label"  # field of the answer in JSONL files for slime
IMAGES = "images"  # field of verl's and TRL's records with the images that its prompt refers to
MEDIA = (IMAGES, "videos", "audios")  # fields of verl's records to which prompts refer by `<image>` and the like


@dataclass(frozen=True)
class RecordFields:
    """Names of the fields of prompt and answer; a dot separates a field from one inside it."""

    prompt: str
    answer: str

    @classmethod
    def find(cls, records: Sequence[Record], prompt: str | None, answer: str | None) -> RecordFields:
        """Chooses the fields that a set of records has; configured ones are never replaced.

        The prompt is `prompt`, or else `messages`. The answer is the first of `answer`, `reward_model.ground_truth`
        and `label` that a record has, or else the last assistant message of `messages`.
        """
        # From all records: a field that only the first one misses must not change the layout of the set.
        prompt = prompt or next((name for name in (PROMPT, MESSAGES) if _is_in(records, name)), PROMPT)
        otherwise = MESSAGES if prompt == MESSAGES else ANSWER
        candidates = (ANSWER, GROUND_TRUTH, LABEL)
        answer = answer or next((name for name in candidates if _is_in(records, name)), otherwise)
        return cls(prompt, answer)

    @property
    def description(self) -> str:
        """Returns in words which fields are read."""
        answer = f"the last assistant message of '{MESSAGES}'" if self.answer == MESSAGES else f"'{self.answer}'"
        return f"prompts from '{self.prompt}', answers from {answer}"

    def prompt_of(self, record: Record, chosen: str, rejected: str, place: str, media: Sequence[str] = ()) -> Any:
        """Returns the prompt of a record: a string or messages, not yet validated.

        If the record has no such field but `chosen` and `rejected` are whole conversations, or if the prompt's field
        is `chosen`, the prompt is the messages of both before their last one. The prompt in `messages` is what comes
        before an assistant message at the end.
        """
        # A prompt whose image is dropped without a word would be trained as if it could be answered without.
        unread = (name for name in MEDIA if name not in media and isinstance(record.get(name), list) and record[name])
        if field := next(unread, None):
            raise UserError(
                f"{place}: the record has '{field}', which the model does not read. Leave out such records, or the "
                "field if their prompts are complete without it."
            )
        value = value_of(record, self.prompt)
        if value is None or self.prompt == chosen:
            contexts = [context_of(record.get(field)) for field in (chosen, rejected)]
            if all(contexts):
                check_same_context((contexts[0], contexts[1]), chosen, rejected, place)
                return contexts[0]
        if value is None:
            raise UserError(
                f"{place}: no field '{self.prompt}'. Set data.prompt_field to one of: {', '.join(field_names(record))}."
            )
        if self.prompt in (MESSAGES, self.answer) and is_conversation(value) and value[-1]["role"] == "assistant":
            return value[:-1]
        return value

    def answer_of(self, record: Record, place: str) -> str | None:
        """Returns the answer of a record as text; None if it has none."""
        value = value_of(record, self.answer)
        if is_conversation(value):
            value = content_of(value[-1], place) if value[-1]["role"] == "assistant" else None
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, int | float | Decimal):  # Decimal: of Parquet files
            return str(value)
        # Answers are texts: what verl's or slime's records give as a list or mapping is written as JSON.
        if self.answer in (GROUND_TRUTH, LABEL) and isinstance(value, list | dict):
            return json.dumps(value, ensure_ascii=False, default=str)
        raise UserError(
            f"{place}: the answer '{self.answer}' is a {type(value).__name__}. Write a string or a number, or set "
            f"data.answer_field to one of: {', '.join(field_names(record))}."
        )


def value_of(record: Record, name: str) -> Any:
    """Returns the value of a field, None where there is none: `a.b` is the field `b` of `a` unless `a.b` is a field."""
    if name in record or "." not in name:
        return record.get(name)
    value: Any = record
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def field_names(record: Record) -> list[str]:
    """Returns the names of a record's fields and of the fields inside them."""
    return [name for field, value in record.items() for name in (field, *_inside(field, value))]


def _inside(field: str, value: Any) -> list[str]:
    return [f"{field}.{name}" for name in value] if isinstance(value, dict) else []


def _is_in(records: Sequence[Record], name: str) -> bool:
    return any(value_of(record, name) is not None for record in records)
