"""A job in this process, after which it prints what was imported and which files of the inputs were opened, as JSON.

python -m tests.run.recorded_job FOLDER ARGUMENTS...    FOLDER has the inputs; the arguments are those of verl-mg
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

FOLDER = str(Path(sys.argv[1]).resolve())
opened: Counter[str] = Counter()


def count(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(arguments[0], str) and arguments[0].startswith(FOLDER):
        opened[str(Path(arguments[0]).relative_to(FOLDER))] += 1


if __name__ == "__main__":
    sys.addaudithook(count)
    from verl_mg.cli import main

    main(sys.argv[2:])
    print(json.dumps({"opened": opened, "modules": sorted(name for name, module in sys.modules.items() if module)}))
