"""Format of recorded samples: a Parquet file per iteration and rank, for people and for a replay.

    samples/000012/rank-3.parquet      iteration 12, the rows that were on rank 3
    samples/images/KEY                 an image; rows that have images give their keys in the column `images`

A row has `iteration`, `call` (number of the batch among those that the recipe received), the columns of `schema`, and
all other columns of the batch under their own names: the recipe has added some of them, to this batch or to a batch of
selected rows that a role was trained on (null where a row is not among those). A column that the recipe has changed is
there as it was left, and under `received.NAME` as it was received. The metadata of a file is a `FileMetadata`, which a
replay needs. Example of a row, a prompt of two tokens, a turn of the policy, the result of a tool, and a last token:

    tokens 5 6 7 8 9 4   prompt_length 2   loss_mask F F T T F T   policy_versions -1 -1 3 3 -1 3
    turns [{by: policy, start: 2, end: 4}, {by: tool, start: 4, end: 5}, {by: policy, start: 5, end: 6}]
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import pyarrow as pa
from torch import Tensor

from verl_mg.batch import Batch, ColumnKind
from verl_mg.errors import UserError
from verl_mg.images import Image, RowImages, distinct_images
from verl_mg.jsonl import replacing

SAMPLES = "samples"
NUMBERS = {
    **dict.fromkeys(("trajectory", "sample_id", "group", "prompt_id", "policy_version"), pa.int64()),
    "reward": pa.float32(),
    "prompt_length": pa.int32(),
    "truncated": pa.bool_(),
}
"""Sequence columns of every file; `reward` is null where nothing was scored."""
TOKENS = {"tokens": pa.int32(), "loss_mask": pa.bool_(), "policy_versions": pa.int64()}
"""Token columns of every batch."""
TEXTS = ("prompt", "response", "answer", "source", "finish")  # text columns of every file
CONVERSATION = "conversation"
"""Text column with the conversation of an agent as JSON, in the first row of each episode; null in others and
without agents. `rows.samples.conversation_of` makes it."""
PARTS = pa.map_(pa.string(), pa.float32())  # type of the column `parts`: the parts of the reward by name
TURNS = pa.list_(pa.struct([("by", pa.string()), ("start", pa.int32()), ("end", pa.int32())]))
"""Type of the column `turns`: ranges of the response by the policy or by tools."""
PART, RECEIVED = "reward.", "received."
"""Prefixes of columns: parts of the reward in a batch, and columns as they were received in a file."""
COLUMN_RENAMES = {"answer": "answer_key"}
"""Columns of a batch that have another name in the file, in which `answer` is the correct answer."""

_METADATA = b"verl_mg"
_EDGE_BYTES = 2**16  # bytes at the end of a weight file that a fingerprint reads, instead of all of them
COLUMN = "images"  # column of a file of samples: keys of the images of a row; only where rows have images


@dataclass(frozen=True)
class ColumnSchema:
    """Type of a column of a batch."""

    kind: int  # unit of an entry (token, sequence, ...), a `ColumnKind`
    dtype: str
    rest: tuple[int, ...]  # its dimensions after the first


@dataclass(frozen=True)
class FileMetadata:
    """Facts about the samples that the columns of a file do not show."""

    recipe: str
    model: str  # `fingerprint` of the initial model
    ranks: int
    rows: int = 0  # rows of the iteration on this rank, recorded or not
    calls: tuple[Mapping[str, ColumnSchema], ...] = ()  # the columns of each batch as it was received
    agents: tuple[str, ...] = ()  # names whose numbers the column `agent` has, `rollout.agent_names`

    def metadata(self) -> dict[bytes, bytes]:
        """Returns the metadata of the Parquet file."""
        return {_METADATA: json.dumps(asdict(self)).encode()}

    @classmethod
    def of(cls, metadata: Mapping[bytes, bytes] | None) -> FileMetadata | None:
        """Returns the contents of a Parquet file's metadata; None where verl_mg did not write it."""
        if not metadata or _METADATA not in metadata:
            return None
        tree: dict[str, Any] = json.loads(metadata[_METADATA])
        # JSON has lists for the tuples of the classes.
        tree["calls"] = tuple(
            {name: ColumnSchema(c["kind"], c["dtype"], tuple(c["rest"])) for name, c in call.items()}
            for call in tree["calls"]
        )
        tree["agents"] = tuple(tree.get("agents", ()))  # absent in earlier versions
        return cls(**tree)


def iteration_folder(samples: Path, iteration: int) -> Path:
    """Returns the folder of an iteration's files; `samples` is the folder of all samples of the run."""
    return samples / f"{iteration:06d}"


def file_of(folder: Path, rank: int) -> Path:
    """Returns the file of a rank in the folder of an iteration."""
    return folder / f"rank-{rank}.parquet"


def describe(batch: Batch) -> dict[str, ColumnSchema]:
    """Returns the schema of each column of a batch."""
    columns = {name: (batch.kind(name), batch[name]) for name in batch.names()}
    return {
        name: ColumnSchema(int(kind), str(values.dtype).removeprefix("torch."), tuple(values.shape[1:]))
        for name, (kind, values) in columns.items()
    }


def schema(others: Mapping[str, pa.DataType], metadata: FileMetadata) -> pa.Schema:
    """Returns the schema of a file, with `others` after the columns of every file."""
    fields: dict[str, pa.DataType] = {"iteration": pa.int64(), "call": pa.int32(), **NUMBERS}
    fields |= dict.fromkeys((*TEXTS, CONVERSATION), pa.string()) | {"parts": PARTS}
    fields |= {name: pa.list_(kind) for name, kind in TOKENS.items()}
    fields |= {"pieces": pa.list_(pa.string()), "turns": TURNS} | dict(sorted(others.items()))
    return pa.schema(list(fields.items()), metadata.metadata())


def arrow_type(kind: ColumnKind, values: Tensor) -> pa.DataType:
    """Returns the type of a column; several numbers per row or token are a flat list."""
    is_float = values.dtype.is_floating_point
    if kind is ColumnKind.SEQUENCE and values.dim() == 1:
        return pa.float32() if is_float else pa.int64()
    name = str(values.dtype).removeprefix("torch.")
    return pa.list_(pa.float32() if is_float else pa.type_for_alias(name))


def fingerprint(model: Path) -> str:
    """Returns a digest of config.json and of the sizes and ends of the weight files, wherever the model is located."""
    digest = hashlib.blake2b((model / "config.json").read_bytes(), digest_size=16)
    for file in sorted(model.glob("*.safetensors")):
        size = file.stat().st_size
        with file.open("rb") as weights:
            weights.seek(-min(size, _EDGE_BYTES), os.SEEK_END)
            digest.update(f"{file.name} {size}".encode() + weights.read())
    return digest.hexdigest()


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
                with replacing(file) as new:  # several ranks may write the same image at the same time
                    new.write_bytes(image.data)

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
