"""URLs of object stores, each in place of a local folder."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from verl_mg.errors import UserError

_SCHEME = re.compile(r"([A-Za-z][\w+.-]*):/")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")  # as S3 names buckets
# Without characters that mean something else in URLs: a user's password or a query would be in every record of the run.
_PREFIX = re.compile(r"(?!\.{1,2}(/|$))[\w.+=-]+(/(?!\.{1,2}(/|$))[\w.+=-]+)*")
EXAMPLE = "s3://BUCKET/runs/first"
COPY_FIRST = "only job.output, status and view take object stores. Copy the folder first, as with aws s3 cp --recursive"


@dataclass(frozen=True)
class ObjectUrl:
    """A folder of an S3 bucket."""

    bucket: str
    prefix: str  # names of the folder and of those above it, without slashes at the ends

    @classmethod
    def parse(cls, text: str) -> ObjectUrl | None:
        """Returns the URL in a text, None for a local path; ValueError for other stores and for malformed URLs."""
        scheme = _SCHEME.match(text)
        if not scheme:
            return None
        if scheme[1] != "s3":
            raise ValueError(
                f"{scheme[1]}:// has not been tested. Write a local folder, or one on S3 such as {EXAMPLE}"
            )
        bucket, _, prefix = text.removeprefix("s3://").rstrip("/").partition("/")
        if not text.startswith("s3://") or not _BUCKET.fullmatch(bucket) or not _PREFIX.fullmatch(prefix):
            raise ValueError(
                f"it names no folder of a bucket, or with characters that are not letters, digits or '_.+=-'. Write "
                f"{EXAMPLE}"
            )
        return cls(bucket, prefix)

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"

    def __truediv__(self, name: str) -> ObjectUrl:
        return ObjectUrl(self.bucket, f"{self.prefix}/{name}")

    @property
    def name(self) -> str:
        """Name of the folder, without those above it."""
        return self.prefix.rpartition("/")[2]

    @property
    def working_folder(self) -> Path:
        """Local folder in which a node has the files that are written or read now; TMPDIR says on which disk."""
        # One for each user: another user's folder cannot be written.
        digest = hashlib.sha256(str(self).encode()).hexdigest()[:12]
        return Path(tempfile.gettempdir(), f"verl_mg-{os.getuid()}", f"{self.name}-{digest}")


def require_local(text: str, option: str) -> Path:
    """Returns the path in a text; UserError for the URL of a store, which `option` does not take."""
    try:
        url = ObjectUrl.parse(text)
    except ValueError as error:
        raise UserError(f"{option} {text}: {error}.") from None
    if url:
        raise UserError(f"{option} {text}: {COPY_FIRST}.")
    return Path(text)


def names_store(path: Path) -> bool:
    """Returns whether a path was made of the URL of a store."""
    return bool(_SCHEME.match(str(path)))
