"""Runs a program of tools/ in a separate process."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def tool(name: str, *options: str) -> str:
    """Runs `python -m tools.NAME` with options and returns its standard output."""
    done = subprocess.run(
        [sys.executable, "-m", f"tools.{name}", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
