"""The launcher of a node and its ranks: what they report to each other, in a private folder of the launcher.

    stop code     written by a rank that leaves after a stop request: the exit code of the launcher
    iteration     written by a rank: the iteration that is complete
    started       written by the launcher: when it started, or starts the ranks again
    regroups      made by the launcher: ranks that leave now start again, with other nodes
    returned-PID  made by a rank whose program is complete
    key, socket   of a launcher that keeps engines, see `verl_mg.engines.engine_attachment`

mpirun and plain torchrun have no such folder.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from verl_mg.jsonl import replacing

VARIABLE = "VERL_MG_LAUNCHER"  # environment variable with the path of the folder
STOP_CODE, ITERATION = "stop code", "iteration"  # numbers that ranks report
STARTED = "started"  # number that the launcher reports: milliseconds since 1970


@dataclass(frozen=True)
class Launcher:
    """The folder of this node's launcher."""

    folder: Path  # path of the folder, which only this user can read

    @classmethod
    def of_this_rank(cls) -> Launcher | None:
        """Returns the launcher of this process; None where there is none."""
        folder = os.environ.get(VARIABLE)
        return cls(Path(folder)) if folder else None

    @property
    def key(self) -> Path:
        """Returns the path of the key that opens kept engines; the file exists where engines are kept."""
        return self.folder / "key"

    @property
    def socket(self) -> Path:
        """Returns the path of the socket whose connections end with the launcher."""
        return self.folder / "socket"

    @property
    def regroup_mark(self) -> Path:
        """Returns the path of a file that exists where ranks that leave now start again."""
        return self.folder / "regroups"

    def return_mark(self, pid: int) -> Path:
        """Returns the path of a file that exists where the program of a process is complete."""
        return self.folder / f"returned-{pid}"

    def make_key(self) -> None:
        """Makes a new key: engines are kept from now on."""
        self.key.touch(mode=0o600)  # before the key is in it
        self.key.write_text(secrets.token_hex(), encoding="ascii")

    def number(self, name: str) -> int:
        """Returns the number that a rank has reported last under a name; 0 before the first report."""
        path = self.folder / name
        return int(path.read_text(encoding="ascii")) if path.exists() else 0

    def report(self, name: str, number: int) -> None:
        """Reports a number in place of the one before."""
        with replacing(self.folder / name) as file:
            file.write_text(str(number), encoding="ascii")

    def clear(self) -> None:
        """Removes what ranks have reported that do not run any more, except the iteration."""
        # The iteration stays, for the launcher to name it where a rank is lost before the next one is complete.
        for path in (self.regroup_mark, self.folder / STOP_CODE, *self.folder.glob("returned-*")):
            path.unlink(missing_ok=True)
