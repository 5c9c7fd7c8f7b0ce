"""Data files of one configuration and split of a data set on a hub, downloaded and ready to be read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from glob import escape
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from verl_mg.errors import UserError
from verl_mg.hub import HubName, fetch, files_of, matching

KINDS = (".parquet", ".jsonl", ".json", ".arrow")  # suffixes of the files that can be read, the preferred one first
CARD = "README.md"  # file of a data set whose header names its configurations and splits

# Files in which Hugging Face datasets describes others.
NOT_DATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
# Words of names that are a split (https://huggingface.co/docs/hub/datasets-file-names-and-splits).
SPLIT_WORDS = ("train", "training", "validation", "valid", "val", "dev", "test", "testing", "eval", "evaluation")

Splits = dict[str, list[str]]  # patterns of file names by split


def hub_data_files(name: HubName) -> list[Path]:
    """Downloads the files of a data set that are not in the cache, and returns all in the order of reading.

    UserError where there are several configurations or splits and the name has no part `CONFIGURATION:SPLIT`.
    """
    # The client of the Hugging Face hub lists all files after the first download; ModelScope's does not.
    folder = fetch(name, "dataset", [CARD] if name.site == "hf" else [CARD, *(f"*{kind}" for kind in KINDS)])
    chosen = select(name, files_of(name, folder), _card(folder / CARD))
    # `fetch` takes patterns, and a file's name may contain their characters.
    folder = fetch(name, "dataset", [escape(file) for file in chosen])
    if missing := [file for file in chosen if not (folder / file).is_file()]:
        raise UserError(f"{name.text}: {missing[0]} is not in {folder}. Run the command again with a network.")
    return [folder / file for file in chosen]


def select(name: HubName, files: Sequence[str], card: Mapping[str, Any]) -> list[str]:
    """Returns the files of the split that a name means.

    Configurations and splits come from the header of the data set's card. Without one they follow from names of
    files and folders: `main/train-00000-of-00001.parquet` is of the split `train` of `main`.
    """
    readable = [file for file in files if _is_readable(PurePosixPath(file))]
    if not readable:
        kinds = ", ".join(sorted({PurePosixPath(file).suffix for file in files} - {"", ".md"})) or "none"
        converted = f"{name.site}:{name.repository}@refs/convert/parquet"
        raise UserError(
            f"{name.text}: has no .parquet or .jsonl files (its kinds are: {kinds}). Write {converted}, the hub's own "
            "Parquet files, or save it with save_to_disk of Hugging Face datasets and give that folder."
        )
    configuration, _, split = name.part.partition(":")
    known = _described(card) or _by_folders(readable)
    base = name.text[: len(name.text) - len(name.part)].rstrip(":")
    configuration = _chosen(configuration, known, "configuration", base, "")
    splits = known[configuration]
    chosen_split = _chosen(split, splits, "split", base, f"{configuration}:")
    chosen = matching(readable, splits[chosen_split])
    if not chosen:
        raise UserError(f"{name.text}: no readable file matches {splits[chosen_split]}. Choose another split.")
    # Some data sets have each file in several formats.
    return next(of_kind for kind in KINDS if (of_kind := [file for file in chosen if file.endswith(kind)]))


def _is_readable(file: PurePosixPath) -> bool:
    return file.suffix in KINDS and file.name[0] != "." and file.name not in NOT_DATA


def _chosen(wanted: str, known: Mapping[str, object], what: str, base: str, before: str) -> str:
    names = sorted(known)
    if not wanted and (len(known) == 1 or "default" in known):
        return "default" if "default" in known else names[0]
    if wanted not in known:
        wrong = f"has no {what} '{wanted}'" if wanted else f"has several {what}s ({', '.join(names)})"
        raise UserError(f"{base}: {wrong}. Write one of: {', '.join(f'{base}:{before}{name}' for name in names[:8])}.")
    return wanted


def _card(path: Path) -> Mapping[str, Any]:
    """Returns the YAML header of a data set's card; {} where there is none or it cannot be read."""
    if not path.is_file():
        return {}
    header = re.match(r"---\s*\n(.*?)\n---\s*(\n|$)", path.read_text(encoding="utf-8", errors="replace"), re.DOTALL)
    try:
        value = yaml.safe_load(header[1]) if header else {}
    except yaml.YAMLError:
        return {}
    return value if isinstance(value, dict) else {}


def _described(card: Mapping[str, Any]) -> dict[str, Splits]:
    # The form of `configs` is that of https://huggingface.co/docs/hub/datasets-manual-configuration.
    known: dict[str, Splits] = {}
    for entry in card.get("configs") or ():
        described = entry.get("data_files") if isinstance(entry, dict) else None
        if described:
            folder, splits = f"{entry['data_dir']}/" if entry.get("data_dir") else "", dict[str, list[str]]()
            for item in described if isinstance(described, list) else [described]:
                split, paths = (item.get("split"), item.get("path")) if isinstance(item, dict) else (None, item)
                patterns = [folder + str(p).removeprefix("./") for p in (paths if isinstance(paths, list) else [paths])]
                splits.setdefault(split or "train", []).extend(patterns)
            known[entry.get("config_name", "default")] = splits
    return known


def _by_folders(files: Sequence[str]) -> dict[str, Splits]:
    known: dict[str, Splits] = {}
    for file in files:
        *folders, last = PurePosixPath(file).parts
        words = [word for word in re.split(r"[-_.]", PurePosixPath(last).stem) if word]
        split = next((word for word in (*words, *folders) if word.lower() in SPLIT_WORDS), "train")
        outer = [folder for folder in folders if folder not in ("data", split)]
        known.setdefault("/".join(outer) or "default", {}).setdefault(split, []).append(file)
    return known
