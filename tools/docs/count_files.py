"""Counts the files that a batch, a weight and an asynchronous sample pass.

    python -m tools.docs.count_files --tree BEFORE --tree AFTER [--list]

Small GRPO jobs on two ranks; a file counts if one of its functions runs in a rank or in an engine's process during the
second iteration. With two trees, the table has both and their ratio.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.docs import record_files
from tools.docs.record_files import FOLDER, ITERATION, MAX_RANKS, TREE, WEIGHTS, WINDOW_FILE

Files = set[str]
SGLANG = ["rollout.engine=sglang"]
JOBS = {
    "hf": ["rollout.engine=hf"],
    "sglang": SGLANG,
    "async": [*SGLANG, "rollout.mode=async", "rollout.num_ranks=1", "rollout.max_staleness=1"],
}
JOURNEYS = {
    "batch, hf": ("hf", ITERATION),
    "batch, SGLang": ("sglang", ITERATION),
    "weight, SGLang": ("sglang", WEIGHTS),
    "asynchronous sample, SGLang": ("async", ITERATION),
}
"""Job and window of each journey."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tree", action="append", type=Path, help="a checkout, once or twice (default: this one)")
    parser.add_argument("--list", action="store_true", help="print the files too")
    arguments = parser.parse_args()
    trees = [tree.resolve() for tree in arguments.tree or [Path(__file__).parents[2]]]
    counted = [journeys(tree) for tree in trees]
    print(f"{'journey':30}" + "".join(f"{tree.parent.name + '/' + tree.name:>16}" for tree in trees) + f"{'ratio':>8}")
    for journey in JOURNEYS:
        counts = [len(files[journey]) for files in counted]
        print(f"{journey:30}" + "".join(f"{count:16}" for count in counts) + f"{counts[-1] / counts[0]:8.2f}")
    for tree, files in zip(trees, counted, strict=True) if arguments.list else ():
        for journey, names in files.items():
            print(f"\n{tree}, {journey}:", *sorted(names), sep="\n  ")


def journeys(tree: Path) -> dict[str, Files]:
    """The files of each journey in a tree."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        task = tree / "recipes" / "tasks" / "repeat_digit.py"
        run(tree, folder, [str(task), str(folder / "task")])
        windows = {job: files_of_job(tree, folder, job, overrides) for job, overrides in JOBS.items()}
    return {journey: windows[job][window] for journey, (job, window) in JOURNEYS.items()}


def files_of_job(tree: Path, folder: Path, job: str, overrides: list[str]) -> dict[str, Files]:
    """The files of each window of a job."""
    recorded = folder / job
    recorded.mkdir()
    (recorded / WINDOW_FILE).write_bytes(bytes(2 * MAX_RANKS))
    shutil.copy(record_files.__file__, recorded / "sitecustomize.py")
    recipes, task = tree / "recipes", folder / "task"
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "verl_mg", "train"]
    settings = [
        f"model.path={task}/model",
        f"data.train={task}/data/train.jsonl",
        f"data.test={task}/data/test.jsonl",
        f"reward.function={recipes}/tasks/repeat_digit.py:score",
        f"job.output={folder}/{job}-run",
        "job.iterations=3",
        "job.save=false",
        "algorithm.prompts_per_iteration=8",
        "algorithm.group_size=4",
    ]
    config = ["--config", str(recipes / "configs" / "repeat_digit" / "grpo.yaml")]
    variables = {TREE: str(tree), FOLDER: str(recorded), "OMP_NUM_THREADS": "1"}
    run(tree, recorded, [*launch, str(recipes / "grpo.py"), *config, *settings, *overrides], **variables)
    lines = [line.split(maxsplit=1) for file in recorded.glob("*.txt") for line in file.read_text().splitlines()]
    return {window: {file for of, file in lines if of == window} for window in (ITERATION, WEIGHTS)}


def run(tree: Path, first_on_path: Path, arguments: list[str], **variables: str) -> None:
    environment = os.environ | {"PYTHONPATH": f"{first_on_path}{os.pathsep}{tree}"} | variables
    done = subprocess.run([sys.executable, *arguments], cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{tree}: {' '.join(arguments)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


if __name__ == "__main__":
    main()
