"""Tool calls and reasoning in the text of a reply, read by SGLang's parsers: for agents, and for tools of the job."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from verl_mg.config.roles import RolloutConfig
from verl_mg.engines.sglang.internals import reply_parsers
from verl_mg.errors import UserError
from verl_mg.rewards.answer_part import THOUGHTS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    unread: bool = False  # whether there are calls that cannot be parsed


class ReplyParser:
    """Divides replies into reasoning, text and calls of tools, by parsers of SGLang; reasoning contains no calls.

    `tool_call_parser` and `reasoning_parser` are values of SGLang's options of these names; without the second one
    replies have no reasoning. Where SGLang is not installed, there can be no tools.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, tool_call_parser: str, reasoning_parser: str | None = None
    ) -> None:
        self._tokenizer, self._tool_format, self._reasoning = tokenizer, tool_call_parser, reasoning_parser
        self._numbers = itertools.count()
        self._sglang = reply_parsers()
        if self._sglang is not None:
            _check("rollout.tool_call_parser", tool_call_parser, self._sglang.tool_calls.ToolCallParserEnum)
            if reasoning_parser:
                _check("rollout.reasoning_parser", reasoning_parser, self._sglang.reasoning.DetectorMap)
                self._check_reasoning()
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
        """Returns the parts of a reply, given without its end token; text that cannot be parsed stays text.

        Calls of unknown tools are among them: the policy gets an error, of the agent or of ours. `prompt` is the text
        in front of the reply, of which the end matters: a template may open the reasoning there.
        """
        text, reasoning = self._parse_reasoning(text, prompt)
        rest, calls, unread = self._parse_calls(text, tools)
        return ParsedReply(rest if calls else text, reasoning, calls, unread)

    def _parse_calls(self, text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, tuple[ToolCall, ...], bool]:
        """Returns the text around the calls, the calls, and whether there are others that cannot be parsed."""
        if not tools or self._sglang is None:
            return text, (), False
        parser = self._sglang.tool_calls(self._kinds(tools), self._tool_format, tokenizer=self._tokenizer)
        text = self._without_later_reasoning(text)
        if not parser.has_tool_call(text):
            return text, (), False
        with self._sglang.environment.SGLANG_FORWARD_UNKNOWN_TOOLS.override(True):
            rest, items = _tried(parser.parse_non_stream, text, (text, []))
        calls = tuple(ToolCall(self._call_id(), item.name or "", item.parameters or "{}") for item in items)
        # The parser drops a call that it cannot read; it leaves its mark in the text.
        begin: str = getattr(parser.detector, "bot_token", "")
        return rest or "", calls, bool(not calls or (begin and text.count(begin) > len(calls)))

    def _parse_reasoning(self, text: str, prompt: str) -> tuple[str, str]:
        if not self._reasoning or self._sglang is None:
            return text, ""
        parser, start, end = self._reasoning_parser()
        opening = start + getattr(parser.detector, "think_start_self_label", "")
        # A template may open the reasoning at the end of the prompt, or close it there, as with thinking switched off.
        whole, prompt = text, prompt.rstrip()
        if start and prompt.endswith((start, opening.rstrip())):
            whole = (start if prompt.endswith(start) else opening) + text
        elif end and prompt.endswith(end) and not (start and start in text):
            return text, ""
        thought, rest = _tried(parser.parse_non_stream, whole, (None, text))
        thought, rest, begins = thought or "", rest or "", bool(start) and whole.lstrip().startswith(start)
        is_forced = getattr(parser.detector, "_in_reasoning", True)
        if start and start in thought and not (begins or is_forced):
            return text, ""  # a text that mentions the mark, which SGLang's parsers take for reasoning
        called, inside = getattr(parser.detector, "tool_start_token", None), whole.lstrip().removeprefix(opening)
        if (
            called
            and end not in whole
            and (
                (rest.startswith(called) and (begins or thought.strip())) or (begins and rest.strip() == inside.strip())
            )
        ):
            # These parsers end reasoning that nothing closes at a call, or where there is none take it for text.
            thought, rest = inside, ""
        if start and rest.startswith(2 * start):  # of a parser that adds the mark which the prompt has
            rest = rest.removeprefix(start)
        if not thought and rest == text:
            return text, ""
        return rest.lstrip("\n"), thought.strip("\n")  # the line breaks belong to the marks

    def _without_later_reasoning(self, text: str) -> str:
        """Returns a text without what is between marks of reasoning, or after a mark that nothing closes."""
        if not self._reasoning:
            return text
        _, start, end = self._reasoning_parser()
        kept, opened, text = text.partition(start) if start and end else (text, "", "")
        while opened:
            spoken, opened, text = text.partition(end)[2].partition(start)
            kept += spoken
        return kept

    def _reasoning_parser(self) -> tuple[Any, str, str]:
        """Returns a parser of reasoning, which has state, and the marks around reasoning; "" where it knows none."""
        assert self._sglang is not None
        parser = self._sglang.reasoning(self._reasoning, stream_reasoning=False, tokenizer=self._tokenizer)
        start, end = (getattr(parser.detector, f"think_{mark}_token", None) or "" for mark in ("start", "end"))
        return parser, start, end

    def _check_reasoning(self) -> None:
        try:
            self._reasoning_parser()
        except ValueError as error:  # it needs what only some tokenizers have
            raise UserError(
                f"rollout.reasoning_parser={self._reasoning}: SGLang's parser does not fit this model ({error}). Write "
                "the parser of the model's family."
            ) from None

    def _kinds(self, tools: Sequence[Mapping[str, Any]]) -> list[Any]:
        return [self._sglang.tool.model_validate(tool) for tool in tools] if self._sglang is not None else []

    def _call_id(self) -> str:
        # Some templates require nine letters and digits.
        return f"call{next(self._numbers) % 100_000:05d}"


def unread_reasoning(rollout: RolloutConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns the warning of a job that would make calls of tools within reasoning, "" for others."""
    if rollout.reasoning_parser or not (rollout.tools or rollout.has_agents):
        return ""
    template, tokens = str(tokenizer.chat_template), tokenizer.get_vocab()
    mark = next((mark for pair in THOUGHTS for mark in pair if mark in template or mark in tokens), "")
    return mark and (
        f"rollout.reasoning_parser: the tokenizer has {mark}, but no parser reads reasoning, so that calls of tools "
        "within it are made. Set the parser of the model's family, such as qwen3."
    )


def _check(key: str, name: str, names: Mapping[str, Any]) -> None:
    if name not in names:
        near = difflib.get_close_matches(name, names, 3) or sorted(names)
        raise UserError(f"{key}={name}: SGLang has no such format. Write one of: {', '.join(near)}.")


def _tried(parse: Any, text: str, otherwise: Any) -> Any:
    try:
        return parse(text)
    except Exception:  # parsers fail on some malformed text
        return otherwise
