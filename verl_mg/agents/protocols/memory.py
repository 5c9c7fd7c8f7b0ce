"""State of a session between its requests: responses that are continued, arguments of tool calls, and images.

Images are read here, in whatever API they are written; the endpoint never fetches one.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from verl_mg.agents.call import RequestError
from verl_mg.agents.protocols.fields import LINES, json_object, missing, part_text, quoted, refusal, text_at, text_of
from verl_mg.data.images import DATA_URL, ImageLimits, checked_size, decode_data_url, decoded
from verl_mg.errors import UserError
from verl_mg.images import Image

Content = str | list[dict[str, Any]]  # content of a message of `Call.messages`

# Bounds of a session's memory: its agent may send any number of requests.
MAX_RESPONSES = 256
MAX_CHARACTERS = 64 << 20
MAX_CALLS = 4096
# Types of parts that are images: of chat completions, responses and messages.
IMAGE_PARTS = ("image_url", "input_image", "image")


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
        kept = self._responses
        while len(kept) > MAX_RESPONSES or sum(response.size for response in kept.values()) > MAX_CHARACTERS:
            kept.popitem(last=False)

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


def message_of(role: str, content: Any, field: str, memory: SessionMemory) -> dict[str, Any]:
    """Reads a message of OpenAI's APIs that is not the policy's; the system's has no images."""
    if content is None:
        raise missing(field)
    if role in ("system", "developer"):  # OpenAI's newer name, which chat templates do not have
        return {"role": "system", "content": text_of(content, field, LINES)}
    return {"role": role, "content": content_of(content, field, LINES, memory)}


def content_of(content: Any, field: str, separator: str, memory: SessionMemory) -> Content:
    """Returns a content that may have images: text where it has none, otherwise parts of text and images.

    `separator` joins parts of text where there are no images. The images are added to `memory`.
    """
    if memory.image_limits is None or not isinstance(content, list) or not any(map(_is_image, content)):
        return text_of(content, field, separator)
    named = ((part, f"{field}[{number}]") for number, part in enumerate(content))
    return [
        image_part(part, place, memory) if _is_image(part) else {"type": "text", "text": part_text(part, place)}
        for part, place in named
    ]


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in IMAGE_PARTS


def image_part(part: dict[str, Any], field: str, memory: SessionMemory) -> dict[str, Any]:
    """Returns an image as a part of `Call.messages` with its key; RequestError where it is too large or corrupt."""
    assert memory.image_limits is not None
    # A conversation repeats its images in each request: each is checked and decoded once.
    try:
        data = _encoded(part, field)
        image = Image(data)
        if image.key not in memory.images:
            checked_size(BytesIO(data), field, memory.image_limits)
            memory.images[image.key] = decoded(data, field)
    except UserError as error:
        raise RequestError(400, " ".join(str(error).split()), field) from None
    return {"type": "image", "image": image.key}


def _encoded(part: dict[str, Any], field: str) -> bytes:
    match part["type"]:
        case "image_url":
            return _of_url(text_at(part, field, "image_url", "url"), f"{field}.image_url.url")
        case "input_image":
            return _of_url(text_at(part, field, "image_url"), f"{field}.image_url")
        case _:
            kind, place = text_at(part, field, "source", "type"), f"{field}.source"
            if kind != "base64":
                raise _not_in_request(f"{place}.type", kind, "a source of type base64")
            return decode_data_url(f"{DATA_URL}*;base64,{text_at(part, field, 'source', 'data')}", f"{place}.data")


def _of_url(url: str, field: str) -> bytes:
    if not url.startswith(DATA_URL):
        raise _not_in_request(field, url, "data:image/png;base64,...")
    return decode_data_url(url, field)


def _not_in_request(field: str, value: str, form: str) -> RequestError:
    return refusal(field, f"{quoted(value)} is not in the request, and the endpoint fetches no images", f"Send {form}")
