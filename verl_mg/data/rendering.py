"""Text and tokens of a record: preference fields, messages, chat templates, tokenization."""

import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

from verl_mg.data.file_formats import Record, plain
from verl_mg.data.images import MARKER, ImageSource, check_markers
from verl_mg.errors import UserError
from verl_mg.models.special_tokens import AddedTokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl_mg.data.image_processor import ImageProcessor


# Texts that a tokenizer gets in a call: what it returns needs several times the memory of the ids.
ROWS = 1000
OPENING_TOKENS = 64  # tokens in front of a reply that contain all that a chat template writes of it


class RenderedPrompt(NamedTuple):
    """Text of a prompt, ready to be tokenized."""

    text: str
    templated: bool  # whether a chat template wrote it, special tokens included
    messages: list[dict[str, Any]]  # the prompt as messages without null fields; a string is one of the user
    expanded: str | None = None
    """Text that is tokenized where it has images: with as many placeholders of each as it has features."""


def choice_of(record: Record, name: str, field: str, place: str) -> str:
    """Returns the text of one answer of a preference: a string, or the content of the last of several messages."""
    value = record.get(name)
    if value is None:
        raise UserError(f"{place}: no field '{name}'. Set data.{field} to one of: {', '.join(sorted(record))}.")
    if is_conversation(value) and value[-1]["role"] == "assistant":
        value = value[-1]["content"]
    if not isinstance(value, str) or not value:
        raise UserError(
            f"{place}: '{name}' is not an answer: {record[name]!r:.60}. Write a string, or messages of which the last "
            'is {"role": "assistant", "content": "..."}.'
        )
    return value


def context_of(value: Any) -> list[dict[str, Any]]:
    """Returns the messages before the last one; [] if the value is not a conversation."""
    return value[:-1] if is_conversation(value) else []


def check_same_context(
    contexts: tuple[list[dict[str, Any]], list[dict[str, Any]]], chosen: str, rejected: str, place: str
) -> None:
    """Raises UserError if two conversations differ before their last message."""
    if contexts[0] != contexts[1]:
        raise UserError(
            f"{place}: '{chosen}' and '{rejected}' differ before their last message. "
            "Write a pair as two answers to one prompt."
        )


def render(
    value: Any,
    tokenizer: "PreTrainedTokenizerBase",
    chat_template: bool,
    instruction: str,
    place: str,
    tools: Sequence[dict[str, Any]] = (),
    system_prompt: str = "",
) -> RenderedPrompt:
    """Returns the text of a prompt field: a string, or a list of messages `{"role": ..., "content": ...}`."""
    messages = _as_conversation(value, instruction, place)
    if isinstance(value, str) and not chat_template:
        if system_prompt:
            raise UserError(
                f"{place}: data.system_prompt is a message, but the prompt is a text without a chat template. Set "
                "data.chat_template=true, or leave the system prompt out."
            )
        return RenderedPrompt(value + instruction, False, messages)
    messages = plain_conversation(messages, place, system_prompt)
    return RenderedPrompt(render_conversation(messages, tokenizer, place, tools), True, messages)


def plain_conversation(messages: Sequence[dict[str, Any]], place: str, system_prompt: str = "") -> list[dict[str, Any]]:
    """Returns messages as chat templates expect them: without fields that are null, and with contents as text."""
    # Of files they are plain already; data.prepare may return others.
    texts = [plain(message) | {"content": content_of(message, place)} for message in messages]
    return _with_system(texts, system_prompt)


def render_conversation(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: "PreTrainedTokenizerBase",
    place: str,
    tools: Sequence[dict[str, Any]] = (),
    for_reply: bool = True,
) -> str:
    """Returns the text of messages, as the chat template renders them; UserError where it rejects them."""
    if tokenizer.chat_template is None:
        raise UserError(
            f"{place}: the tokenizer has no chat template. Use the tokenizer of an instruction-tuned model, "
            "or write prompts as strings and set data.chat_template=false."
        )
    # As text: with tokenize=True the type returned changes with the release of transformers.
    options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": for_reply}
    options |= {"tools": list(tools)} if tools else {}
    try:
        return str(tokenizer.apply_chat_template(messages, **options))
    except Exception as error:  # a template is a program, which may raise anything
        raise _rejected(error, place) from error


def with_argument_values(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message whose tool calls have their arguments as mappings, where their texts are JSON objects."""
    # OpenAI's API has them as texts. Most templates take mappings, some (DeepSeek's) only texts.
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return dict(message)
    return {**message, "tool_calls": [_with_values(call) for call in calls]}


def _with_values(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    text = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(text, str):
        return call
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": value}} if isinstance(value, dict) else call


def render_with_images(
    value: Any,
    images: Sequence[ImageSource],
    processor: "ImageProcessor",
    instruction: str,
    place: str,
    tools: Sequence[dict[str, Any]] = (),
    system_prompt: str = "",
) -> RenderedPrompt:
    """Returns the text of a prompt with images, which the processor's chat template renders."""
    messages = _with_system(_as_conversation(value, instruction, place), system_prompt)
    messages = [plain(message) | {"content": _parts_of(message, place)} for message in messages]
    parts = [part for message in messages for part in message["content"] or ()]
    check_markers(images, sum(part["type"] == "image" for part in parts), place)
    try:
        text = processor.render(messages, tools)
    except Exception as error:  # a template is a program, which may raise anything
        raise _rejected(error, place) from error
    return RenderedPrompt(text, True, messages, processor.expand(text, [image.size for image in images]))


def has_image_parts(value: Any) -> bool:
    """Returns whether a prompt is messages with a part of type image."""
    contents = [message.get("content") for message in value] if is_conversation(value) else []
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, dict) and part.get("type") == "image" for part in parts)


def tokenize(rendered: Sequence[RenderedPrompt], tokenizer: "PreTrainedTokenizerBase") -> list[list[int]]:
    """Returns the token ids of each text, one ragged row per text."""
    rows: list[list[int]] = []
    for start in range(0, len(rendered), ROWS):
        texts = [item.expanded or item.text for item in rendered[start : start + ROWS]]
        # A template writes the special tokens itself, and so does who renders a text before: the tokenizer would add
        # them a second time, or an end of the sequence after the prompt.
        rows += tokenizer(texts, add_special_tokens=False)["input_ids"]
    return rows


def unwritten_tokens(
    rendered: Sequence[RenderedPrompt], rows: Sequence[Sequence[int]], tokenizer: "PreTrainedTokenizerBase"
) -> str | None:
    """Returns a line about the tokens that a tokenizer would add to the texts of rows; None where they have all."""
    first = next((i for i, row in enumerate(rows) if row), None)
    if first is None:
        return None
    added = AddedTokens.of(tokenizer, rendered[first].text)
    missing = sum(tuple(row[: len(added.front)]) != added.front for row in rows)
    front, end = (" ".join(tokenizer.convert_ids_to_tokens(list(ids))) for ids in added)
    lines = [
        f"{missing} of {len(rows)} prompts do not begin with {front}, which the tokenizer would add. If the model "
        "expects it, write it in the chat template, or in the texts, as data.prepare can." * bool(missing),
        f"the tokenizer would add {end} at the end of a prompt; it is left out." * bool(end),
    ]
    return " ".join(line for line in lines if line) or None


def reply_opening(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Returns what a chat template writes of a reply itself, after the header of its message: "<think>\\n" or ""."""
    question, answer = [{"role": "user", "content": "0"}], [{"role": "assistant", "content": "1"}]
    try:
        context = render_conversation(question, tokenizer, "", for_reply=False)
        header = render_conversation(question, tokenizer, "").removeprefix(context)
        turns = [*question, *answer]
        wholes = [render_conversation(messages, tokenizer, "", (), False) for messages in (turns, turns + question)]
    except UserError:  # no template, or one of other messages: then nothing is known
        return ""
    # The header is what finished replies begin with too: most templates write no thinking in earlier turns.
    replies = [whole.removeprefix(context) for whole in wholes]
    end = common_length(header, *replies)
    tag = header.rfind("<", 0, end)
    if tag > header.rfind(">", 0, end):
        end = tag  # "<think>" and "</think>" differ after their first character
    # Of templates that write it in all, the header is that of a question with another role: <|im_start|>user\n
    after_role = context.rpartition("0")[0].rpartition("user")[2]
    role_end = header.find("assistant") + len("assistant")
    if "assistant" in header and header.startswith(after_role, role_end):
        end = min(end, role_end + len(after_role))
    return header[end:] if header[end:].strip() else ""


def common_length(*texts: str) -> int:
    """Returns the number of characters with which all texts begin alike."""
    return sum(1 for _ in takewhile(lambda characters: len(set(characters)) == 1, zip(*texts, strict=False)))


def is_conversation(value: Any) -> bool:
    """Returns whether a field is a list of messages, at least one."""
    return isinstance(value, list) and bool(value) and all(map(_is_message, value))


def fault_of(value: Any, what: str) -> str:
    """Returns what is wrong with a value that is no conversation; `what` it should be."""
    for number, message in enumerate(value if isinstance(value, list) else (), start=1):
        if isinstance(message, dict) and "role" in message and not _is_message(message):
            return f"message {number}, of the {message['role']}, has neither content nor tool_calls"
    return f"{value!r:.60} is not {what}"


def content_of(message: dict[str, Any], place: str) -> str | None:
    """Returns the text of a message, whose content is text or a list of parts as in OpenAI's API; None without text."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UserError(f"{place}: the content of a message is a {type(content).__name__}. Write a text.")
    kinds = [part.get("type") if isinstance(part, dict) else type(part).__name__ for part in content]
    if others := [kind for kind in kinds if kind != "text"]:
        raise UserError(f"{place}: a message has a part of type {others[0]!r}. Write only parts of type 'text'.")
    return "".join(part["text"] for part in content)


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and "role" in message and not {"content", "tool_calls"}.isdisjoint(message)


def _with_system(messages: list[dict[str, Any]], system_prompt: str) -> list[dict[str, Any]]:
    """Returns messages with the system prompt in front, unless it is empty or they begin with another one."""
    if not system_prompt or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]


def _as_conversation(value: Any, instruction: str, place: str) -> list[dict[str, Any]]:
    messages = [{"role": "user", "content": value + instruction}] if isinstance(value, str) else value
    if not is_conversation(messages):
        raise UserError(
            f"{place}: {fault_of(messages, 'a prompt')}. Write a string or a list of messages "
            '[{"role": "user", "content": "..."}].'
        )
    return messages


def _rejected(error: Exception, place: str) -> UserError:
    return UserError(f"{place}: the tokenizer's chat template rejects the prompt ({error}). Fix its roles or contents.")


def _parts_of(message: dict[str, Any], place: str) -> list[dict[str, str]] | None:
    """Returns the content of a message as parts of the types text and image; None without content."""
    content = message.get("content")
    if content is None:
        return None
    if isinstance(content, str):
        texts = content.split(MARKER)
        parts = [part for text in texts for part in ({"type": "image"}, {"type": "text", "text": text})][1:]
        return [part for part in parts if part["type"] == "image" or part["text"]]
    images = [part for part in content if isinstance(part, dict) and part.get("type") == "image"]
    content_of({"content": [part for part in content if part not in images]}, place)  # all others are text
    return [{"type": "image"} if part in images else {"type": "text", "text": part["text"]} for part in content]
