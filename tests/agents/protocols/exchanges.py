"""Recorded requests of each API, as harnesses send them, with what the backend gets and how replies are written.

smallest   a request without what is optional        calls     fields added to it: "sent", and the "call" that is read
whole      one with all kinds of content             replies   a reply to it, and the "body" that is written
                                                      refused   fields that the policy cannot honour, and the error
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl_mg.agents.protocols import ChatApi, Exchange
from verl_mg.agents.protocols.chat_completions import ChatCompletions
from verl_mg.agents.protocols.memory import SessionMemory
from verl_mg.agents.protocols.messages import Messages
from verl_mg.agents.protocols.responses import Responses

CHAT, RESPONSES, MESSAGES = "/chat/completions", "/responses", "/messages"
APIS: dict[str, ChatApi] = {CHAT: ChatCompletions(), RESPONSES: Responses(), MESSAGES: Messages()}
RECORDED: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "exchanges.json").read_text(encoding="utf-8"))


def exchange_of(path: str, fields: dict[str, Any], memory: SessionMemory | None = None) -> Exchange:
    """Reads the smallest request of an API with further fields."""
    return APIS[path].read(RECORDED[path]["smallest"] | fields, memory or SessionMemory())


def sent_events(exchange: Exchange, body: dict[str, Any], earlier: int = 0) -> Iterator[dict[str, Any]]:
    """The data of a reply's events, whose names are their types."""
    for event in b"".join(exchange.events(body, earlier)).decode().split("\n\n"):
        name, _, data = event.partition("data: ")
        if data and data != "[DONE]":
            sent = json.loads(data)
            assert name in ("", f"event: {sent.get('type')}\n")
            yield sent
