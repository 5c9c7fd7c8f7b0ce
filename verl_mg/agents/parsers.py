"""Reasoning and tool calls in the text of a reply, read by SGLang's parsers."""

from __future__ import annotations

import difflib
import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from verl_mg.agents.call import ToolCall
from verl_mg.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


PROMPT_END = 100  # characters at the end of a prompt among which a mark of reasoning is looked for


class ParsedReply(NamedTuple):
    """Reasoning, text and calls of a reply."""

    text: str  # text without reasoning and calls
    reasoning: str  # reasoning before the text
    tool_calls: tuple[ToolCall, ...]


class ReplyParser:
    """Divides replies into reasoning, text and calls of tools, by parsers of SGLang.

    `tool_call_parser` and `reasoning_parser` are values of SGLang's options of these names; without the second one
    replies have no reasoning. Where SGLang is not installed, agents cannot send tools.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tool_call_parser: str, reasoning_parser: str | None) -> None:
        self._tokenizer, self._tool_format, self._reasoning = tokenizer, tool_call_parser, reasoning_parser
        self._numbers = itertools.count()
        self._sglang = _sglang()
        if self._sglang is None:
            if reasoning_parser:
                raise UserError(
                    f"rollout.reasoning_parser={reasoning_parser}: SGLang, whose parsers read reasoning, cannot be "
                    "imported. Install it, on a CPU with tools/install/sglang_cpu.sh, or leave it out."
                )
            return
        _check("rollout.tool_call_parser", tool_call_parser, self._sglang.tool_calls.ToolCallParserEnum)
        if reasoning_parser:
            _check("rollout.reasoning_parser", reasoning_parser, self._sglang.reasoning.DetectorMap)

    def check_tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """Raises ValueError where tools cannot be read, UserError where no parser is installed for their calls."""
        if tools and self._sglang is None:
            raise UserError(
                f"rollout.tool_call_parser={self._tool_format}: an agent has sent tools, but SGLang, whose parsers "
                "read the calls, cannot be imported. Install it, on a CPU with tools/install/sglang_cpu.sh, or use "
                "agents without tools."
            )
        if self._sglang is not None:
            for tool in tools:
                self._sglang.tool.model_validate(tool)

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]], prompt: str = "") -> ParsedReply:
        """Returns the parts of a reply, given without its end token; text that cannot be parsed stays text."""
        text, reasoning = self._parse_reasoning(text, prompt)
        calls: tuple[ToolCall, ...] = ()
        if tools and self._sglang is not None:
            text, calls = self._parse_calls(text, tools)
        return ParsedReply(text, reasoning, calls)

    def _parse_reasoning(self, text: str, prompt: str) -> tuple[str, str]:
        if not self._reasoning or self._sglang is None:
            return text, ""
        parser = self._sglang.reasoning(self._reasoning, stream_reasoning=False)  # parsers have state
        start, end = (getattr(parser.detector, f"think_{mark}_token", None) for mark in ("start", "end"))
        # A template may open the reasoning at the end of the prompt, or close it there, as with thinking switched off.
        whole, prompt = text, prompt[-PROMPT_END:].rstrip()
        if start and prompt.endswith(start):
            whole = start + text
        elif end and prompt.endswith(end) and not (start and start in text):
            return text, ""
        thought, rest = _tried(parser.parse_non_stream, whole, (None, text))
        if not thought and rest == text:
            return text, ""
        return (rest or "").lstrip("\n"), (thought or "").strip("\n")  # the line breaks belong to the marks

    def _parse_calls(self, text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, tuple[ToolCall, ...]]:
        assert self._sglang is not None
        kinds = [self._sglang.tool.model_validate(tool) for tool in tools]
        parser = self._sglang.tool_calls(kinds, self._tool_format, tokenizer=self._tokenizer)
        if not parser.has_tool_call(text):
            return text, ()
        # The agent answers calls of unknown tools itself.
        with self._sglang.environment.SGLANG_FORWARD_UNKNOWN_TOOLS.override(True):
            rest, items = _tried(parser.parse_non_stream, text, (text, []))
        calls = tuple(ToolCall(self._call_id(), item.name or "", item.parameters or "{}") for item in items)
        return (rest or "", calls) if calls else (text, ())

    def _call_id(self) -> str:
        # Some templates require nine letters and digits.
        return f"call{next(self._numbers) % 100_000:05d}"


class _SGLangParsers(NamedTuple):
    tool_calls: Any
    reasoning: Any
    tool: Any
    environment: Any  # SGLang's settings by environment variables


def _sglang() -> _SGLangParsers | None:
    try:
        from sglang.srt.entrypoints.openai.protocol import Tool
        from sglang.srt.environ import envs
        from sglang.srt.function_call.function_call_parser import FunctionCallParser
        from sglang.srt.parser.reasoning_parser import ReasoningParser
    except ImportError:
        return None
    # Its warnings concern calls that cannot be parsed: these stay text, and there are many.
    logging.getLogger("sglang.srt.function_call").setLevel(logging.ERROR)
    return _SGLangParsers(FunctionCallParser, ReasoningParser, Tool, envs)


def _check(key: str, name: str, names: Mapping[str, Any]) -> None:
    if name not in names:
        near = difflib.get_close_matches(name, names, 3) or sorted(names)
        raise UserError(f"{key}={name}: SGLang has no such format. Write one of: {', '.join(near)}.")


def _tried(parse: Any, text: str, otherwise: Any) -> Any:
    try:
        return parse(text)
    except Exception:  # parsers fail on some malformed text
        return otherwise
