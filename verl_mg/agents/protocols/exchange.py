"""A request that has been read, which knows how its reply is written in its protocol."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from verl_mg.agents.call import Call, Reply, ReplyToken, RequestError
from verl_mg.agents.protocols.memory import SessionMemory

JsonObject = dict[str, Any]


@dataclass(frozen=True)
class Exchange(ABC):
    """A request in the form that the backend reads, and the form of its reply.

    call --> backend --> Reply --> body --> JSON, or events for a stream
    after a stream has begun:  keep_alive, keep_alive, ...  then events or error_event
    """

    call: Call  # the request as the backend gets it
    stream: bool  # whether the reply is written as server-sent events

    @abstractmethod
    def body(self, reply: Reply) -> JsonObject:
        """Returns the reply as the JSON object of the protocol."""

    @abstractmethod
    def events(self, body: JsonObject, earlier: int = 0) -> Iterator[bytes]:
        """Returns the server-sent events of a reply.

        Args:
            body: result of the method `body`.
            earlier: number of calls of `keep_alive` so far; their events have numbers in some protocols.
        """

    @abstractmethod
    def keep_alive(self, earlier: int) -> bytes:
        """Returns an event without effect, so that the client does not give up while the policy generates.

        Args:
            earlier: number of calls so far.
        """

    @abstractmethod
    def error_event(self, error: RequestError, earlier: int) -> bytes:
        """Returns the event of an error that occurs after the stream has begun.

        Args:
            error: as `Backend.complete` has raised it.
            earlier: number of calls of `keep_alive` so far.
        """


class Protocol(ABC):
    """A protocol: it reads requests, and writes errors."""

    @abstractmethod
    def read(self, body: Any, memory: SessionMemory) -> Exchange:
        """Reads the body of a request.

        Args:
            body: parsed JSON.
            memory: what earlier requests of the session have left.

        Raises:
            RequestError: the request is invalid, or needs what the policy cannot do.
        """

    @abstractmethod
    def error(self, error: RequestError) -> JsonObject:
        """Returns the body of a reply that reports an error."""


def sse(data: JsonObject | str, event: str = "") -> bytes:
    """Returns a server-sent event with a JSON object or one line of text; `event` is its name, "" for none."""
    text = data if isinstance(data, str) else json.dumps(data)
    return (f"event: {event}\n" if event else "").encode() + f"data: {text}\n\n".encode()


def reasoning_tokens(reply: Reply) -> int:
    """Returns the number of tokens up to the end of the reasoning, with its first and without its last delimiter."""
    # The parser returns text, so the tokens are found again by the positions of their texts.
    end = _end_of(reply.reasoning, reply.tokens)
    return sum(1 for start in _starts(reply.tokens) if start < end)


def _end_of(reasoning: str, tokens: Iterable[ReplyToken]) -> int:
    start = "".join(token.text for token in tokens).find(reasoning) if reasoning else -1
    return start + len(reasoning) if start >= 0 else 0


def _starts(tokens: Iterable[ReplyToken]) -> Iterator[int]:
    position = 0
    for token in tokens:
        yield position
        position += len(token.text)


def openai_error(error: RequestError) -> JsonObject:
    """Returns the body of an error in OpenAI's protocols."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    # litellm, and the agents that use it, know this error only by these words: other errors they repeat for minutes.
    end = " This model's maximum context length is exceeded." if error.code == "context_length_exceeded" else ""
    return {"error": {"message": error.message + end, "type": kind, "param": error.param, "code": error.code}}


def logprobs(tokens: Iterable[ReplyToken]) -> list[JsonObject]:
    """Returns the log-probabilities of tokens as both of OpenAI's protocols write them."""
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
