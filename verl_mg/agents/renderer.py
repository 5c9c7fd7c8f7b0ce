"""Conversations as text and tokens, by the chat template of the policy's tokenizer."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verl_mg.agents.call import RequestError
from verl_mg.data.rendering import with_argument_values
from verl_mg.errors import UserError
from verl_mg.images import RowImages
from verl_mg.models.special_tokens import exact_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl_mg.data.image_processor import ImageProcessor


class ConversationRenderer:
    """Renders messages, tokenizes new text and decodes replies; used in one thread.

    `stop_token_ids` end a reply.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_token_ids: Sequence[int],
        processor: ImageProcessor | None = None,
    ) -> None:
        if tokenizer.chat_template is None:
            raise UserError(
                "rollout.agent: the tokenizer of model.path has no chat template, by which the messages of agents are "
                "written. Use an instruction-tuned model, or add chat_template.jinja to its folder."
            )
        # A copy: a tokenizer is not safe to use in two threads, and the rank has one.
        self._tokenizer, self._processor = copy.deepcopy(tokenizer), processor
        self.piece = functools.cache(lambda token: self.decode([token]))  # text of one token, special ones included
        self.stops = {token: self.decode([token]) for token in stop_token_ids}  # texts of the tokens that end a reply

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], for_reply: bool) -> str:
        """Returns a conversation as text; `for_reply`: up to the beginning of the assistant's next message."""
        errors: list[Exception] = []
        for form in _forms(messages):
            try:
                return self._apply(form, tools, for_reply)
            except Exception as error:  # a template is a program, which may raise anything
                errors.append(error)
        reason = " ".join(str(errors[0]).split())[:300]
        raise RequestError(
            400,
            f"messages: the chat template of the model rejects them ({reason}). Write roles and contents that it has.",
            "messages",
        ) from errors[0]

    def _apply(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], for_reply: bool) -> str:
        if self._processor is not None:
            plain = [_without_keys(message) for message in messages]
            schemas = [dict(tool) for tool in tools]
            return self._processor.render(plain, schemas, add_generation_prompt=for_reply)
        described: dict[str, Any] = {"tools": list(tools)} if tools else {}
        return str(
            self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=for_reply, **described
            )
        )

    def tokens(self, text: str, images: RowImages = ()) -> tuple[int, ...]:
        """Returns the token ids of a part of a rendered conversation, which has one placeholder for each image."""
        if self._processor is not None:
            count = self._processor.num_placeholders(text)
            if count != len(images):
                raise RequestError(
                    400,
                    f"messages: rendered, they have {count} placeholders for {len(images)} images. Send images as "
                    "parts of messages whose role has them in the chat template, and no placeholders in texts.",
                    "messages",
                )
            text = self._processor.expand(text, [image.size for image in images]) if images else text
        # The template has written the special tokens; a tokenizer would add another one to each part.
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"]) if text else ()

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens, special ones included."""
        return exact_text(self._tokenizer, tokens)

    def after_reply(self, rendered: str, last: int) -> str:
        """Returns the text after the last generated token `last` of a reply: the end of the turn.

        `rendered` is the reply as the template renders it, without the conversation in front of it.
        """
        ended = self.stops.get(last)
        if ended is not None and ended in rendered:
            return rendered[rendered.rindex(ended) + len(ended) :]
        # A reply that was cut has no end token, so the template's is part of the text that follows.
        ends = [rendered.rindex(text) for text in self.stops.values() if text in rendered]
        return rendered[max(ends) :] if ends else ""


def _forms(messages: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    # In order of preference: most templates accept the arguments of tool calls as mappings, some (DeepSeek's) as text.
    # Some (Qwen3.5's) accept a system message only at the beginning; harnesses such as Claude Code send later ones,
    # which become a user's messages then.
    with_values: list[Mapping[str, Any]] = [with_argument_values(message) for message in messages]
    forms = [with_values, list(messages), _with_late_system_as_user(with_values), _with_late_system_as_user(messages)]
    return (form for i, form in enumerate(forms) if form not in forms[:i])


def _without_keys(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a message as templates get it, whose images have no keys."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [{"type": "image"} if part["type"] == "image" else part for part in content]}


def _with_late_system_as_user(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [
        {**message, "role": "user"} if message["role"] == "system" and i else message
        for i, message in enumerate(messages)
    ]
