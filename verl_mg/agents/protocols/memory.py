"""State of a session between its requests: responses that are continued, arguments of tool calls, and images."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from verl_mg.agents.protocols.fields import json_object
from verl_mg.data.images import ImageLimits
from verl_mg.images import Image

# Bounds of a session's memory: its agent may send any number of requests.
MAX_RESPONSES = 256
MAX_CHARACTERS = 64 << 20
MAX_CALLS = 4096


@dataclass(frozen=True)
class StoredResponse:
    """A response that a later request may continue with `previous_response_id`."""

    messages: tuple[dict[str, Any], ...]  # messages up to and with the reply, without the instructions
    items: dict[str, dict[str, Any]]  # items of the output by their id, which a later request may refer to
    size: int  # number of characters that the response adds to earlier ones, whose messages it shares


class SessionMemory:
    """State of one session, bounded: the oldest entries are dropped, except for images, which its tokens need."""

    def __init__(self, image_limits: ImageLimits | None = None) -> None:
        self.image_limits = image_limits
        self.images: dict[str, Image] = {}  # images of all requests by their keys
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._arguments: OrderedDict[str, str] = OrderedDict()

    def store(self, name: str, response: StoredResponse) -> None:
        """Stores a response under its id, for later requests."""
        self._responses[name] = response
        while len(self._responses) > MAX_RESPONSES or self._size() > MAX_CHARACTERS:
            self._responses.popitem(last=False)

    def _size(self) -> int:
        return sum(response.size for response in self._responses.values())

    def response(self, name: str) -> StoredResponse | None:
        """Returns a stored response, or None."""
        return self._responses.get(name)

    def item(self, name: str) -> dict[str, Any] | None:
        """Returns an item of a stored response by its id, or None."""
        items = (response.items.get(name) for response in reversed(self._responses.values()))
        return next((item for item in items if item is not None), None)

    def remember_arguments(self, call: str, arguments: str) -> None:
        """Stores the text of a tool call's arguments as the policy has written it: clients may write it differently."""
        self._arguments[call] = arguments
        self._arguments.move_to_end(call)
        if len(self._arguments) > MAX_CALLS:
            self._arguments.popitem(last=False)

    def arguments(self, call: str) -> str | None:
        """Returns the text of a tool call's arguments, or None for a call that is not known."""
        return self._arguments.get(call)

    def written_arguments(self, call: str, arguments: str) -> str:
        """Returns a tool call's arguments as the policy has written them, where a client has sent an equal object."""
        # Clients parse them and write them again; in JavaScript 1.0 becomes 1.
        written = self._arguments.get(call)
        if written is None or (value := json_object(written)) is None or value != json_object(arguments):
            return arguments
        return written
