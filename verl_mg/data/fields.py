"""The fields of a record: the prompt, its answer, and the two answers of a preference."""

from typing import Any

from verl_mg.data.records import Record
from verl_mg.data.rendering import is_conversation
from verl_mg.errors import UserError


def prompt_of(record: Record, name: str, chosen: str, rejected: str, place: str) -> Any:
    """The prompt field of a record: a string or messages, still unchecked.

    Where the record has no such field but `chosen` and `rejected` are whole conversations, or where `name` is `chosen`,
    the prompt is what both say before their last message.
    """
    value = record.get(name)
    if value is None or name == chosen:
        begun = [context_of(record.get(field)) for field in (chosen, rejected)]
        if all(begun):
            check_same_context(begun[0], begun[1], chosen, rejected, place)
            return begun[0]
    if value is None:
        raise UserError(f"{place}: no field '{name}'; set data.prompt_field to one of those there: {', '.join(record)}")
    return value


def answer_of(record: Record, name: str, place: str) -> str | None:
    """The answer field as text, whole; None where the record has none."""
    value = record.get(name)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float):
        return str(value)
    raise UserError(f"{place}: the answer '{name}' is a {type(value).__name__}; write a string or a number")


def choice_of(record: Record, name: str, field: str, place: str) -> str:
    """The text of one answer of a preference: a string, or the content of the last of several messages.

    Args:
        name: of the field in the record; `field`: of the setting that names it, for errors.
    """
    value = record.get(name)
    if value is None:
        raise UserError(f"{place}: no field '{name}'; set data.{field} to one of: {', '.join(sorted(record))}")
    if is_conversation(value) and value[-1]["role"] == "assistant":
        value = value[-1]["content"]
    if not isinstance(value, str) or not value:
        raise UserError(
            f"{place}: '{name}' is no answer; write a string, or messages of which the last is "
            '{"role": "assistant", "content": "..."}, ' + f"not {record[name]!r:.60}"
        )
    return value


def context_of(value: Any) -> list[dict[str, Any]]:
    """The messages before the last one; none where the value is no conversation."""
    return value[:-1] if is_conversation(value) else []


def check_same_context(
    one: list[dict[str, Any]], other: list[dict[str, Any]], chosen: str, rejected: str, place: str
) -> None:
    """UserError where two conversations part before their last message."""
    if one != other:
        raise UserError(
            f"{place}: '{chosen}' and '{rejected}' differ before their last message; "
            "write a pair as two answers to one prompt"
        )
