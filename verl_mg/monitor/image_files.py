"""Images of recorded samples: `samples/images/KEY`, each written once for a run, although many rows may have it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from weakref import WeakValueDictionary

from verl_mg.errors import UserError
from verl_mg.images import Image, RowImages, distinct_images

COLUMN = "images"
"""Column of a file of samples: keys of the images of a row; only where rows have images."""


class ImageFiles:
    """Folder of the images of a run's samples; the ranks write into it independently."""

    def __init__(self, samples: Path) -> None:
        self._folder = samples / COLUMN
        # Weak, so that an image is in memory only as long as rows have it.
        self._read: WeakValueDictionary[str, Image] = WeakValueDictionary()

    def write(self, rows: Iterable[RowImages]) -> None:
        """Writes the images of rows that are not there yet. OSError where the folder cannot be written."""
        for key, image in distinct_images(rows).items():
            file = self._folder / key
            if not file.exists():
                self._folder.mkdir(parents=True, exist_ok=True)
                # Several ranks may write the same image at the same time, each into its own file.
                partial = file.with_name(f".{key}.{os.getpid()}.partial")
                partial.write_bytes(image.data)
                os.replace(partial, file)

    def read(self, keys: Iterable[Sequence[str]]) -> list[RowImages]:
        """Returns the images of rows; UserError where a file is missing or has other contents."""
        return [tuple(self._image(key) for key in row) for row in keys]

    def _image(self, key: str) -> Image:
        image = self._read.get(key)
        if image is None:
            file = self._folder / key
            try:
                image = Image(file.read_bytes())
            except OSError as error:
                raise UserError(f"{file}: cannot be read ({error.strerror}). Copy the whole folder again.") from None
            if image.key != key:  # the key is a digest of the bytes
                raise UserError(f"{file}: not the image that was recorded. Copy the whole folder again.")
            self._read[key] = image
        return image
