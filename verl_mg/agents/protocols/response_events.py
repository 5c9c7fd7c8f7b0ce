"""Server-sent events of OpenAI's responses: each part of an item has one delta."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from verl_mg.agents.protocols.exchange import JsonObject, sse

Event = tuple[str, dict[str, Any]]  # type of an event after "response.", and its fields


def numbered(events: Iterator[Event], first: int) -> Iterator[bytes]:
    """Yields server-sent events with their sequence numbers, from `first` on."""
    for number, (kind, fields) in enumerate(events, first):
        yield sse({"type": f"response.{kind}", "sequence_number": number} | fields, f"response.{kind}")


def begin(response: JsonObject) -> Iterator[Event]:
    """Yields the events in front of the items; the response has no output yet."""
    yield "created", {"response": response}
    yield "in_progress", {"response": response}


def of_item(item: JsonObject, index: int) -> Iterator[Event]:
    """Yields the events of the complete item at position `index` of the output."""
    place = {"output_index": index}
    yield "output_item.added", place | {"item": _empty(item)}
    inside = place | {"item_id": item["id"]}
    match item["type"]:
        case "message":
            yield from _of_text(item["content"][0], inside | {"content_index": 0})
        case "reasoning":
            yield from _of_reasoning(item["content"][0], inside | {"content_index": 0})
        case "function_call":
            yield "function_call_arguments.delta", inside | {"delta": item["arguments"]}
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield "function_call_arguments.done", inside | done
        case _:
            yield "custom_tool_call_input.delta", inside | {"delta": item["input"]}
            yield "custom_tool_call_input.done", inside | {"input": item["input"]}
    yield "output_item.done", place | {"item": item}


def _empty(item: JsonObject) -> JsonObject:
    match item["type"]:
        case "message":
            return item | {"content": [], "status": "in_progress"}
        case "reasoning":
            return item | {"content": [], "encrypted_content": None}
        case "function_call":
            return item | {"arguments": "", "status": "in_progress"}
        case _:
            return item | {"input": ""}


def _of_text(part: JsonObject, place: JsonObject) -> Iterator[Event]:
    yield "content_part.added", place | {"part": part | {"text": "", "logprobs": []}}
    tokens = {"logprobs": part["logprobs"]}
    yield "output_text.delta", place | {"delta": part["text"]} | tokens
    yield "output_text.done", place | {"text": part["text"]} | tokens
    yield "content_part.done", place | {"part": part}


def _of_reasoning(part: JsonObject, place: JsonObject) -> Iterator[Event]:
    yield "content_part.added", place | {"part": part | {"text": ""}}
    yield "reasoning_text.delta", place | {"delta": part["text"]}
    yield "reasoning_text.done", place | {"text": part["text"]}
    yield "content_part.done", place | {"part": part}
