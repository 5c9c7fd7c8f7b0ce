"""Times of the phases of a PPO iteration, as a run reports them with profile.synchronize=true.

    python -m tools.bench_profile [--ranks 2] [--hidden 512] [--layers 4] [--iterations 4] [KEY=VALUE ...]

The task of recipes/tasks/repeat_digit.py with a wider model: actor, critic and reference with a layer stack each,
`hf` engines, one thread a rank. The last line says how much of an iteration is around the models' own work: moving
rows, advantages, packing, the weight sync, logging. Further arguments are overrides, such as critic.ranks=1.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tools import wide_repeat_digit


def main() -> None:
    """Run it; its table goes to stdout."""
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        task = Path(folder)
        wide_repeat_digit.make(task, options.hidden, options.layers)
        launch = [sys.executable, "-m", "verl_mg.launch", f"--nproc-per-node={options.ranks}"]
        train = ["-m", "verl_mg", "train", str(wide_repeat_digit.RECIPE), *_overrides(task, options.iterations)]
        subprocess.run([*launch, *train, *options.overrides], env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"ranks": 2, "hidden": 512, "layers": 4, "iterations": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("overrides", nargs="*")
    return parser.parse_args()


def _overrides(task: Path, iterations: int) -> list[str]:
    return [
        *wide_repeat_digit.overrides(task),
        f"job.output={task / 'run'}",
        f"job.iterations={iterations}",
        "job.save=false",
        "profile.synchronize=true",
    ]


if __name__ == "__main__":
    main()
