"""Reading of requests: JSON, fields and texts, with one line that names the field of what is wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from itertools import takewhile
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from verl_mg.agents.call import RequestError

MAX_COUNT = 2**31 - 1
# Parts of a content that are text: type, and the field that has it.
TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "reasoning_text": "text",
    "summary_text": "text",
    "refusal": "refusal",
}
NOTHING: tuple[Any, ...] = ([], {}, "", 0)  # values without effect, besides null
LINES, PIECES = "\n", ""  # separators of joined texts: texts of different origin, and pieces of one text of the policy

Supported = Mapping[str, tuple[tuple[Any, ...], str]]  # fields: their values that are honoured, what to send instead
Model = TypeVar("Model", bound=BaseModel)
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Name = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Name], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]
# Field of both of OpenAI's APIs, for `refuse_others`.
TOP_LOGPROBS: Supported = {
    "top_logprobs": ((0,), "Use 0: only the log-probabilities of the generated tokens are known")
}


class Fields(BaseModel):
    """Fields of a request; fields that it does not name are ignored, since clients' versions differ in them."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class Function(Fields):
    """A function that the policy may call."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None

    def tool(self) -> dict[str, Any]:
        """Returns the function as a tool of `Call.tools`."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


def refusal(field: str, wrong: str, fix: str, code: str | None = None) -> RequestError:
    """Returns the error of a request: the field's path such as messages[0].content, and what to send instead."""
    return RequestError(400, f"{field}: {wrong}. {fix}.", field, code)


def missing(field: str) -> RequestError:
    """Returns the error of a request without a field."""
    return refusal(field, "missing", "Add the field to the request")


def unsupported(field: str, value: Any, fix: str) -> RequestError:
    """Returns the error of a field whose value the policy cannot honour."""
    return refusal(field, f"{quoted(value)} is not supported", fix)


def refuse_others(body: Mapping[str, Any], fields: Supported) -> None:
    """Raises RequestError for the first field with a value that is not among those that the policy can honour.

    Null is one of them. An ignored field would silently change the reply.
    """
    for field, (values, fix) in fields.items():
        if (value := body.get(field)) is not None and value not in values:
            raise unsupported(field, value, fix)


def parse(data: bytes) -> Any:
    """Parses the body of a request; RequestError where it is not JSON in UTF-8, too deep, or has too large a number."""
    # Python's json has no limit of depth but the recursion limit, and reads NaN.
    try:
        value = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise refusal("body", f"not valid JSON ({error})", "Send JSON in UTF-8, nested at most 200 levels") from None
    if not _is_finite(value):
        raise refusal("body", "a number is too large for 64 bits", "Send smaller numbers")
    return value


def _is_finite(value: Any) -> bool:
    # A number such as 1e999 is valid JSON, and is read as infinity.
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, list):
        return all(map(_is_finite, value))
    return not isinstance(value, dict) or all(map(_is_finite, value.values()))


def json_object(text: str) -> dict[str, Any] | None:
    """Parses a text that is a JSON object; None for any other text."""
    try:
        value = parse(text.encode())
    except (RequestError, UnicodeEncodeError):
        return None
    return value if isinstance(value, dict) else None


def read(model: type[Model], value: Any, field: str = "") -> Model:
    """Reads the fields of an object at the path `field` of the request, "" for the whole body."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        path = _path(field, first["loc"]) or "body"
        if first["type"] == "missing":
            raise missing(path) from None
        raise refusal(path, first["msg"][:1].lower() + first["msg"][1:300], "Correct the field") from None


def _path(field: str, location: tuple[int | str, ...]) -> str:
    for part in location:
        field += f"[{part}]" if isinstance(part, int) else f".{part}" if field else part
    return field


def quoted(value: Any) -> str:
    """Returns the beginning of a value of the request as JSON, for an error."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def text_of(content: Any, field: str, separator: str) -> str:
    """Returns the text of a content: text itself, or parts of text joined by `separator`; "" for None."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refusal(field, "neither text nor a list of parts", "Send text")
    return separator.join(part_text(part, f"{field}[{number}]") for number, part in enumerate(content))


def part_text(part: Any, field: str) -> str:
    """Returns the text of a part of a content; RequestError for a part that is not text."""
    if not isinstance(part, dict):
        raise refusal(field, "not an object", 'Send parts as {"type": "text", "text": ...}')
    kind = part.get("type")
    name = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if name is None:
        raise unsupported(f"{field}.type", kind, "The policy reads text: send parts of text")
    return text_at(part, field, name)


def text_at(value: Any, field: str, *names: str) -> str:
    """Returns the text at a path of names within a value of the request, whose own path is `field`."""
    for name in names:
        if not isinstance(value, dict):
            raise refusal(field, "not an object", "Correct the field")
        if name not in value:
            raise missing(f"{field}.{name}")
        value, field = value[name], f"{field}.{name}"
    if not isinstance(value, str):
        raise refusal(field, "input should be a valid string", "Correct the field")
    return value


def offers_tools(choice: Any) -> bool:
    """Returns whether a `tool_choice` of OpenAI offers the tools; RequestError for any other value."""
    # A choice that forces a call is accepted and does not constrain sampling: harnesses send it by default, and a
    # constrained sample has other log-probabilities than the policy.
    if choice not in (None, "auto", "none", "required") and not (isinstance(choice, dict) and "type" in choice):
        raise unsupported("tool_choice", choice, 'Use "auto" or "none"')
    return bool(choice != "none")


def with_one_system(messages: Iterable[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Returns messages whose first system messages are one: many chat templates reject or drop the others."""
    messages = tuple(messages)
    texts = [message["content"] for message in takewhile(lambda message: message["role"] == "system", messages)]
    if len(texts) < 2:
        return messages
    return ({"role": "system", "content": LINES.join(texts)}, *messages[len(texts) :])
