"""Images of prompts and rows: encoded files, as small as they were read; pixels are made where a model needs them.

A row of a `Batch` has a tuple of images, in the order of their placeholders in its tokens. All rows of a prompt share
the same `Image` objects, whatever is selected, joined or sent: a rank holds an image once. The pixel values of a
micro-batch come from `data.image_processor.ImageProcessor.model_inputs`: they are 20 to 100 times larger than the file,
and in columns they would be in each selection, checkpoint, record and message.

    tokens of a row  "What", "is", IMAGE, "next", "to", IMAGE, "?"    images of the row  (Image(a), Image(b))
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from io import BytesIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image as Pixels


@dataclass(frozen=True)
class Image:
    """An encoded image, such as a PNG or JPEG file. Images with the same bytes are equal."""

    data: bytes

    @cached_property
    def key(self) -> str:
        """Hash of the bytes, 32 hexadecimal digits: the same on every rank and in every run."""
        return blake2b(self.data, digest_size=16).hexdigest()

    # The hash that dataclasses generate would read the whole file each time.
    def __hash__(self) -> int:
        return hash(self.key)

    @cached_property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels; only the header is read."""
        import PIL.Image

        with PIL.Image.open(BytesIO(self.data)) as file:
            return file.size

    @property
    def data_url(self) -> str:
        """The image as `data:image/png;base64,...`."""
        import PIL.Image

        with PIL.Image.open(BytesIO(self.data)) as file:
            kind = file.get_format_mimetype()
        return f"data:{kind};base64,{base64.b64encode(self.data).decode()}"

    def pixels(self) -> Pixels:
        """Returns the decoded image in RGB; OSError or ValueError where the file is corrupt."""
        import PIL.Image

        with PIL.Image.open(BytesIO(self.data)) as file:
            return file.convert("RGB")


def encoded(value: object) -> Image | None:
    """Returns an image of Pillow as a PNG file, and an encoded one as it is; None for any other value."""
    import PIL.Image

    if isinstance(value, PIL.Image.Image):
        file = BytesIO()
        value.save(file, "PNG")  # without loss
        return Image(file.getvalue())
    return value if isinstance(value, Image) else None


RowImages = tuple[Image, ...]  # the images of a row, in the order of their placeholders


def distinct_images(rows: Iterable[RowImages]) -> dict[str, Image]:
    """Returns the images of rows by their keys, each once."""
    return {image.key: image for row in rows for image in row}
