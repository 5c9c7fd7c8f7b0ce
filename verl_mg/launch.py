"""torchrun, ending with the ranks' own exit code and without its traceback.

    python -m verl_mg.launch --nproc-per-node 2 -m verl_mg train ...

takes torchrun's arguments. A rank has already said what was wrong; torchrun would add a report of its own.
"""

from __future__ import annotations

import logging
import os
import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main(arguments: list[str] | None = None) -> None:
    """Run torchrun with the given arguments (those of the process otherwise)."""
    # What torchrun sets itself, with a warning, where a rank is not alone; a rank then chooses by its cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        run.main(arguments)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        # A rank ended by a signal has a negative code; shells know it as 128 + signal.
        sys.exit(failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode)


if __name__ == "__main__":
    main()
