"""Changes of weights as files, from which the ranks of a server read theirs.

A file is a safetensors file of one sender with one tensor, `codes` (bytes,) uint8: codes as `encode_delta` returns
them, one after the other. Its metadata has two JSON objects, each by member LAYOUT/RANK, such as "tp2/1":

    places    for each box of the member: [parameter, [[begin, end], ...], first byte, bytes]
    dtypes    the dtype of each of these parameters

A box that several members need is in the file once.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from verl_mg.reshard.delta_transfer import Patch
from verl_mg.sharding.boxes import Box

FORMAT = "verl_mg changes 1"  # name and number of the format; the number changes with the fields


@dataclass(frozen=True)
class Place:
    """A box of a parameter of a member."""

    member: str  # layout and rank of the member
    parameter: str
    box: Box  # box in the parameter
    dtype: torch.dtype  # dtype of the parameter


def member_name(layout: str, rank: int) -> str:
    """Returns the name of a rank of all servers of a layout, which all read the same: such as "tp2/1"."""
    return f"{layout}/{rank}"


def write_changes(path: Path, changes: Iterable[tuple[Tensor, Sequence[Place]]]) -> int:
    """Writes codes, each with the places of its box; returns the bytes of the file."""
    codes: list[Tensor] = []
    places: dict[str, list[tuple[str, Box, int, int]]] = defaultdict(list)
    dtypes: dict[str, dict[str, str]] = defaultdict(dict)
    end = 0
    for code, wanted in changes:
        codes.append(code.cpu())
        for place in wanted:
            places[place.member].append((place.parameter, place.box, end, len(code)))
            dtypes[place.member][place.parameter] = str(place.dtype).removeprefix("torch.")
        end += len(code)
    content = torch.cat(codes) if codes else torch.zeros(0, dtype=torch.uint8)
    metadata = {"format": FORMAT, "places": json.dumps(places), "dtypes": json.dumps(dtypes)}
    save_file({"codes": content}, path, metadata)
    return path.stat().st_size


@contextmanager
def open_changes(path: Path, member: str) -> Iterator[ChangesFile]:
    """Context manager: opens a file of changes for a member; ValueError for a file of another format."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise ValueError(f"{path} has the format {metadata.get('format')}, this version of verl_mg reads {FORMAT}")
        yield ChangesFile(file, metadata, member)


class ChangesFile:
    """The changes of one sender for one member, in an open file."""

    def __init__(self, file: Any, metadata: Mapping[str, str], member: str) -> None:
        self._file = file
        self._places = json.loads(metadata["places"]).get(member, [])
        self.dtypes: Mapping[str, str] = json.loads(metadata["dtypes"]).get(member, {})
        """Dtypes of the member's parameters that are changed."""
        self.nbytes = sum(size for *_, size in self._places)  # bytes of the member's codes

    def patches(self, device: torch.device) -> Iterator[Patch]:
        """Yields the changes of the member's boxes, with codes on the device; only these are read."""
        codes = self._file.get_slice("codes")
        for parameter, box, start, size in self._places:
            yield Patch(parameter, tuple((begin, end) for begin, end in box), codes[start : start + size].to(device))
