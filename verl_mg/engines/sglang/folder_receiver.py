"""Applies the changes in a shared folder to the parameters of a server's rank; called inside SGLang's schedulers.

The job asks with a request like that of `shard_receiver`. Each rank reads its changes from the files of all senders,
applies them, and writes a report into the same folder, since an exception here would end SGLang's schedulers.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl_mg.engines.sglang.weight_loader import check_dtypes, loaded_parameters, message_for_loader
from verl_mg.jsonl import replacing
from verl_mg.reshard.delta import member_name, open_changes
from verl_mg.reshard.delta_transfer import apply_patches
from verl_mg.sharding.boxes import described

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class FolderRequest:
    """Request to a server to apply the changes in a folder."""

    folder: str  # folder of one version, with a file of each sender
    layout: str  # parallel sizes of the server, as the files name them
    server: int  # number of the server in the job, for the names of its reports

    def payload(self) -> str:
        """Returns the request as SGLang passes it to a loader."""
        return message_for_loader(asdict(self))

    def report_path(self, rank: int) -> Path:
        """Returns the file in which a rank of the server reports."""
        return Path(self.folder) / f"report-{self.server}-{rank}.json"


@dataclass(frozen=True)
class FolderReport:
    """Report of a rank of a server about the changes that it has applied."""

    intact: bool = False  # whether all boxes have the checksums of the senders
    bytes_read: int = 0  # bytes of the changes
    error: str = ""  # description of what went wrong; empty where all files were read


def apply_folder(model: Any, request: FolderRequest, rank: int) -> None:
    """Applies the changes of this rank, and reports."""
    try:
        report = _apply(loaded_parameters(model), Path(request.folder), member_name(request.layout, rank))
    except Exception as error:
        log.exception("verl_mg: the changes were not applied")
        report = FolderReport(error=f"{type(error).__name__}: {error}")
    try:
        with replacing(request.report_path(rank)) as file:  # the job polls for the report
            file.write_text(json.dumps(asdict(report)))
    except OSError:
        log.exception("verl_mg: no report can be written")  # the job waits for it, and then sends all values


def _apply(parameters: Mapping[str, Tensor], folder: Path, member: str) -> FolderReport:
    here, intact, bytes_read = next(iter(parameters.values())).device, True, 0
    with ExitStack() as stack, torch.no_grad():
        files = [stack.enter_context(open_changes(path, member)) for path in sorted(folder.glob("*.safetensors"))]
        # All dtypes are checked before the first change: a refused update leaves the weights as they were.
        for file in files:
            check_dtypes(parameters, file.dtypes, exact=True)
        for file in files:
            views = {name: described(parameters[name], order) for name, order in file.orders.items()}
            intact = apply_patches(file.patches(here), {**parameters, **views}) and intact
            bytes_read += file.nbytes
    return FolderReport(intact and bool(files), bytes_read)
