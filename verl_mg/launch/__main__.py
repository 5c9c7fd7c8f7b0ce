"""The launcher: `python -m verl_mg.launch --nproc-per-node 2 -m verl_mg train ...`, see `command`."""

import os
import tempfile
from pathlib import Path

from verl_mg.distributed.launcher import VARIABLE, Launcher
from verl_mg.launch.program import start_server


def main() -> None:
    """Runs torchrun with the arguments of this process."""
    with tempfile.TemporaryDirectory(prefix="verl_mg-") as folder:
        os.environ[VARIABLE] = folder
        # The server imports what ranks need while this process imports torchrun.
        start_server()
        from verl_mg.launch.command import run_command

        run_command(Launcher(Path(folder)))


if __name__ == "__main__":
    main()
