"""Runs a program of tools/ in a separate process."""

import os
import subprocess
from pathlib import Path

from tests.helpers import warm_start

ROOT = Path(__file__).parents[2]


def tool(name: str, *options: str) -> str:
    """Runs `python -m tools.NAME` with options and returns its standard output."""
    done = subprocess.run(
        [warm_start.shared().python, "-m", f"tools.{name}", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
        env=os.environ | warm_start.shared().environment | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
