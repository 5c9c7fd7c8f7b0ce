"""Images of requests, in whatever protocol they are written; the endpoint never fetches one."""

from __future__ import annotations

from io import BytesIO
from typing import Any

from verl_mg.agents.call import RequestError
from verl_mg.agents.protocols.fields import Fields, part_text, quoted, read, refusal, text_of
from verl_mg.agents.protocols.memory import SessionMemory
from verl_mg.data.images import DATA_URL, checked_size, decode_data_url, decoded
from verl_mg.errors import UserError
from verl_mg.images import Image

Content = str | list[dict[str, Any]]  # content of a message of `Call.messages`
# Types of parts that are images: of chat completions, responses and messages.
IMAGE_PARTS = ("image_url", "input_image", "image")


class _Url(Fields):
    url: str


class _ImageUrl(Fields):
    image_url: _Url


class _InputImage(Fields):
    image_url: str


class _Source(Fields):
    type: str
    data: str = ""


class _Image(Fields):
    source: _Source


def content_of(content: Any, field: str, separator: str, memory: SessionMemory) -> Content:
    """Returns a content that may have images: text where it has none, otherwise parts of text and images.

    `separator` joins parts of text where there are no images. The images are added to `memory`.
    """
    if memory.image_limits is None or not isinstance(content, list) or not any(map(is_image, content)):
        return text_of(content, field, separator)
    parts = []
    for number, part in enumerate(content):
        place = f"{field}[{number}]"
        parts.append(image_part(part, place, memory) if is_image(part) else text_part(part_text(part, place)))
    return parts


def is_image(part: Any) -> bool:
    """Returns whether a part of a content is an image."""
    return isinstance(part, dict) and part.get("type") in IMAGE_PARTS


def text_part(text: str) -> dict[str, Any]:
    """Returns a text as a part of a content."""
    return {"type": "text", "text": text}


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
            return _of_url(read(_ImageUrl, part, field).image_url.url, f"{field}.image_url.url")
        case "input_image":
            return _of_url(read(_InputImage, part, field).image_url, f"{field}.image_url")
        case _:
            source = read(_Image, part, field).source
            if source.type != "base64":
                raise _not_in_request(f"{field}.source.type", source.type, "a source of type base64")
            return decode_data_url(f"{DATA_URL}*;base64,{source.data}", f"{field}.source.data")


def _of_url(url: str, field: str) -> bytes:
    if not url.startswith(DATA_URL):
        raise _not_in_request(field, url, "data:image/png;base64,...")
    return decode_data_url(url, field)


def _not_in_request(field: str, value: str, form: str) -> RequestError:
    return refusal(field, f"{quoted(value)} is not in the request, and the endpoint fetches no images", f"Send {form}")
