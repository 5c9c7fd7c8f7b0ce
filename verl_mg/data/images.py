"""Images of a record: found and measured when data is read, loaded and decoded when their prompt is generated.

Values of the field, one or a list of them: a path, relative to the folder of the data file; bytes of an image file;
`{"bytes": ..., "path": ...}` as Hugging Face datasets write images into Parquet; `data:image/png;base64,...`.
"""

from __future__ import annotations

import base64
import binascii
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any
from weakref import ReferenceType, ref

from verl_mg.data.file_formats import Record
from verl_mg.errors import UserError
from verl_mg.images import Image

DATA_URL = "data:image/"  # beginning of a text that contains an image in base64
MARKER = "<image>"  # text that stands for an image in prompts for verl and TRL


@dataclass(frozen=True)
class ImageLimits:
    """Limits of the images of a prompt, keys of `data`."""

    max_pixels: int  # largest width times height of an image
    max_images: int


@dataclass(eq=False)
class ImageSource:
    """An image of the data that is not loaded yet, or no longer."""

    place: str  # place of the record and number of the image, for errors
    size: tuple[int, int]  # width and height in pixels
    path: Path | None = None  # file of the image; None where the record contains it
    data: bytes = b""  # bytes of the image where the record contains it
    # Weak, so that an image is freed with the last row that has it; the data of a run keeps only its place.
    _loaded: ReferenceType[Image] | None = field(default=None, repr=False)

    def load(self) -> Image:
        """Returns the image, the same object for all samples of a prompt; UserError if it cannot be decoded."""
        image = self._loaded() if self._loaded else None
        if image is None:
            image = decoded(self.data if self.path is None else _read(self.path, self.place), self.place)
            self._loaded = ref(image)
        return image


def images_of(record: Record, name: str, place: str, limits: ImageLimits) -> tuple[ImageSource, ...]:
    """Returns the images of a record, found and measured; none where it has no such field."""
    value = record.get(name)
    values = value if isinstance(value, list | tuple) else [] if value is None else [value]
    if len(values) > limits.max_images:
        raise UserError(
            f"{place}: {len(values)} images, data.max_images is {limits.max_images}. Raise it, or leave out images."
        )
    folder = Path(place.rpartition(":")[0]).parent
    return tuple(
        _source(item, folder, f"{place}: image {number} of '{name}'", limits)
        for number, item in enumerate(values, start=1)
    )


def check_markers(images: Sequence[ImageSource], markers: int, place: str) -> None:
    """Raises UserError if a prompt does not have one place for each of its images."""
    if len(images) != markers:
        raise UserError(
            f"{place}: the prompt has places for {markers} images, the record has {len(images)}. Write {MARKER} or a "
            'part {"type": "image"} where each image belongs.'
        )


def _source(value: Any, folder: Path, place: str, limits: ImageLimits) -> ImageSource:
    path, data = _path_or_bytes(value, place)
    if path is not None:
        path = folder / path
        if not path.is_file():
            raise UserError(f"{place}: there is no file {path}. Write its path relative to the data file.")
    return ImageSource(place, checked_size(BytesIO(data) if path is None else path, place, limits), path, data)


def _path_or_bytes(value: Any, place: str) -> tuple[Path | None, bytes]:
    if isinstance(value, dict) and (value.get("bytes") or value.get("path")):
        value = value.get("bytes") or value["path"]
    if isinstance(value, bytes):
        return None, value
    if isinstance(value, str) and value.startswith(DATA_URL):
        return None, decode_data_url(value, place)
    if isinstance(value, str) and value:
        return Path(value), b""
    raise UserError(
        f"{place}: {value!r:.60} is not an image. Write a path, the bytes of a file, "
        '{"bytes": ...} or data:image/png;base64,...'
    )


def decode_data_url(text: str, place: str) -> bytes:
    """Returns the bytes in `data:image/png;base64,...`; UserError where they are not base64."""
    head, _, body = text.partition(",")
    try:
        if not head.endswith(";base64"):
            raise ValueError("no ;base64 in front of the comma")
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise UserError(f"{place}: not an image in base64 ({error}). Write data:image/png;base64,...") from None


def checked_size(file: BytesIO | Path, place: str, limits: ImageLimits) -> tuple[int, int]:
    """Returns width and height of an image from its header, without decoding it."""
    import PIL.Image

    try:
        with warnings.catch_warnings(), PIL.Image.open(file) as image:
            warnings.simplefilter("ignore", PIL.Image.DecompressionBombWarning)  # data.max_image_pixels is the limit
            width, height = image.size
    except PIL.Image.DecompressionBombError as error:
        raise UserError(f"{place}: too large ({error}). Reduce the image.") from None
    except (OSError, ValueError, SyntaxError) as error:
        raise _corrupt(place, error) from None
    if width * height > limits.max_pixels:
        raise UserError(
            f"{place}: it has {width} x {height} pixels, data.max_image_pixels is {limits.max_pixels}. Raise it, or "
            "reduce the image."
        )
    return width, height


def decoded(data: bytes, place: str) -> Image:
    """Returns an image, after it was decoded once as a check."""
    image = Image(data)
    try:
        image.pixels()
    except (OSError, ValueError, SyntaxError) as error:  # the last one of broken PNG files
        raise _corrupt(place, error) from None
    return image


def _read(path: Path, place: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{place}: {path} cannot be read ({error.strerror}). Write the file again.") from None


def _corrupt(place: str, error: Exception) -> UserError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return UserError(f"{place}: not a readable image ({reason}). Write the image again.")
