"""Tool calls and reasoning in the text of a reply, read by SGLang's parsers: for agents, and for tools of the job."""

from __future__ import annotations

import difflib
import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from verl_mg.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


PROMPT_END = 100  # characters at the end of a prompt among which a mark of reasoning is looked for


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool that the policy has written."""

    id: str  # id by which an agent refers to the call in its result
    name: str
    arguments: str  # JSON text, which may be malformed

    @property
    def entry(self) -> dict[str, Any]:
        """Returns the call as one of the `tool_calls` of a message."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


MALFORMED = ToolCall("", "", "")  # in place of calls that cannot be parsed


class ParsedReply(NamedTuple):
    """Reasoning, text and calls of a reply."""

    text: str  # text without reasoning and calls
    reasoning: str  # reasoning before the text
    tool_calls: tuple[ToolCall, ...]


class ReplyParser:
    """Divides replies into reasoning, text and calls of tools, by parsers of SGLang.

    `tool_call_parser` and `reasoning_parser` are values of SGLang's options of these names; without the second one
    replies have no reasoning. Where SGLang is not installed, there can be no tools.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, tool_call_parser: str, reasoning_parser: str | None = None
    ) -> None:
        self._tokenizer, self._tool_format, self._reasoning = tokenizer, tool_call_parser, reasoning_parser
        self._numbers = itertools.count()
        self._sglang = _sglang()
        if self._sglang is not None:
            _check("rollout.tool_call_parser", tool_call_parser, self._sglang.tool_calls.ToolCallParserEnum)
            if reasoning_parser:
                _check("rollout.reasoning_parser", reasoning_parser, self._sglang.reasoning.DetectorMap)
        elif reasoning_parser:
            raise UserError(
                f"rollout.reasoning_parser={reasoning_parser}: SGLang, whose parsers read reasoning, cannot be "
                "imported. Install it, on a CPU with tools/install/sglang_cpu.sh, or leave it out."
            )

    def check_tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """Raises ValueError where tools cannot be read, UserError where no parser is installed for their calls."""
        if tools and self._sglang is None:
            raise UserError(
                f"rollout.tool_call_parser={self._tool_format}: there are tools, but SGLang, whose parsers read their "
                "calls, cannot be imported. Install it, on a CPU with tools/install/sglang_cpu.sh, or use no tools."
            )
        self._kinds(tools)

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]], prompt: str = "") -> ParsedReply:
        """Returns the parts of a reply, given without its end token; text that cannot be parsed stays text."""
        text, reasoning = self._parse_reasoning(text, prompt)
        rest, calls = self.parse_calls(text, tools)
        readable = tuple(call for call in calls if call is not MALFORMED)
        return ParsedReply(rest if readable else text, reasoning, readable)

    def parse_calls(self, text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[ToolCall]]:
        """Returns the text around the calls, and the calls: with MALFORMED at the end for those that cannot be parsed.

        Calls of unknown tools are among them: the policy gets an error, of the agent or of ours.
        """
        if not tools or self._sglang is None:
            return text, []
        parser = self._sglang.tool_calls(self._kinds(tools), self._tool_format, tokenizer=self._tokenizer)
        if not parser.has_tool_call(text):
            return text, []
        with self._sglang.environment.SGLANG_FORWARD_UNKNOWN_TOOLS.override(True):
            rest, items = _tried(parser.parse_non_stream, text, (text, []))
        calls = [ToolCall(self._call_id(), item.name or "", item.parameters or "{}") for item in items]
        # The parser drops a call that it cannot read; it leaves its mark in the text.
        begin: str = getattr(parser.detector, "bot_token", "")
        unread = not calls or (begin and text.count(begin) > len(calls))
        return rest or "", [*calls, MALFORMED] if unread else calls

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

    def _kinds(self, tools: Sequence[Mapping[str, Any]]) -> list[Any]:
        return [self._sglang.tool.model_validate(tool) for tool in tools] if self._sglang is not None else []

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
    # Its warnings concern calls that cannot be parsed, and there are many.
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
