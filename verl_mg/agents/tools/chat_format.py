"""Format of tool calls: parses calls from the policy's tokens, and formats results as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl_mg.agents.tool_calls import MALFORMED, ReplyParser, ToolCall
from verl_mg.agents.tools.tool import Tool, ToolOutput
from verl_mg.data.rendering import OPENING_TOKENS
from verl_mg.errors import UserError
from verl_mg.images import RowImages
from verl_mg.models.special_tokens import exact_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl_mg.data.image_processor import ImageProcessor

# Contents of messages that are found again in the text that a chat template makes.
ANSWER, RESULT = "THE-ANSWER-OF-THE-ASSISTANT", "THE-RESULT-OF-THE-TOOL"
CALL_ID = "call00000"  # some templates require nine letters and digits


@dataclass(frozen=True)
class ToolResult:
    """The result of a call as the policy receives it."""

    name: str
    text: str  # text that the policy will receive
    images: RowImages = ()  # images that it will receive in front of the text

    @property
    def content(self) -> str | list[dict[str, str]]:
        """Returns the content of its message: text, or parts where there are images."""
        if not self.images:
            return self.text
        text = [{"type": "text", "text": self.text}] if self.text else []
        return [*({"type": "image"} for _ in self.images), *text]


class ToolCallFormat:
    """Parses calls with SGLang's parser for a model's format, and formats results with the model's chat template.

    Only the text that a template puts between an assistant's turn and the next one is tokenized, so the earlier tokens
    remain as they were generated. For a tokenizer without a template, results are separated by line breaks.
    `tool_call_parser` is a value of SGLang's option `--tool-call-parser`, such as "qwen25" or "llama3".
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[Tool],
        tool_call_parser: str,
        reasoning_parser: str | None = None,
        processor: ImageProcessor | None = None,
    ) -> None:
        self._tokenizer, self._processor = tokenizer, processor
        self._schemas = [tool.schema for tool in tools]
        self._parser = ReplyParser(tokenizer, tool_call_parser, reasoning_parser)
        self._parser.check_tools(self._schemas)
        self._check_template()

    def calls(self, tokens: Sequence[int], before: Sequence[int] = ()) -> list[ToolCall]:
        """Parses the calls of a turn, given without its end token; MALFORMED stands for those that cannot be parsed.

        `before` are the tokens in front of the turn.
        """
        text, prompt = (exact_text(self._tokenizer, part) for part in (tokens, before[-OPENING_TOKENS:]))
        parsed = self._parser.parse(text, self._schemas, prompt)
        return [*parsed.tool_calls, *([MALFORMED] if parsed.unread else [])]

    def result(self, name: str, output: str | ToolOutput) -> ToolResult:
        """Returns the result of a call; a policy that reads only text gets "(an image)" for each image."""
        if isinstance(output, str):
            return ToolResult(name, output)
        if self._processor is None:
            return ToolResult(name, "\n".join([output.text, *("(an image)" for _ in output.images)]).strip())
        return ToolResult(name, output.text, output.images)

    def observation(self, last: int, results: Sequence[ToolResult]) -> tuple[int, ...]:
        """Returns the tokens between the assistant's turn, which ended with the token `last`, and its next one."""
        # Half of a surrogate pair, as in a file name that is not UTF-8, has no tokens.
        text = self._format_results(results).encode("utf-8", "replace").decode()
        tokens: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        # The template ends the turn with the token that the model has already generated.
        return tuple(tokens[1:] if tokens[:1] == [last] else tokens)

    def _format_results(self, results: Sequence[ToolResult]) -> str:
        if self._tokenizer.chat_template is None:
            return "".join(f"\n{result.text}" for result in results) + "\n"
        # Only the text after ANSWER is used, so a short conversation stands for the whole one.
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": ANSWER},
            *({"role": "tool", "name": r.name, "tool_call_id": CALL_ID, "content": r.content} for r in results),
        ]
        images = [image for result in results for image in result.images]
        if images and self._processor:
            text = self._processor.render(messages, self._schemas).partition(ANSWER)[2]
            return self._processor.expand(text, [image.pixels().size for image in images])
        tools: Any = self._schemas
        text = self._tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
        return str(text).partition(ANSWER)[2]

    def _check_template(self) -> None:
        try:
            text = self._format_results([ToolResult("tool", RESULT)])
        except Exception as error:  # a template is a program, which may raise anything
            raise UserError(
                f"rollout.tools: the chat template rejects the role tool ({error}). Use a model that supports tools."
            ) from error
        if RESULT not in text:
            raise UserError("rollout.tools: the chat template omits tool messages. Use a model that supports tools.")
