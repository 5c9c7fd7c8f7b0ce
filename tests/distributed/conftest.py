"""Fixtures for tests with real ranks."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore

from tests.helpers import warm_start
from tests.helpers.launched import PATIENCE_S, ROOT, descendants


@pytest.fixture(scope="session")
def forked_ranks(tmp_path_factory) -> Iterator[ForkedRanks]:
    """Process that forks the ranks of jobs."""
    forked = ForkedRanks(tmp_path_factory.mktemp("forked_ranks"))
    yield forked
    forked.stop()


class ForkedRanks:
    """The process that forks ranks, with torch imported once."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0
        command = [warm_start.shared().python, str(Path(__file__).parent / "watched.py"), "--serve"]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def start(
        self,
        size: int,
        code: str = "pass",
        heartbeat_timeout_s: float = 60,
        stall_timeout_s: float = 0,
        output: Path | None = None,
    ) -> ForkedJob:
        self._count += 1
        out, err = (self._folder / f"{self._count}.{name}" for name in ("out", "err"))
        out.touch()
        err.touch()
        # Not kept waiting for its ranks: the server is busy with nothing else.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        job = {
            "size": size,
            "code": code,
            "port": store.port,
            "heartbeat_timeout_s": heartbeat_timeout_s,
            "stall_timeout_s": stall_timeout_s,
            "output": str(output) if output else None,
            "out": str(out),
            "err": str(err),
        }
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        pids = json.loads(self._process.stdout.readline())["pids"]
        return ForkedJob(self._process, store, [psutil.Process(pid) for pid in pids], out, err)

    def stop(self) -> None:
        for process in descendants(self._process.pid):
            process.kill()
        self._process.kill()
        self._process.communicate()


class ForkedJob:
    """One job of several forked ranks."""

    def __init__(
        self, server: subprocess.Popen[str], store: TCPStore, ranks: list[psutil.Process], out: Path, err: Path
    ) -> None:
        self._server, self._store, self.ranks, self._out, self._err = server, store, ranks, out, err

    def wait_for_steps(self) -> None:
        """Waits until the ranks have done some steps."""
        deadline = time.monotonic() + PATIENCE_S
        while self._out.read_text() != "steps done\n":
            assert time.monotonic() < deadline, self._err.read_text()
            time.sleep(0.05)

    def wait(self) -> tuple[list[int], str]:
        """Exit codes of all ranks, and standard error."""
        return json.loads(self._server.stdout.readline())["codes"], self._err.read_text()
