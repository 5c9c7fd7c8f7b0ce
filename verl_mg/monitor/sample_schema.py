"""How samples are kept: a Parquet file an iteration and rank, for people and for a replay.

    samples/000012/rank-3.parquet      iteration 12, the rows that lay on rank 3

A row has `iteration`, `call` (which of the batches that the recipe was handed), what is in `schema`, and all other
columns of the batch under their own names: of these the recipe has added some, to this batch or to one that it gave to
a role to learn from (null where a row was not among those). A column that the recipe has changed is there as it was
left, and under `given.NAME` as it was handed. The file's metadata holds an `FileMetadata`, which a replay needs.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from torch import Tensor

from verl_mg.batch import Batch, ColumnKind

SAMPLES = "samples"
"""In the folder of a run."""
NUMBERS = {"sample_id": pa.int64(), "group": pa.int64(), "prompt_id": pa.int64(), "policy_version": pa.int64()} | {
    "reward": pa.float32(),
    "prompt_length": pa.int32(),
    "truncated": pa.bool_(),
}
"""Sequence columns of every batch."""
TOKENS = {"tokens": pa.int32(), "loss_mask": pa.bool_(), "policy_versions": pa.int64()}
"""Token columns of every batch."""
TEXTS = ("prompt", "response", "answer", "source", "finish")
PARTS = pa.map_(pa.string(), pa.float32())
TURNS = pa.list_(pa.struct([("by", pa.string()), ("start", pa.int32()), ("end", pa.int32())]))
PART, GIVEN = "reward.", "given."
OTHER_NAMES = {"answer": "answer_key"}
"""Columns of a batch that have another name in the file: there, `answer` is what was right."""

_METADATA = b"verl_mg"
_EDGE = 2**16


@dataclass(frozen=True)
class ColumnSchema:
    """A column of a batch: what it has an entry of, torch's name of the type, and the dimensions after the first."""

    kind: int
    dtype: str
    rest: tuple[int, ...]


@dataclass(frozen=True)
class FileMetadata:
    """What a file does not show. recipe: its name. model: its `fingerprint`. ranks: of the job.

    rows: of the iteration on this rank, whether kept or not. calls: the columns of each batch as it was handed.
    """

    recipe: str
    model: str
    ranks: int
    rows: int = 0
    calls: tuple[Mapping[str, ColumnSchema], ...] = ()

    def metadata(self) -> dict[bytes, bytes]:
        """As a file bears it."""
        return {_METADATA: json.dumps(asdict(self)).encode()}

    @classmethod
    def of(cls, metadata: Mapping[bytes, bytes] | None) -> FileMetadata | None:
        """The way back; None where a file bears none."""
        if not metadata or _METADATA not in metadata:
            return None
        tree: dict[str, Any] = json.loads(metadata[_METADATA])
        tree["calls"] = tuple(
            {name: ColumnSchema(kind, dtype, tuple(rest)) for name, (kind, dtype, rest) in _values(call)}
            for call in tree["calls"]
        )
        return cls(**tree)


def _values(call: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, tuple[Any, ...]]]:
    return [(name, (column["kind"], column["dtype"], column["rest"])) for name, column in call.items()]


def iteration_folder(samples: Path, iteration: int) -> Path:
    """Where an iteration's files lie."""
    return samples / f"{iteration:06d}"


def file_of(folder: Path, rank: int) -> Path:
    """A rank's file in the folder of an iteration."""
    return folder / f"rank-{rank}.parquet"


def describe(batch: Batch) -> dict[str, ColumnSchema]:
    """The columns of a batch."""
    return {
        name: ColumnSchema(
            int(batch.kind(name)), str(batch[name].dtype).removeprefix("torch."), tuple(batch[name].shape[1:])
        )
        for name in batch.names()
    }


def schema(others: Mapping[str, pa.DataType], about: FileMetadata) -> pa.Schema:
    """Of a file with these columns beside those that all have."""
    fields: dict[str, pa.DataType] = {"iteration": pa.int64(), "call": pa.int32(), **NUMBERS}
    fields |= dict.fromkeys(TEXTS, pa.string()) | {"parts": PARTS}
    fields |= {name: pa.list_(kind) for name, kind in TOKENS.items()}
    fields |= {"pieces": pa.list_(pa.string()), "turns": TURNS} | dict(sorted(others.items()))
    return pa.schema(list(fields.items()), about.metadata())


def arrow_type(kind: ColumnKind, values: Tensor) -> pa.DataType:
    """Of a column of a batch: of rows float32 or int64, of tokens lists of float32, or of whole numbers as they are.

    What has several numbers a row or token lies flat in a list.
    """
    floating = values.dtype.is_floating_point
    if kind is ColumnKind.SEQUENCE and values.dim() == 1:
        return pa.float32() if floating else pa.int64()
    name = str(values.dtype).removeprefix("torch.")
    return pa.list_(pa.float32() if floating else pa.type_for_alias(name))


def fingerprint(model: Path) -> str:
    """Tells one model from another by its config.json and the sizes and ends of its weight files; not by its place."""
    digest = hashlib.blake2b((model / "config.json").read_bytes(), digest_size=16)
    for file in sorted(model.glob("*.safetensors")):
        size = file.stat().st_size
        with file.open("rb") as weights:
            weights.seek(-min(size, _EDGE), os.SEEK_END)
            digest.update(f"{file.name} {size}".encode() + weights.read())
    return digest.hexdigest()
