"""Real SGLang servers in tests, started as users start them: `python -m sglang.launch_server`."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.helpers import warm_start
from verl_mg.engines.engine_options import EngineOptions
from verl_mg.engines.sglang.arguments import engine_arguments, environment
from verl_mg.engines.sglang.shard_receiver import RECEIVER
from verl_mg.layout import EngineLayout

START_SECONDS = 900
SETTINGS = EngineOptions(
    layout=EngineLayout(tp=2), dtype=torch.float32, max_running=32, max_positions=64,
    extra={"skip_tokenizer_init": False},
)  # fmt: skip


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """SGLang's arguments as on the command line of a user."""
    options = []
    for name, value in arguments.items():
        if value is False or value == []:
            continue
        values = value if isinstance(value, list) else [] if value is True else [value]
        options += [f"--{name.replace('_', '-')}", *map(str, values)]
    return ["-m", "sglang.launch_server", *options]


class RunningServer:
    """A server with random weights."""

    def __init__(
        self, model: Path, log: Path, layout: str = "tp2", port: int | None = None, cold: bool = False, **arguments: Any
    ) -> None:
        """Starts it with further arguments by SGLang's names; a cold one does all imports, as the environment says."""
        self.port, self._log = port or free_port(), log
        settings = dataclasses.replace(SETTINGS, layout=EngineLayout.parse(layout))
        given = engine_arguments(model, settings) | {"host": "127.0.0.1", "port": self.port}
        given |= {"custom_weight_loader": []} | arguments
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable if cold else warm_start.sglang().python, *command_line(given)],
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=environment(model, settings),
            )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Process group of the server."""
        return self._process.pid

    def wait_until_ready(self) -> RunningServer:
        until = time.monotonic() + START_SECONDS
        while not answers(f"{self.url}/ready"):
            assert self._process.poll() is None and time.monotonic() < until, self._log.read_text()[-3000:]
            time.sleep(0.2)
        return self

    def kill(self) -> None:
        """SIGKILL to all of its processes."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextmanager
def serving(*servers: RunningServer) -> Iterator[list[str]]:
    """URLs of servers that are ready; they are killed in the end."""
    try:
        yield [server.wait_until_ready().url for server in servers]
    finally:
        for server in servers:
            server.kill()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            return response.status == 200
    except (OSError, urllib.error.URLError):
        return False


def receiving_server(model: Path, log: Path, layout: str = "tp2", **arguments: Any) -> RunningServer:
    """A server whose ranks receive their shards."""
    return RunningServer(model, log, layout, custom_weight_loader=[RECEIVER], **arguments)
