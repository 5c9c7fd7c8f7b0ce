"""The kinds of isolation that this machine has."""

import functools
import shutil
import sys

import pytest

from verl_mg.sandbox import run_python, supervisor


@functools.cache
def works(kind: supervisor.Isolation) -> bool:
    return kind == "none" or supervisor.works(kind)


def isolate_by(kind: supervisor.Isolation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes programs run with a kind of isolation; skips the test where this machine does not have it."""
    if not works(kind):
        pytest.skip(f"isolation by {kind} does not work on this machine")
    monkeypatch.setattr(supervisor, "isolation", lambda: kind)
    if kind == "none":
        # An unused user id cannot start an interpreter inside root's home directory.
        monkeypatch.setattr(sys, "executable", shutil.which("python3", path="/usr/bin:/usr/local/bin"))
        try:
            run_python("", seconds=600)
        except OSError as error:
            pytest.skip(f"no interpreter that every user can start: {error}")
