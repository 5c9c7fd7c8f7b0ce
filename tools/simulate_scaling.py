"""Predicts tokens per second and scaling efficiency on 8 to 512 GPUs, from recorded lengths.

    python -m tools.simulate_scaling [--models qwen2_5_7b,qwen3_235b_a22b] [--ranks 8,16,32] [--json FILE]

For each number of GPUs the best layouts are searched for, as `verl-mg plan --search` does, and an iteration of GRPO is
replayed under them (`verl_mg/planner/simulate.py`): generation, inference, update, weight sync, copies to the host.

    strong    the same samples on any number of GPUs
    weak      the same number of samples per GPU

Efficiency is tokens per second and GPU, relative to the smallest number of GPUs that the model fits on.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from verl_mg.errors import UserError
from verl_mg.models.hf_config import read_config
from verl_mg.planner.inputs import PlanInputs, read_hardware_profile
from verl_mg.planner.lengths import Length, longest_to, read_lengths
from verl_mg.planner.search import search
from verl_mg.planner.simulate import Iteration, repeated, simulate
from verl_mg.sharding.weight_table import WeightTable, weight_table

HERE = Path(__file__).parent
MODELS = "qwen2_5_7b,qwen2_5_32b,qwen3_235b_a22b,deepseek_v3"
PARTS = ("rollout", "inference", "update", "sync", "offload")
RANKS = "8,16,32,64,128,256,512"


def main() -> None:
    """Prints a table for each model."""
    options = _options()
    recorded = longest_to(read_lengths(options.lengths), options.longest)
    figures = read_hardware_profile(options.measured) if options.measured else {}
    tables = {}
    for name in options.models.split(","):
        weights = weight_table(read_config(HERE / "model_configs" / f"{name}.json"))
        batches = {
            "strong": dict.fromkeys(options.ranks, repeated(recorded, options.samples)),
            "weak": {ranks: repeated(recorded, options.samples_a_gpu * ranks) for ranks in options.ranks},
        }
        tables[name] = {kind: _scaled(weights, batch, figures) for kind, batch in batches.items()}
        _show(name, tables[name], options)
    if options.json:
        options.json.write_text(json.dumps(tables, indent=2) + "\n", encoding="utf-8")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=MODELS, help="names of tools/model_configs (default: %(default)s)")
    parser.add_argument("--ranks", default=RANKS, type=_counts, help="numbers of GPUs (default: %(default)s)")
    parser.add_argument("--lengths", type=Path, default=HERE / "lengths" / "random_qwen3_4096.txt")
    parser.add_argument("--longest", type=int, default=16384, help="lengths are scaled to this maximum, in tokens")
    parser.add_argument("--samples", type=int, default=4096, help="strong scaling (default: %(default)s)")
    parser.add_argument("--samples-a-gpu", type=int, default=128, help="weak scaling (default: %(default)s)")
    parser.add_argument("--measured", type=Path, metavar="FILE", help="hardware figures, as for verl-mg plan")
    parser.add_argument("--json", type=Path, metavar="FILE", help="a file to which all numbers are also written")
    return parser.parse_args()


def _counts(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _scaled(
    weights: WeightTable, batches: dict[int, list[Length]], figures: dict[str, float]
) -> list[dict[str, object]]:
    """Returns a row for each number of GPUs that the model fits on."""
    best = (_best(weights, ranks, batch, figures) for ranks, batch in batches.items())
    iterations = [iteration for iteration in best if iteration]
    if not iterations:
        return []
    first = iterations[0]
    return [
        {
            "gpus": iteration.ranks,
            "train": str(replace(iteration.train, dp=0)),
            "rollout": str(iteration.rollout),
            "tokens": iteration.tokens,
            "rate": iteration.rate,
            "efficiency": iteration.rate / iteration.ranks / (first.rate / first.ranks),
            "seconds": asdict(iteration.parts) | {"all": iteration.parts.all},
        }
        for iteration in iterations
    ]


def _best(weights: WeightTable, ranks: int, batch: Sequence[Length], figures: dict[str, float]) -> Iteration | None:
    """Simulates an iteration under the best layouts; None if the model does not fit."""
    mean, longest = sum(length.total for length in batch) // len(batch), max(length.total for length in batch)
    lengths = {"tokens_per_iteration": mean * len(batch), "sequence": longest, "mean_sequence": mean}
    inputs = PlanInputs(weights, ranks, micro_batch=longest, **lengths, **figures)
    try:
        (pair,) = search(inputs, None, None, 1)
        return simulate(inputs, batch, pair.train.layout, pair.rollout.layout)
    except UserError:
        return None


def _show(name: str, table: dict[str, list[dict[str, object]]], options: argparse.Namespace) -> None:
    print(f"\n{name}: longest sample {options.longest:,} tokens")
    heads = ["GPUs", "train", "rollout", "strong: tokens/s", "efficiency", "weak: tokens/s", "efficiency"]
    print(f"| {' | '.join(heads)} | weak, seconds: rollout + inference + update + sync + offload |")
    print("|---:|---|---|---:|---:|---:|---:|---|")
    if not table["weak"]:
        print(f"| {max(options.ranks)} | needs more |")
        return
    fewest = int(str(table["weak"][0]["gpus"]))
    for small in (ranks for ranks in options.ranks if ranks < fewest):
        print(f"| {small} | needs {fewest} | | | | | | |")
    strong = {row["gpus"]: row for row in table["strong"]}
    for row in table["weak"]:
        other = strong.get(row["gpus"])
        fixed = f"{other['rate']:,.0f} | {other['efficiency']:.0%}" if other else " | "
        parts = row["seconds"]
        seconds = " + ".join(f"{parts[key]:.2g}" if parts[key] < 1 else f"{parts[key]:.1f}" for key in PARTS)
        print(
            f"| {row['gpus']} | {row['train']} | {row['rollout']} | {fixed} | {row['rate']:,.0f} | "
            f"{row['efficiency']:.0%} | {seconds} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
