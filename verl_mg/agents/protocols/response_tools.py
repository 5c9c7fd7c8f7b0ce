"""Tools of OpenAI's responses: functions, tools with free text, namespaces; and their calls.

A tool of type `custom` takes free text; the policy sees it as a function with the argument `input`. Tools in a
namespace, as Codex sends tools of MCP servers, have its name in front of theirs. Tools that the provider runs and that
Codex offers by default (web_search, image_generation, tool_search) are not offered to the policy; others are refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl_mg.agents.call import ToolCall
from verl_mg.agents.protocols.exchange import JsonObject
from verl_mg.agents.protocols.fields import Fields, Function, Name, json_object, quoted, read, refusal
from verl_mg.agents.protocols.memory import SessionMemory

NOT_OFFERED = ("web_search", "web_search_preview", "image_generation", "tool_search")
INPUT = "input"
CUSTOM_PARAMETERS = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}


class _Grammar(Fields):
    type: str = "text"
    syntax: str | None = None
    definition: str | None = None


class _Custom(Fields):
    name: Name
    description: str | None = None
    format: _Grammar | None = None


class _Namespace(Fields):
    name: Name
    tools: list[Any]


class CustomCall(Fields):
    """A call of a tool that takes free text."""

    call_id: Name
    name: Name
    namespace: str | None = None
    input: str


class FunctionCall(Fields):
    """A call of a function with arguments."""

    call_id: Name
    name: Name
    namespace: str | None = None
    arguments: str


@dataclass(frozen=True)
class OfferedTool:
    """A tool that the policy may call."""

    schema: JsonObject  # the tool as one of `Call.tools`
    name: str  # its name in the agent
    namespace: str | None  # its namespace in the agent
    takes_text: bool  # whether it takes free text instead of arguments


def full_name(namespace: str | None, name: str) -> str:
    """Returns the name by which the policy knows a tool, such as files__read for read in the namespace files."""
    if not namespace:
        return name
    return namespace + ("" if namespace.endswith("__") else "__") + name


def offered_tools(tools: list[Any], field: str = "tools", namespace: str | None = None) -> Iterator[OfferedTool]:
    """Reads the tools of a request; RequestError for one that is invalid or runs at a provider."""
    for number, tool in enumerate(tools):
        place = f"{field}[{number}]"
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind == "function":
            function = read(Function, tool, place)
            yield _offered(function, namespace, takes_text=False)
        elif kind == "custom":
            custom = read(_Custom, tool, place)
            function = Function(name=custom.name, description=_description(custom), parameters=CUSTOM_PARAMETERS)
            yield _offered(function, namespace, takes_text=True)
        elif kind == "namespace" and namespace is None:
            inner = read(_Namespace, tool, place)
            yield from offered_tools(inner.tools, f"{place}.tools", inner.name)
        elif kind not in NOT_OFFERED:
            fix = "Give the agent a function that does it"
            raise refusal(f"{place}.type", f"{quoted(kind)} is not supported", fix)


def _offered(function: Function, namespace: str | None, takes_text: bool) -> OfferedTool:
    schema = function.model_copy(update={"name": full_name(namespace, function.name)}).tool()
    return OfferedTool(schema, function.name, namespace, takes_text)


def _description(tool: _Custom) -> str | None:
    # A grammar does not constrain sampling, so the policy has to read it.
    if tool.format is None or tool.format.definition is None:
        return tool.description
    grammar = f"The input follows this {tool.format.syntax or ''} grammar:\n{tool.format.definition}"
    return f"{tool.description}\n\n{grammar}" if tool.description else grammar


def written_call(call: ToolCall, tool: OfferedTool | None, memory: SessionMemory) -> JsonObject:
    """Returns a tool call as an item of a response without its id; `tool` is None for one that was not offered."""
    memory.remember_arguments(call.id, call.arguments)
    name: JsonObject = {"name": tool.name if tool else call.name}
    if tool and tool.namespace:
        name["namespace"] = tool.namespace
    if tool is None or not tool.takes_text:
        arguments = {"arguments": call.arguments, "status": "completed"}
        return {"type": "function_call", "call_id": call.id} | name | arguments
    return {"type": "custom_tool_call", "call_id": call.id, "input": _text(call.arguments)} | name


def read_call(item: JsonObject, field: str, memory: SessionMemory) -> JsonObject:
    """Reads an item that is a tool call, as one of a message's `tool_calls`."""
    if item["type"] == "function_call":
        called = read(FunctionCall, item, field)
        arguments = memory.written_arguments(called.call_id, called.arguments)
        return _called(called.call_id, full_name(called.namespace, called.name), arguments)
    # The policy has written free text as the argument of a function, and its tokens stay only for the same text.
    custom = read(CustomCall, item, field)
    written = memory.arguments(custom.call_id)
    if written is None or _text(written) != custom.input:
        written = json.dumps({INPUT: custom.input}, ensure_ascii=False)
    return _called(custom.call_id, full_name(custom.namespace, custom.name), written)


def _called(call_id: str, name: str, arguments: str) -> JsonObject:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _text(arguments: str) -> str:
    """Returns the free text in a call's arguments, or the arguments where they are malformed."""
    value = json_object(arguments)
    return value[INPUT] if value and set(value) == {INPUT} and isinstance(value[INPUT], str) else arguments
