"""A session and a sample without an engine: an agent's endpoint whose replies are scripted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.json_server import JsonRequest, JsonResponse, serving

KEY = "key-of-the-sample"
Message = dict[str, Any]


@dataclass
class ScriptedSession:
    """What an agent is given."""

    base_url: str
    options: dict[str, Any] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=lambda: [{"role": "user", "content": "1+1="}])
    api_key: str = KEY
    model: str = "policy"
    written: list[str] = field(default_factory=list)

    @property
    def anthropic_base_url(self) -> str:
        return self.base_url.removesuffix("/v1")

    def log(self, text: str) -> None:
        self.written.append(text)


@dataclass
class ScriptedSample:
    """The prompt and its record."""

    prompt: str = "1+1="
    answer: str | None = "2"
    record: dict[str, Any] = field(default_factory=lambda: {"prompt": "1+1=", "answer": "2"})


@contextmanager
def policy(reply: Callable[[dict[str, Any]], str | Message]) -> Iterator[str]:
    """Serves chat completions and yields the base URL; `reply` makes a message, or its text, from the request."""

    def respond(request: JsonRequest) -> JsonResponse:
        if request.path != "/sessions/7/v1/chat/completions" or request.headers["authorization"] != f"Bearer {KEY}":
            return JsonResponse({"error": {"message": f"{request.path} with {request.headers}"}}, status=404)
        message = reply(request.body)
        if isinstance(message, str):
            message = {"content": message}
        return JsonResponse({"choices": [{"message": {"role": "assistant", **message}, "finish_reason": "stop"}]})

    with serving(respond) as url:
        yield f"{url}/sessions/7/v1"
