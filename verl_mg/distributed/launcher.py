"""The launcher of a node and its ranks: what they report to each other, in a private folder of the launcher.

    stop code     written by a rank that leaves after a stop request: the exit code of the launcher
    iteration     written by a rank: the iteration that is complete
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
    def stop_code(self) -> int:
        """Returns the exit code of this launcher after a stop that all ranks agreed on; 0: there was none."""
        return self._number("stop code")

    @property
    def iteration(self) -> int:
        """Returns the last complete iteration; 0 before the first one."""
        return self._number("iteration")

    @property
    def regroups(self) -> bool:
        """Returns whether ranks that leave now start again."""
        return (self.folder / "regroups").exists()

    def make_key(self) -> None:
        """Makes a new key: engines are kept from now on."""
        self.key.touch(mode=0o600)  # before the key is in it
        self.key.write_text(secrets.token_hex(), encoding="ascii")

    def report_stop(self, code: int) -> None:
        """Reports the exit code with which the launcher ends after the ranks have left."""
        self._write("stop code", code)

    def report_iteration(self, iteration: int) -> None:
        """Reports a complete iteration."""
        self._write("iteration", iteration)

    def report_return(self) -> None:
        """Reports that the program of this process is complete."""
        self._returned(os.getpid()).touch()

    def has_returned(self, pid: int) -> bool:
        """Returns whether the program of a process is complete."""
        return self._returned(pid).exists()

    def set_regroups(self) -> None:
        """Makes ranks that leave from now on start again."""
        (self.folder / "regroups").touch()

    def clear(self) -> None:
        """Removes what ranks have reported that do not run any more, except the iteration."""
        # The iteration stays, for the launcher to name it where a rank is lost before the next one is complete.
        for path in (self.folder / "regroups", self.folder / "stop code", *self.folder.glob("returned-*")):
            path.unlink(missing_ok=True)

    def _returned(self, pid: int) -> Path:
        return self.folder / f"returned-{pid}"

    def _number(self, name: str) -> int:
        path = self.folder / name
        return int(path.read_text(encoding="ascii")) if path.exists() else 0

    def _write(self, name: str, number: int) -> None:
        with replacing(self.folder / name) as file:
            file.write_text(str(number), encoding="ascii")
