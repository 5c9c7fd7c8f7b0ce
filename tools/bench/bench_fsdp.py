"""Compares GRPO on the FSDP backend with the Megatron backend and with TRL's GRPOTrainer, in turn, in one run.

    python -m tools.bench.bench_fsdp [--rounds 3] [--iterations 2] [--prompts 16] [--tokens 256] [--hidden 256]
        [--ranks 2]

Model, prompts, settings and what is counted are the same as in bench_end_to_end.py: an iteration is rollout,
update and weight sync. TRL shards nothing on the CPU, it averages gradients (DDP). Medians over the rounds.
"""

from __future__ import annotations

import statistics
import tempfile
from functools import partial
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from tools.bench.bench_end_to_end import Run, line_of, make_model, run_trl, run_verl_mg, write_prompts
from tools.bench.end_to_end_trl import MODEL, PROMPTS, Workload
from tools.bench.harness import options_of

SIDES = {
    "FSDP": partial(run_verl_mg, backend="fsdp"),
    "Megatron": partial(run_verl_mg, backend="megatron"),
    "TRL": run_trl,
}


def main() -> None:
    """Prints a line for each side, and the ratios."""
    options = options_of(
        __doc__, rounds=3, iterations=2, prompts=16, group=4, tokens=256, hidden=256, ranks=2
    ).parse_args()
    folder = Path(tempfile.mkdtemp(prefix="fsdp-"))
    make_model(folder / MODEL, options.hidden)
    write_prompts(folder / PROMPTS, options.prompts)
    runs: dict[str, list[Run]] = {name: [] for name in SIDES}
    for number in range(options.rounds):
        work = Workload(options.prompts, options.group, options.tokens, options.iterations + 1, seed=number)
        for name, run in SIDES.items():
            runs[name].append(run(folder, folder / f"{number}-{name}", work, options.ranks, 1))
            print(line_of(f"{name}, run {number + 1}", runs[name][-1:], work), flush=True)
    print()
    for name, results in runs.items():
        print(line_of(name, results, work))
    for other in ("Megatron", "TRL"):
        pairs = list(zip(runs["FSDP"], runs[other], strict=True))
        rate = statistics.median(ours.rate / theirs.rate for ours, theirs in pairs)
        processor = statistics.median(ours.rate_of_processor / theirs.rate_of_processor for ours, theirs in pairs)
        print(f"FSDP against {other}: {rate:.2f} times the tokens/s, {processor:.2f} times those a second of processor")


if __name__ == "__main__":
    torch.set_num_threads(1)
    disable_progress_bar()
    main()
