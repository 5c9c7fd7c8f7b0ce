"""Data files of a path, and their records."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from verl_mg.data.file_formats import FILE_KINDS, Record, records_of
from verl_mg.data.hub_files import hub_data_files
from verl_mg.errors import UserError
from verl_mg.hub import HubName
from verl_mg.import_function import load_function

HARBOR = "harbor:"  # beginning of a path that means task folders of Harbor
SHARD_KINDS = (".jsonl", ".parquet")
REASONING_GYM = "reasoning_gym:"  # beginning of a path of `data` that means generated prompts
# Tasks of reasoning-gym 0.1.25 that generate other entries for the same seed if PYTHONHASHSEED differs; of its 105
# tasks, 6 entries each, the others do not.
HASH_DEPENDENT = ("isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder")


def read_records(path: str | Path) -> list[Record]:
    """Returns the records of a path, in the order of files and lines. Errors name the file and line.

    It is a `.jsonl` or `.json` file (one JSON object per line; blank lines are skipped; `.json` also a list of
    objects), `.parquet`, `.arrow`, a folder or pattern as in `data_files`, the name of a data set on a hub,
    `reasoning_gym:NAME` or `harbor:FOLDER`. Records of files have no fields that are null, see `file_formats`.
    """
    return [record for _, record in located_records(path)]


def located_records(path: str | Path) -> list[tuple[str, Record]]:
    """Returns the records of `path`, each with its place `file:line` (`file:row` for Parquet and Arrow), from 1."""
    if str(path).startswith(REASONING_GYM):
        return generated_records(str(path))
    if str(path).startswith(HARBOR):
        records_of_tasks = load_function("verl_mg.recipes.environments.harbor_tasks:harbor_records", f"{path}: reader")
        return list(records_of_tasks(str(path)))
    records = list(stored_records(path))
    if not records:
        raise UserError(f"{path}: contains no records. Write one JSON object per line, or one row per prompt.")
    return records


def stored_records(path: str | Path) -> Iterator[tuple[str, Record]]:
    """Yields the records of the files of `path` and their places, without keeping them."""
    for file in data_files(Path(path)):
        for line, record in records_of(file):
            yield f"{file}:{line}", record


def prepared(located: Sequence[tuple[str, Record]], name: str) -> list[tuple[str, Record]]:
    """Returns the records that a function makes of others, without those that it leaves out.

    Args:
        located: records with their places.
        name: name of the function; it gets a record and returns a record, or None to leave it out.
    """
    function = load_function(name, "data.prepare")
    records: list[tuple[str, Record]] = []
    for place, record in located:
        try:
            result = function(record)
        except Exception as error:  # the user's code may raise anything
            raise UserError(
                f"{place}: data.prepare={name} raised {type(error).__name__}: {error}. Fix it, or prepare the records "
                "of another set."
            ) from error
        if not isinstance(result, dict | None):
            raise UserError(
                f"{place}: data.prepare={name} returned a {type(result).__name__}. Return a record or None."
            )
        records += [] if result is None else [(place, result)]
    if not records:
        raise UserError(f"{located[0][0]}: data.prepare={name} left out this record and all others. Return some.")
    return records


def data_files(path: Path) -> list[Path]:
    """Returns the data files of a path, in the order in which they are read.

    A folder written by `datasets.Dataset.save_to_disk` means the Arrow files that its state.json lists; any other
    folder its `.jsonl` or its `.parquet` shards by name, `train-00000-of-00002.parquet` and so on. A pattern such as
    `data/train-*.parquet` means the files that match, by name. A path that does not exist may be the name of a data
    set on a hub, see `HubName`. A folder with more than the shards of one set, or not all of them, is an error.
    """
    if name := _hub_name(path):
        return hub_data_files(name)
    if "*" in path.name:
        return _matches(path)
    if path.is_dir():
        _refuse_several_splits(path)
        return _saved_files(path) if (path / "state.json").is_file() else _shards(path)
    _check_kind(path)
    if not path.is_file():
        raise UserError(f"{path}: no such data file. Give a .jsonl, .json, .parquet or .arrow file, or a folder.")
    return [path]


def _hub_name(path: Path) -> HubName | None:
    name = HubName.parse(path)
    is_file = name is not None and name.text == name.repository and path.suffix in FILE_KINDS  # a misspelled path
    return None if is_file else name


def _check_kind(path: Path) -> None:
    if path.suffix not in FILE_KINDS:
        raise UserError(
            f"{path}: not a data file: its name ends in '{path.suffix}'. "
            "Give a .jsonl, .json (one object per line, or a list), .parquet or .arrow file, or a folder of such files."
        )


def _matches(pattern: Path) -> list[Path]:
    files = sorted(file for file in pattern.parent.glob(pattern.name) if file.name[0] != ".")
    if not files:
        raise UserError(f"{pattern}: no file matches the pattern. Write one that matches files in {pattern.parent}.")
    for file in files:
        _check_kind(file)
    return files


def _refuse_several_splits(folder: Path) -> None:
    description = folder / "dataset_dict.json"
    if description.is_file():
        splits = _read_json(description).get("splits") or ["train"]
        raise UserError(
            f"{folder}: a dataset of several splits ({', '.join(splits)}). Give one, such as {folder / splits[0]}."
        )


def _saved_files(folder: Path) -> list[Path]:
    state = folder / "state.json"
    try:
        files = [folder / entry["filename"] for entry in _read_json(state)["_data_files"]]
    except (KeyError, TypeError) as error:
        raise UserError(f"{state}: has no list _data_files. Save the dataset again with save_to_disk.") from error
    if missing := [file.name for file in files if not file.is_file()]:
        raise UserError(f"{folder}: {missing[0]} of its state.json is missing. Copy the whole folder again.")
    return files


def _shards(folder: Path) -> list[Path]:
    files = sorted(file for kind in SHARD_KINDS for file in folder.glob(f"*{kind}") if file.name[0] != ".")
    if not files:
        raise UserError(
            f"{folder}: contains no .jsonl or .parquet files and no dataset saved with save_to_disk. "
            "Give the folder that contains them."
        )
    families = {f"{_family(file)}*{file.suffix}": file for file in files}
    if len(families) > 1:
        # Reading a train and a test file as one set would train on the test data.
        raise UserError(
            f"{folder}: its files are not shards of one set ({', '.join(sorted(families))}). Give one file, or a "
            f"pattern such as {folder / min(families)}, or name each as a separate source."
        )
    _check_complete(folder, files)
    return files


def _family(file: Path) -> str:
    """Returns the part of a name that the shards of one set share: the words before the number."""
    words = takewhile(lambda word: not word.isdecimal(), re.split(r"[-_.]", file.stem))
    return "-".join(words).rstrip("0123456789")


def _check_complete(folder: Path, files: Sequence[Path]) -> None:
    # Shards that give their number may be incomplete after an aborted download.
    for file in files:
        counted = re.search(r"\d+-of-(\d+)", file.stem)
        if counted and int(counted[1]) != len(files):
            raise UserError(
                f"{folder}: {len(files)} of {int(counted[1])} shards are there, by the name {file.name}. Fetch the "
                f"others, or read these only with the pattern {folder / '*'}{file.suffix}."
            )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not readable JSON ({error}). Save the dataset again with save_to_disk.") from error
    return value if isinstance(value, dict) else {}


def generated_records(path: str) -> list[tuple[str, dict[str, Any]]]:
    """Generates the records of a task, each with its place; every rank and run has the same ones.

    The path is `reasoning_gym:NAME:size=500,seed=1`, with the task's arguments; by default size is 500 and seed 0. A
    record has `prompt`, `answer`, the task's name as `dataset`, and as `entry` what the reward of the package needs.
    """
    try:
        import reasoning_gym
    except ImportError as error:
        raise UserError(
            f"{path}: the package reasoning-gym is not installed ({error}). Run: pip install reasoning-gym."
        ) from None
    task, _, text = path.removeprefix(REASONING_GYM).partition(":")
    options = {"size": 500, "seed": 0} | _options(path, text)
    if task in HASH_DEPENDENT and os.environ.get("PYTHONHASHSEED", "random") == "random":
        raise UserError(
            f"{path}: the task's prompts depend on Python's hashes, which differ between ranks. Set PYTHONHASHSEED=0."
        )
    if task not in reasoning_gym.factory.DATASETS:
        tasks = sorted(reasoning_gym.factory.DATASETS)
        near = difflib.get_close_matches(task, tasks, 3, cutoff=0.5) or tasks[:3]
        raise UserError(f"{path}: there is no task '{task}'. Write one of the package's, such as {', '.join(near)}.")
    try:
        dataset = reasoning_gym.create_dataset(task, **options)
        entries = [dataset[i] for i in range(len(dataset))]
    except Exception as error:  # tasks check their arguments by assertions, types and more
        raise UserError(
            f"{path}: the task rejects its arguments ({type(error).__name__}: {error}). Correct them."
        ) from None
    return [
        (f"{path}:{number}", {"prompt": entry["question"], "answer": entry["answer"], "dataset": task, "entry": entry})
        for number, entry in enumerate(entries, start=1)
    ]


def _options(path: str, text: str) -> dict[str, Any]:
    """Returns the arguments in `size=500,operators=[+,-]`, whose values are YAML."""
    try:
        options = yaml.safe_load("{" + re.sub(r"(\w+)=", r"\1: ", text) + "}")
    except yaml.YAMLError:
        options = None
    if not isinstance(options, dict) or None in options.values():
        raise UserError(f"{path}: '{text}' are not arguments. Write them as size=500,seed=1 after the task's name.")
    return options
