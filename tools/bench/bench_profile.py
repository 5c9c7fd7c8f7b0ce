"""Times of the phases of an iteration of PPO or GRPO, as a run reports them with profile.synchronize=true.

    python -m tools.bench.bench_profile [--recipe ppo] [--engine hf] [--ranks 2] [--hidden 512] [--layers 4]
        [--iterations 4]
        [--tokens 48] [--prompts 48] [KEY=VALUE ...]

The task of recipes/tasks/repeat_digit.py with a wider model: actor, reference and PPO's critic with a layer stack each,
one thread a rank. Engines other than `hf` are one engine of `tp` ranks, colocated. The last line says how much of an
iteration is around the models' own work: moving rows, advantages, packing, the weight sync, logging. Further arguments
are overrides, such as critic.ranks=1.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.bench import wide_repeat_digit


def main() -> None:
    """Run it; its table goes to stdout."""
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        task = Path(folder)
        wide_repeat_digit.make(task, options.hidden, options.layers)
        launch = [sys.executable, "-m", "verl_mg.launch", f"--nproc-per-node={options.ranks}"]
        recipe = wide_repeat_digit.RECIPES / f"{options.recipe}.py"
        train = ["-m", "verl_mg", "train", str(recipe), *_overrides(task, options)]
        subprocess.run([*launch, *train, *options.overrides], env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=("ppo", "grpo"), default="ppo")
    parser.add_argument("--engine", choices=("hf", "sglang", "vllm"), default="hf")
    sizes = {"ranks": 2, "hidden": 512, "layers": 4, "iterations": 4, "tokens": 48, "prompts": 48}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("overrides", nargs="*")
    return parser.parse_args()


def _overrides(task: Path, options: argparse.Namespace) -> list[str]:
    engine = [f"rollout.engine={options.engine}"]
    if options.engine != "hf":
        engine.append(f"rollout.layout=tp{options.ranks}")
    return [
        *wide_repeat_digit.overrides(task, options.recipe, options.prompts, options.tokens),
        *engine,
        f"job.output={task / 'run'}",
        f"job.iterations={options.iterations}",
        "job.save=false",
        "profile.synchronize=true",
    ]


if __name__ == "__main__":
    main()
