"""Which files a path of the configuration means."""

import json
import re
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from verl_mg.errors import UserError

FILE_KINDS = (".jsonl", ".json", ".parquet", ".arrow")
SHARD_KINDS = (".jsonl", ".parquet")


def data_files(path: Path) -> list[Path]:
    """The data files of a path, in the order in which they are read.

    A file is itself. A folder that `datasets.Dataset.save_to_disk` has written is the Arrow files that its state.json
    lists; any other folder is its `.jsonl` or its `.parquet` shards by name, `train-00000-of-00002.parquet` and so on.
    A pattern such as `data/train-*.parquet` is the files it matches, by name.

    Raises:
        UserError: nothing is there; or a folder holds more than the shards of one set, or not all of them.
    """
    if "*" in path.name:
        return _matches(path)
    if path.is_dir():
        _refuse_several_splits(path)
        return _saved_files(path) if (path / "state.json").is_file() else _shards(path)
    _check_kind(path)
    if not path.is_file():
        raise UserError(f"{path}: no such data file; give the path of a .jsonl, .json or .parquet file, or of a folder")
    return [path]


def _check_kind(path: Path) -> None:
    if path.suffix not in FILE_KINDS:
        raise UserError(
            f"{path}: a data file ends in .jsonl, .json (one object a line), .parquet or .arrow, not '{path.suffix}'; "
            "a folder holds such files"
        )


def _matches(pattern: Path) -> list[Path]:
    files = sorted(file for file in pattern.parent.glob(pattern.name) if file.name[0] != ".")
    if not files:
        raise UserError(f"{pattern}: no file matches the pattern; write one for what is in {pattern.parent}")
    for file in files:
        _check_kind(file)
    return files


def _refuse_several_splits(folder: Path) -> None:
    description = folder / "dataset_dict.json"
    if description.is_file():
        splits = _read_json(description).get("splits") or ["train"]
        raise UserError(
            f"{folder}: a dataset of several splits ({', '.join(splits)}); give one of them, as {folder / splits[0]}"
        )


def _saved_files(folder: Path) -> list[Path]:
    state = folder / "state.json"
    try:
        files = [folder / entry["filename"] for entry in _read_json(state)["_data_files"]]
    except (KeyError, TypeError) as error:
        raise UserError(f"{state}: lists no _data_files; save the dataset anew with save_to_disk") from error
    if missing := [file.name for file in files if not file.is_file()]:
        raise UserError(f"{folder}: {missing[0]} of its state.json is missing; copy the whole folder again")
    return files


def _shards(folder: Path) -> list[Path]:
    files = sorted(file for kind in SHARD_KINDS for file in folder.glob(f"*{kind}") if file.name[0] != ".")
    if not files:
        raise UserError(
            f"{folder}: no .jsonl or .parquet files in it, nor a dataset saved with save_to_disk; "
            "give the folder that holds them"
        )
    families = {f"{_family(file)}*{file.suffix}": file for file in files}
    if len(families) > 1:
        # A train and a test file side by side: to read both as one would train on the test.
        raise UserError(
            f"{folder}: its files are not shards of one set ({', '.join(sorted(families))}); give one file, or a "
            f"pattern such as {folder / min(families)}, or name each as a source of its own"
        )
    _check_complete(folder, files)
    return files


def _family(file: Path) -> str:
    """What the names of shards of one set share: the words before the number."""
    words = takewhile(lambda word: not word.isdecimal(), re.split(r"[-_.]", file.stem))
    return "-".join(words).rstrip("0123456789")


def _check_complete(folder: Path, files: Sequence[Path]) -> None:
    """Shards that say how many they are are all there, or a download was cut."""
    for file in files:
        counted = re.search(r"\d+-of-(\d+)", file.stem)
        if counted and int(counted[1]) != len(files):
            raise UserError(
                f"{folder}: {len(files)} of {int(counted[1])} shards are there, by the name {file.name}; fetch the "
                f"others, or take these alone with the pattern {folder / '*'}{file.suffix}"
            )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not readable JSON ({error}); save the dataset anew with save_to_disk") from error
    return value if isinstance(value, dict) else {}
