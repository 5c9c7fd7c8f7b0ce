"""Servers of the environments' projects, each in a Python environment of its own (tools/install/environments.sh)."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

ENVIRONMENTS = Path(sys.prefix) / "environments"


@pytest.fixture(scope="session")
def python_of() -> Callable[[str], str]:
    """Returns the interpreter of a project's environment; skips the test where it is not installed."""

    def find(project: str) -> str:
        if not (ENVIRONMENTS / project / "stamp").exists():
            pytest.skip(f"{project} is not installed; tools/install/environments.sh installs it")
        return str(ENVIRONMENTS / project / "bin" / "python")

    return find


@pytest.fixture(scope="session")
def start_server(python_of) -> Iterator[Callable[..., str]]:
    """Starts a script in a project's environment and returns the URL in the first line of its output."""
    with ExitStack() as servers:
        yield lambda project, *command, variables=None: servers.enter_context(
            _running(python_of(project), command, variables or {})
        )


@pytest.fixture(scope="session")
def start_script() -> Iterator[Callable[..., str]]:
    """Starts a script of this environment and returns the URL in the first line of its output."""
    with ExitStack() as servers:
        yield lambda *command: servers.enter_context(_running(sys.executable, command, {}))


@contextmanager
def _running(python: str, command: tuple[str, ...], variables: dict[str, str]) -> Iterator[str]:
    environment = {"PATH": "/usr/bin:/bin", **variables}
    with subprocess.Popen([python, *command], stdout=subprocess.PIPE, env=environment, text=True) as server:
        try:
            url = server.stdout.readline().strip()
            assert url.startswith("http"), f"{command} has not started: exit code {server.poll()}"
            yield url
        finally:
            server.terminate()
            server.stdout.close()
