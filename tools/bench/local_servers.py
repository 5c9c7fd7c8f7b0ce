"""Real SGLang servers on this machine for benchmarks, which end with the process that started them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from verl_mg.engines.engine_options import EngineOptions
from verl_mg.engines.sglang.arguments import engine_arguments, environment

START_SECONDS = 600.0
"""Time limit of a server for its start."""


@contextmanager
def running_servers(model: Path, settings: EngineOptions, count: int, logs: Path) -> Iterator[list[str]]:
    """Yields the addresses of servers that are ready, and kills their processes in the end."""
    ports = [free_port() for _ in range(count)]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for number, port in enumerate(ports):
            processes.append(_start(model, settings, number, port, logs / f"{port}.log"))
        for port, process in zip(ports, processes, strict=True):
            _wait_until_ready(port, process, logs / f"{port}.log")
        yield [f"http://127.0.0.1:{port}" for port in ports]
    finally:
        for process in processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def free_port() -> int:
    """Returns a port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _start(model: Path, settings: EngineOptions, number: int, port: int, log: Path) -> subprocess.Popen[bytes]:
    options: list[str] = []
    for name, value in (engine_arguments(model, settings) | {"host": "127.0.0.1", "port": port}).items():
        values = [] if value is True else value if isinstance(value, list) else [value]
        if value is not False:
            options += [f"--{name.replace('_', '-')}", *map(str, values)]
    ranks, cores = settings.layout.ranks, sorted(os.sched_getaffinity(0))
    binding = "|".join(str(cores[(number * ranks + rank) % len(cores)]) for rank in range(ranks))
    # The kernel kills the server with this process, however it ends; SGLang's other processes end with the server.
    command = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-m", "sglang.launch_server", *options]
    with log.open("wb") as output:
        return subprocess.Popen(
            command, stdout=output, stderr=output, start_new_session=True,
            env=environment(model, settings) | {"SGLANG_CPU_OMP_THREADS_BIND": binding},
        )  # fmt: skip


def _wait_until_ready(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5):
                return
        except OSError:
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"a server does not start: {log.read_text()[-2000:]}") from None
            time.sleep(0.5)
