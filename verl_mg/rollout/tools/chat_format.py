"""The language of tool calls: tokens that a policy wrote to calls, and results to tokens that it reads."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl_mg.errors import UserError
from verl_mg.rollout.tools.tool import Tool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ANSWER, RESULT = "THE-ANSWER-OF-THE-ASSISTANT", "THE-RESULT-OF-THE-TOOL"
CALL_ID = "call00000"  # some templates demand nine letters and digits


@dataclass(frozen=True)
class ToolCall:
    """A tool to call with arguments in JSON; without a name where what was written cannot be read."""

    name: str
    arguments: str


MALFORMED = ToolCall("", "")


@dataclass(frozen=True)
class ToolResult:
    """What came of a call, as text."""

    name: str
    text: str


class ToolCallFormat:
    """Reads calls with SGLang's parser for a model's format, and words results as the model's chat template does.

    What a template puts between an assistant's turn and the next one for tool messages becomes tokens by itself, so the
    tokens before stay as they were written. A tokenizer without a template gets the results between line breaks.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Tool], tool_call_parser: str) -> None:
        """tool_call_parser: a name that SGLang's `--tool-call-parser` takes, such as "qwen25" or "llama3".

        Raises:
            UserError: SGLang is not installed, it has no such format, or the template knows no tool messages.
        """
        self._tokenizer, self._format = tokenizer, tool_call_parser
        self._schemas = [tool.schema for tool in tools]
        self._parsers, self._environment, kind = _sglang()
        formats = self._parsers.ToolCallParserEnum
        if tool_call_parser not in formats:
            near = difflib.get_close_matches(tool_call_parser, formats, 3) or sorted(formats)
            raise UserError(
                f"rollout.tool_call_parser={tool_call_parser}: SGLang has no such format; write one of: "
                f"{', '.join(near)}"
            )
        self._tools = [kind.model_validate(schema) for schema in self._schemas]
        self._check_template()

    def calls(self, tokens: Sequence[int]) -> list[ToolCall]:
        """The calls of a turn, whose tokens come without the one that ended it; MALFORMED for what cannot be read."""
        text = self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        parser = self._parsers(self._tools, self._format, tokenizer=self._tokenizer)  # parsers have a memory
        if not parser.has_tool_call(text):
            return []
        # Unknown names come out too, to be answered. The parser drops what it cannot read, or raises.
        with self._environment.SGLANG_FORWARD_UNKNOWN_TOOLS.override(True):
            calls = _parsed(parser, text)
        begin: str = getattr(parser.detector, "bot_token", "")
        unread = not calls or (begin and text.count(begin) > len(calls))
        return [*calls, MALFORMED] if unread else calls

    def observation(self, last: int, results: Sequence[ToolResult]) -> tuple[int, ...]:
        """The tokens from behind `last`, the token that ended the assistant's turn, to where it writes the next."""
        tokens: list[int] = self._tokenizer(self._wording(results), add_special_tokens=False)["input_ids"]
        # A template ends the turn with the token that the model has written already.
        return tuple(tokens[1:] if tokens[:1] == [last] else tokens)

    def _wording(self, results: Sequence[ToolResult]) -> str:
        if self._tokenizer.chat_template is None:
            return "".join(f"\n{result.text}" for result in results) + "\n"
        messages: list[dict[str, str]] = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": ANSWER},
            *({"role": "tool", "name": r.name, "tool_call_id": CALL_ID, "content": r.text} for r in results),
        ]
        tools: Any = self._schemas
        text = self._tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
        return str(text).partition(ANSWER)[2]

    def _check_template(self) -> None:
        try:
            wording = self._wording([ToolResult("tool", RESULT)])
        except Exception as error:  # a template is a program: it raises what it likes
            raise UserError(
                f"the tokenizer's chat template refuses the role tool ({error}); take a model that knows tools"
            ) from error
        if RESULT not in wording:
            raise UserError("the tokenizer's chat template leaves tool messages out; take a model that knows tools")


def _parsed(parser: Any, text: str) -> list[ToolCall]:
    try:
        return [ToolCall(item.name or "", item.parameters) for item in parser.parse_non_stream(text)[1]]
    except Exception:  # a parser that stumbles over what a policy wrote
        return []


def _sglang() -> tuple[Any, Any, Any]:
    """SGLang's parser, its environment, and its type of a tool."""
    try:
        from sglang.srt.entrypoints.openai.protocol import Tool as ToolOfSGLang
        from sglang.srt.environ import envs
        from sglang.srt.function_call.function_call_parser import FunctionCallParser
    except ImportError as error:
        raise UserError(
            f"rollout.tools: calls are read by SGLang's parsers, and it cannot be imported ({error}); install it, "
            "on a CPU with tools/install_sglang_cpu.sh"
        ) from error
    # Its warnings are of calls that cannot be read: the policy is told, and there are many.
    logging.getLogger("sglang.srt.function_call").setLevel(logging.ERROR)
    return FunctionCallParser, envs, ToolOfSGLang
