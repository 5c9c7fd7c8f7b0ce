"""Objects below an S3 URL, by s3fs: written in parts at the same time, read in ranges, each request repeated.

    put     create -> parts 1, 2, ... on several threads -> complete; until then there is no object
    fetch   ranges on several threads, written and summed in order

A request that fails because a connection is lost is repeated, with a warning that names the object. After the last
attempt, and for errors that another attempt cannot change, a `StoreError` says in one line what is wrong.
"""

from __future__ import annotations

import errno
import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_attempt, wait_exponential

from verl_mg.errors import UserError
from verl_mg.stores.folders import Content, StoredFile
from verl_mg.stores.url import ObjectUrl

if TYPE_CHECKING:
    from s3fs import S3FileSystem

T = TypeVar("T")

PART_BYTES = 2**26
"""Bytes of a part; S3 allows parts of 5 MiB to 5 GiB."""
MAX_PARTS = 10_000  # S3's limit for an object
DELETED_AT_ONCE = 1000  # S3's limit for a request
THREADS = 4  # requests of a rank at the same time, each with a part in memory
CONNECT_SECONDS = 10
ATTEMPTS = 9
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
"""Seconds before the second attempt, doubled for each further one, and their limit: 91 s in all."""
CHECK_STORE = "Check bucket, AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."  # remedy of its errors
UPLOADS = 3  # uploads of an object that are begun, where the store forgets the one before
# Names, since the modules of these classes are imported only for S3.
_LOST = frozenset(("HTTPClientError", "ConnectionError", "IncompleteRead", "ResponseParserError", "ClientError"))
"""Classes of botocore, urllib3 and aiohttp for lost connections."""

log = logging.getLogger(__name__)


class StoreError(OSError):
    """A store that cannot be written or read; `filename` is the object."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(errno.EIO, reason, place)

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


class UnansweredError(StoreError):
    """A request that a store has not carried out, which says nothing about the objects."""


class Bucket:
    """The objects below a URL; `key` is the configuration key that has it, for messages."""

    def __init__(
        self,
        url: ObjectUrl,
        key: str = "job.output",
        part_bytes: int = PART_BYTES,
        attempts: int = ATTEMPTS,
        first_wait_s: float = FIRST_WAIT,
    ) -> None:
        self.url, self._key, self._part_bytes, self._attempts = url, key, part_bytes, attempts
        self._wait = wait_exponential(first_wait_s, LONGEST_WAIT)
        self._system = _connect(url, key)

    def put(self, name: str, blocks: Iterable[Content]) -> StoredFile:
        """Writes an object, which is absent or as before until it is complete; returns its sum and size."""
        views = [view for block in blocks if len(view := memoryview(block).cast("B"))]
        size, digest = sum(map(len, views)), hashlib.sha256()
        for view in views:
            digest.update(view)
        for number in range(1, UPLOADS + 1):
            try:
                if size <= self._part_bytes:
                    self._of_object(name, "put_object", Body=b"".join(views))
                else:
                    self._put_parts(name, views, size)
                break
            except FileNotFoundError as error:  # a store that was started again may have forgotten the parts
                if number == UPLOADS:
                    raise StoreError(f"{self.url}/{name}", _reason(error)) from None
        return StoredFile(digest.hexdigest(), size)

    def _put_parts(self, name: str, views: Sequence[memoryview], size: int) -> None:
        upload = self._of_object(name, "create_multipart_upload")["UploadId"]

        def put(piece: tuple[int, bytes]) -> dict[str, Any]:
            number, content = piece
            sent = self._of_object(name, "upload_part", UploadId=upload, PartNumber=number, Body=content)
            return {"PartNumber": number, "ETag": sent["ETag"]}

        parts: list[dict[str, Any]] = []
        try:
            with ThreadPoolExecutor(THREADS) as threads:
                pieces = enumerate(_cut(views, max(self._part_bytes, -(-size // MAX_PARTS))), start=1)
                # Group by group: a part that waits is a copy in memory.
                for group in _groups(pieces, THREADS):
                    parts += threads.map(put, group)
            self._of_object(name, "complete_multipart_upload", UploadId=upload, MultipartUpload={"Parts": parts})
        except BaseException:
            self._abort(name, upload)
            raise

    def _abort(self, name: str, upload: str) -> None:
        try:  # once, since the store may be the reason
            key = self._key_of(name)
            self._system.call_s3("abort_multipart_upload", Bucket=self.url.bucket, Key=key, UploadId=upload)
        except Exception as error:
            log.info("%s/%s: parts of an upload that failed may remain (%s)", self.url, name, _reason(error))

    def read(self, name: str) -> bytes:
        """Returns the content of a small object; FileNotFoundError where there is none."""
        return self._content(name)

    def fetch(self, name: str, path: Path, size: int) -> StoredFile:
        """Writes the first `size` bytes of an object into a file; returns their sum, and how many there were."""
        digest, total, step = hashlib.sha256(), 0, self._part_bytes
        with path.open("wb") as file, ThreadPoolExecutor(THREADS) as threads:
            for starts in _groups(range(0, size, step), THREADS):
                for content in threads.map(lambda start: self._content(name, start, min(start + step, size)), starts):
                    digest.update(content)
                    total += file.write(content)
        return StoredFile(digest.hexdigest(), total)

    def sizes(self, below: str = "") -> dict[str, int]:
        """Returns the sizes of all objects below a name, by their names below the URL."""
        sizes: dict[str, int] = {}
        more: dict[str, str] = {}
        while True:
            page = self._listed(below, "list_objects_v2", **more)
            sizes |= {self._name_of(entry["Key"]): entry["Size"] for entry in page.get("Contents", ())}
            if not page.get("IsTruncated"):
                return sizes
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def remove(self, names: Iterable[str]) -> None:
        """Removes objects; those that are absent already are no error."""
        for group in _groups(names, DELETED_AT_ONCE):
            deleted = {"Objects": [{"Key": self._key_of(name)} for name in group], "Quiet": True}
            # The request succeeds whatever becomes of its objects.
            for refused in self._call(group[0], "delete_objects", Delete=deleted).get("Errors", ()):
                place, reason = f"{self.url}/{self._name_of(refused['Key'])}", refused.get("Message") or refused["Code"]
                raise StoreError(place, f"not removed ({reason})")

    def abort_uploads(self) -> None:
        """Discards the parts of objects that a killed job has left: a store bills them."""
        for upload in self._listed("", "list_multipart_uploads").get("Uploads", ()):
            self._abort(self._name_of(upload["Key"]), upload["UploadId"])

    # -- requests

    def _key_of(self, name: str) -> str:
        return f"{self.url.prefix}/{name}"

    def _name_of(self, key: str) -> str:
        return key.removeprefix(f"{self.url.prefix}/")

    def _listed(self, below: str, method: str, **arguments: Any) -> Any:
        prefix = self._key_of(f"{below}/" if below else "")
        try:
            return self._call(below, method, Prefix=prefix, **arguments)
        except FileNotFoundError as error:  # the bucket
            raise UnansweredError(str(self.url), _reason(error)) from None

    def _of_object(self, name: str, method: str, **arguments: Any) -> Any:
        return self._call(name, method, Key=self._key_of(name), **arguments)

    def _call(self, name: str, method: str, **arguments: Any) -> Any:
        return self._retried(name, lambda: self._system.call_s3(method, Bucket=self.url.bucket, **arguments))

    def _content(self, name: str, start: int | None = None, stop: int | None = None) -> bytes:
        path = f"{self.url.bucket}/{self._key_of(name)}"
        content: bytes = self._retried(name, lambda: self._system.cat_file(path, start=start, end=stop))
        return content

    def _retried(self, name: str, request: Callable[[], T]) -> T:
        """Returns the result of a request; FileNotFoundError where the object is absent, else UnansweredError."""
        place = f"{self.url}/{name}"

        def warn(state: RetryCallState) -> None:
            error = state.outcome.exception() if state.outcome else None
            what = "the store failed" if _status(error) else "lost the connection"
            log.warning(
                "%s: %s at %s (%s); attempt %d of %d in %.1f s",
                self._key, what, place, _reason(error), state.attempt_number + 1, self._attempts, state.upcoming_sleep,
            )  # fmt: skip

        retrying = Retrying(
            stop=stop_after_attempt(self._attempts),
            wait=self._wait,
            retry=retry_if_exception(_is_temporary),
            before_sleep=warn,
            reraise=True,
        )
        try:
            return retrying(request)
        except FileNotFoundError:
            raise
        except Exception as error:  # of botocore, aiohttp and the system
            what = "the store failed" if _status(error) else "the connection was lost"
            attempts = f" in {self._attempts} attempts" if self._attempts > 1 else ""
            repeated = f"{what}{attempts}: " if _is_temporary(error) else ""
            raise UnansweredError(place, f"{repeated}{_reason(error)}") from None


def _connect(url: ObjectUrl, key: str) -> S3FileSystem:
    try:
        from s3fs import S3FileSystem
    except ImportError as error:
        raise UserError(f"{key}={url}: S3 needs the package s3fs ({error}). Install verl-mg[s3].") from None
    system = S3FileSystem(
        skip_instance_cache=True,
        use_listings_cache=False,
        # Attempts are counted and reported in one place, here.
        config_kwargs={"retries": {"total_max_attempts": 1}, "connect_timeout": CONNECT_SECONDS},
    )
    system.retries = 1
    return system


def _is_temporary(error: BaseException) -> bool:
    """Returns whether another attempt may succeed: the connection was lost, or the store is overloaded."""
    if status := _status(error):
        return status >= 500 or status in (408, 429)
    names = {base.__name__ for base in type(error).__mro__}
    return isinstance(error, TimeoutError | ConnectionError) or not names.isdisjoint(_LOST)


def _status(error: BaseException | None) -> int:
    """Returns the status with which the store has answered; 0 where it has not."""
    answer = getattr(error and error.__cause__, "response", None) or {}  # of an error that s3fs has translated
    return int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _reason(error: BaseException | None) -> str:
    text = " ".join(str(getattr(error, "strerror", None) or error).split())
    return text if isinstance(error, OSError) and text else f"{type(error).__name__}: {text}"


def _groups(items: Iterable[T], size: int) -> Iterator[list[T]]:
    rest = iter(items)
    while group := list(islice(rest, size)):
        yield group


def _cut(views: Iterable[memoryview], size: int) -> Iterator[bytes]:
    """Yields the bytes of views that follow each other in parts of `size`; the last one is shorter."""
    part: list[memoryview] = []
    free = size
    for view in views:
        while len(view):
            part.append(view[:free])
            free -= len(part[-1])
            view = view[len(part[-1]) :]
            if not free:
                yield b"".join(part)
                part, free = [], size
    if part:
        yield b"".join(part)
