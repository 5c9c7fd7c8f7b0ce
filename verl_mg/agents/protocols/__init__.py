"""The APIs of OpenAI and Anthropic, and a request that has been read, which knows how its reply is written.

JSON of a request --> ChatApi.read --> Exchange, with the Call --> backend --> Reply --> Exchange.body, Exchange.events
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from verl_mg.agents.call import Call, Reply, ReplyToken, RequestError
from verl_mg.agents.protocols.memory import SessionMemory

JsonObject = dict[str, Any]


@dataclass(frozen=True)
class Exchange(ABC):
    """A request in the form that the backend reads, and the form of its reply.

    call --> backend --> Reply --> body --> JSON, or events for a stream
    after a stream has begun:  keep_alive, keep_alive, ...  then events or error_event

    `earlier` is the number of calls of `keep_alive` so far: in some APIs events have numbers.
    """

    call: Call  # the request as the backend gets it
    stream: bool  # whether the reply is written as server-sent events
    memory: SessionMemory  # what later requests of the session need

    def body(self, reply: Reply) -> JsonObject:
        """Returns the reply as the JSON object of the API."""
        # The next request of the agent has these calls, perhaps with their arguments written in another way.
        for call in reply.tool_calls:
            self.memory.remember_arguments(call.id, call.arguments)
        return self.written(reply)

    @abstractmethod
    def written(self, reply: Reply) -> JsonObject:
        """Returns the reply as the JSON object of the API, whose tool calls are in the memory."""

    @abstractmethod
    def events(self, body: JsonObject, earlier: int = 0) -> Iterator[bytes]:
        """Returns the server-sent events of a reply, whose `body` is given."""

    @abstractmethod
    def keep_alive(self, earlier: int) -> bytes:
        """Returns an event without effect, so that the client does not give up while the policy generates."""

    @abstractmethod
    def error_event(self, error: RequestError, earlier: int) -> bytes:
        """Returns the event of an error that occurs after the stream has begun."""


class ChatApi(ABC):
    """An API of OpenAI or Anthropic: it reads requests, and writes errors."""

    @abstractmethod
    def read(self, body: Any, memory: SessionMemory) -> Exchange:
        """Reads the parsed JSON of a request; RequestError where it is invalid or needs what the policy cannot do."""

    def error(self, error: RequestError) -> JsonObject:
        """Returns the body of a reply that reports an error, as OpenAI's APIs write it."""
        kind = "server_error" if error.status >= 500 else "invalid_request_error"
        # litellm, and the agents that use it, know this error only by these words: others they repeat for minutes.
        end = " This model's maximum context length is exceeded." if error.code == "context_length_exceeded" else ""
        return {"error": {"message": error.message + end, "type": kind, "param": error.param, "code": error.code}}


def sse(data: JsonObject | str, event: str = "") -> bytes:
    """Returns a server-sent event with a JSON object or one line of text; `event` is its name, "" for none."""
    text = data if isinstance(data, str) else json.dumps(data)
    return (f"event: {event}\n" if event else "").encode() + f"data: {text}\n\n".encode()


def reasoning_tokens(reply: Reply) -> int:
    """Returns the number of tokens up to the end of the reasoning, with its first and without its last delimiter."""
    # The parser returns text, so the tokens are found again by the positions of their texts.
    text = "".join(token.text for token in reply.tokens)
    if not reply.reasoning or reply.reasoning not in text:
        return 0
    end = text.index(reply.reasoning) + len(reply.reasoning)
    starts = accumulate((len(token.text) for token in reply.tokens[:-1]), initial=0)
    return sum(start < end for start in starts)


def logprobs(tokens: Iterable[ReplyToken]) -> list[JsonObject]:
    """Returns the log-probabilities of tokens as both of OpenAI's APIs write them."""
    return [
        {
            "token": token.text,
            "bytes": list(token.text.encode("utf-8", "replace")),
            # OpenAI writes -9999 for tokens that are very improbable; JSON has no infinity.
            "logprob": max(token.logprob, -9999.0),
            "top_logprobs": [],
        }
        for token in tokens
    ]
