"""Where the time of a PPO iteration goes, as the run itself tells it with job.profile=true.

    python -m tools.bench_profile [--ranks 2] [--hidden 512] [--layers 4] [--iterations 4] [KEY=VALUE ...]

The task of recipes/tasks/letters.py with a wider model: actor, critic and reference with a layer stack each, embedded
engines, one thread a rank. The last line says how much of an iteration is around the models' own work: moving rows,
advantages, packing, the weight sync, logging. Further arguments are overrides, such as critic.ranks=1.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from recipes.tasks import letters
from verl_mg.tiny import make_tiny_model

RECIPE = Path(__file__).parents[1] / "recipes" / "ppo.py"


def main() -> None:
    """Run it; its table goes to stdout."""
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        task = Path(folder)
        letters.make(task)
        make_tiny_model(
            task / "model",
            "qwen3",
            characters=letters.DIGITS + "=",
            hidden=options.hidden,
            layers=options.layers,
            ffn=3 * options.hidden,
            max_positions=1024,
        )
        launch = [sys.executable, "-m", "verl_mg.launch", f"--nproc-per-node={options.ranks}"]
        train = ["-m", "verl_mg", "train", str(RECIPE), *_overrides(task, options.iterations), *options.overrides]
        subprocess.run([*launch, *train], env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"ranks": 2, "hidden": 512, "layers": 4, "iterations": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("overrides", nargs="*")
    return parser.parse_args()


def _overrides(task: Path, iterations: int) -> list[str]:
    return [
        f"model.path={task / 'model'}",
        f"data.train={task / 'data' / 'train.jsonl'}",
        f"reward.function={letters.__file__}:score",
        "rollout.max_new_tokens=48",
        "algorithm.prompts_per_iteration=48",
        "algorithm.critic_warmup=0",
        "algorithm.kl_coefficient=0.01",
        "algorithm.minibatches=2",
        "algorithm.epochs=2",
        f"job.output={task / 'run'}",
        f"job.iterations={iterations}",
        "job.save=false",
        "job.profile=true",
    ]


if __name__ == "__main__":
    main()
