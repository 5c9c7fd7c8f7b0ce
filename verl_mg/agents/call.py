"""A request of an agent for one reply of the policy, and the reply, in whatever API they are written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from verl_mg.agents.tool_calls import ToolCall
from verl_mg.images import Image, RowImages


@dataclass(frozen=True)
class Call:
    """A request of an agent for one reply.

        Call(messages=({"role": "user", "content": "2+3?"},), model="policy", max_tokens=64)
        Reply.message: {"role": "assistant", "content": "5", "reasoning_content": "2 and 3 are 5"}

    Sampling parameters of the agent are not part of it: the policy samples as the job's configuration says, or training
    would compute other log-probabilities.
    """

    messages: tuple[dict[str, Any], ...]
    """Messages in the form of OpenAI's chat completions: `role` (system, user, assistant, tool) and `content`; of the
    assistant also `tool_calls` and `reasoning_content`, of a tool `tool_call_id`. A content is text, or where there are
    images a list of parts `{"type": "text", "text": ...}` and `{"type": "image", "image": KEY}`."""
    tools: tuple[dict[str, Any], ...] = ()
    """Tools that the policy may call, as `{"type": "function", "function": {...}}`."""
    model: str = ""
    """Name of the model that the agent has written; `rollout.agent_trained` lists those whose replies are trained."""
    agent: str = ""
    """Name of the agent that has the reply, which with `rollout.agent_names` is that of the model; "" without."""
    max_tokens: int | None = None
    """Largest number of tokens of the reply; None: as many as the sample may still have."""
    stop: tuple[str, ...] = ()
    """Texts at which the reply ends."""
    images: Mapping[str, Image] = field(default_factory=dict)
    """All images of the session by their keys, also those in `messages`."""

    @property
    def shown_images(self) -> RowImages:
        """Returns the images of the messages, in their order."""
        return tuple(self.images[part["image"]] for message in self.messages for part in image_parts(message))


def image_parts(message: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields the parts of a message of `Call.messages` that are images."""
    content = message.get("content")
    return (part for part in (content if isinstance(content, list) else ()) if part["type"] == "image")


def for_people(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message of `Call.messages` with text as content, which names images by their keys."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = (f"(image {part['image']})" if part["type"] == "image" else part["text"] for part in content)
    return {**message, "content": "\n".join(texts)}


def assistant_message(text: str, reasoning: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """Returns a message of the policy as one of `Call.messages`."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [call.entry for call in calls]
    return message


@dataclass(frozen=True)
class ReplyToken:
    """One generated token of a reply."""

    id: int
    text: str  # decoded without its neighbours
    logprob: float  # in nats, after temperature scaling


@dataclass(frozen=True)
class Reply:
    """The policy's reply to a call."""

    text: str  # without reasoning and tool calls
    reasoning: str  # before the text; "" where there is none
    tool_calls: tuple[ToolCall, ...]
    finish: Literal["stop", "length", "tool_calls"]
    tokens: tuple[ReplyToken, ...]  # everything that was generated, in order
    prompt_tokens: int  # number of tokens in front of the reply
    cached_tokens: int  # number of these tokens that were kept from earlier turns of the session
    stopped: str | None = None  # text of `Call.stop` or `rollout.stop` that ended the reply

    @property
    def message(self) -> dict[str, Any]:
        """Returns the reply as a message of `Call.messages`."""
        return assistant_message(self.text, self.reasoning, self.tool_calls)


class RequestError(Exception):
    """A request that cannot be answered.

    `status` is 400 to 499, 500 for an error of our own, or 503 while nothing can be generated. `message` is one line
    with the remedy, `param` the wrong field, `code` the name of the error in OpenAI's API.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
