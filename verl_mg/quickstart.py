"""`verl-mg quickstart`: a tiny model learns to add, by SFT to a rough start and by GRPO from there.

OUTPUT/model ─▶ SFT on sums, stopped early ─▶ OUTPUT/sft/model ─▶ GRPO, reward 0 or 1 ─▶ OUTPUT/grpo
Overrides such as `rollout.engine=sglang` are for GRPO; the sections OF_BOTH are for both jobs.

OUTPUT/data/train.jsonl: {"prompt": "07+35=", "answer": "42"}, ...      test.jsonl: 500 other sums
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from verl_mg.config import load_config
from verl_mg.errors import UserError
from verl_mg.import_function import RECIPES
from verl_mg.models.tiny_model import make_tiny_model

RANKS = 2  # number of ranks of a job, except on a machine with one GPU

OPERANDS = range(100)
HELD_OUT = 500
DATA_SEED = 0

FOLDERS = ("model", "data", "sft", "grpo")
OF_BOTH = ("model", "actor", "fsdp", "megatron", "job", "checkpoint", "profile")
"""Sections whose overrides are for SFT and GRPO; keys of `algorithm` are for the recipe that has them."""
MADE = ("model.path", "data.train", "data.test", "job.output")
"""Keys that the quickstart sets."""


def quickstart(
    output: str | Path, *, sft_overrides: Sequence[str] = (), grpo_overrides: Sequence[str] = (), model_seed: int = 0
) -> None:
    """Makes a model and sums, warms the model up with SFT, improves it with GRPO, and prints the accuracies."""
    started = time.monotonic()
    folder = Path(output)
    # Made first: they raise an error if the recipes are missing, before anything is removed.
    jobs = train_commands(folder, sft_overrides, grpo_overrides)
    _clear(folder)
    make_model(folder / "model", model_seed)
    write_sums(folder / "data")
    for command in jobs:
        _run(command)
    before, after = accuracies(folder / "grpo" / "metrics.jsonl")
    print(f"accuracy on held-out sums: {100 * before:.1f} % before GRPO, {100 * after:.1f} % after")
    print(f"reward curve: {folder / 'grpo' / 'reward_curve.png'}")
    print(f"samples: {folder / 'grpo' / 'samples'}")
    print(f"total time: {time.monotonic() - started:.0f} s", flush=True)


def divided(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the overrides for SFT and those for GRPO; UserError for a key or value that its job does not take."""
    if not overrides:
        return [], []  # in a moment: recipes import the training backends
    from verl_mg.job.recipe import load_recipe

    keys = {override: override.partition("=")[0] for override in overrides}
    if made := [key for key in keys.values() if key in MADE]:
        raise UserError(f"{made[0]}: the quickstart sets it. Leave it out, or run verl-mg train with your own files.")
    algorithms = {name: load_recipe(name).config for name in ("sft", "grpo")}

    def is_for(recipe: str, key: str) -> bool:
        section, _, name = key.partition(".")
        if section == "algorithm":
            return name in algorithms[recipe].model_fields
        return recipe == "grpo" or section in OF_BOTH

    of_sft = [override for override, key in keys.items() if is_for("sft", key)]
    # GRPO's reader reports what neither has.
    of_grpo = [override for override, key in keys.items() if is_for("grpo", key) or override not in of_sft]
    for recipe, chosen in (("sft", of_sft), ("grpo", of_grpo)):
        load_config(_config_file(recipe), chosen, algorithms[recipe])
    return of_sft, of_grpo


def train_commands(folder: Path, of_sft: Iterable[str] = (), of_grpo: Iterable[str] = ()) -> list[list[str]]:
    """Returns the commands of SFT and of GRPO, which starts from the model of SFT, with further overrides."""
    of_grpo = [f"data.test={folder / 'data' / 'test.jsonl'}", *of_grpo]
    jobs = (("sft", "model", of_sft), ("grpo", "sft/model", of_grpo))
    return [_train_command(recipe, folder / model, folder, overrides) for recipe, model, overrides in jobs]


def make_model(folder: Path, seed: int = 0) -> Path:
    """Writes a Qwen3 of a few hundred thousand random weights with one token per character."""
    # So small a model starts to learn much sooner from weights larger than the usual 0.02.
    return make_tiny_model(folder, "qwen3", hidden=128, layers=2, ffn=256, max_positions=2048, init_std=0.06, seed=seed)


def write_sums(folder: Path) -> None:
    """Writes `train.jsonl` and `test.jsonl`: each sum of two operands is in exactly one of them."""
    # Operands of equal width let a model this small start from any random weights alike.
    sums = [{"prompt": f"{a:02}+{b:02}=", "answer": str(a + b)} for a, b in itertools.product(OPERANDS, repeat=2)]
    random.Random(DATA_SEED).shuffle(sums)
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("test", sums[:HELD_OUT]), ("train", sums[HELD_OUT:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in part), encoding="utf-8")


def accuracies(metrics: Path) -> tuple[float, float]:
    """Returns the first and the last evaluation of a run."""
    lines = map(json.loads, metrics.read_text(encoding="utf-8").splitlines())
    rewards = [line["eval/reward"] for line in lines if "eval/reward" in line]
    return rewards[0], rewards[-1]


def _train_command(recipe: str, model: Path, folder: Path, overrides: Iterable[str]) -> list[str]:
    # GPU: no more ranks than GPUs.
    # GPU-TEST: tests/test_quickstart.py::test_quickstart_commands_start_no_more_ranks_than_gpus
    # GPU-RAN: h200-1
    gpus = torch.cuda.device_count()
    file, config = RECIPES / f"{recipe}.py", _config_file(recipe)
    for path in (file, config):
        if not path.is_file():
            raise UserError(f"{path}: no such file. Run the quickstart from a checkout, which has the recipes.")
    return [
        *(_short(sys.executable), "-m", "verl_mg.launch", "--nproc-per-node", str(min(RANKS, gpus or RANKS))),
        *("-m", "verl_mg", "train", _short(file), "--config", _short(config)),
        f"model.path={model}",
        f"data.train={folder / 'data' / 'train.jsonl'}",
        f"job.output={folder / recipe}",
        *overrides,
    ]


def _config_file(recipe: str) -> Path:
    return RECIPES / "configs" / f"quickstart_{recipe}.yaml"


def _short(path: str | Path) -> str:
    """Returns a relative path below the working directory, since people read the commands."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith(os.pardir) else relative


def _clear(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in FOLDERS:
            if (folder / name).exists():
                shutil.rmtree(folder / name)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror}). Choose another --output.") from None


def _run(command: Sequence[str]) -> None:
    print(f"\n$ {shlex.join(command)}", flush=True)
    # Jobs are processes, as users start them: what this command shows can be repeated line by line.
    code = subprocess.run(command).returncode
    if code:
        sys.exit(code)
