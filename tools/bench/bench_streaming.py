"""Trained samples per second of DAPO that samples in rounds and of DAPO that replaces groups as they complete.

    python -m tools.bench.bench_streaming [--iterations 20] [--rounds 3] [--prompts 16] [--tokens 1024]

DAPO on `heavy_tail_task.py` with SGLang, two ranks with one thread each and an engine on each. A response of any
class is right with probability 1 / 8, so that 6 of 10 groups of 4 have rewards that do not differ. The two ways run in
turn; prints their medians and the ratio. Iterations before the third are not counted.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from tools.bench import heavy_tail_task
from tools.bench.harness import options_of

WARM_UP = 2
GROUP_SIZE = 4
REWARD = "def score(sample): return float(len(sample.response) % 8 == 0)\n"
WAYS = ("rounds", "streaming")


def main() -> None:
    """Print each run, the medians and the ratio."""
    options = options_of(__doc__, iterations=20, rounds=3, prompts=16, tokens=1024).parse_args()
    speeds: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        task = Path(folder)
        heavy_tail_task.make(task, hidden=64, layers=2, max_positions=options.tokens + 8)
        (task / "reward.py").write_text(REWARD)
        for number in range(options.rounds):
            for way in WAYS:
                settings = [
                    f"algorithm.dynamic_sampling={way}",
                    f"algorithm.prompts_per_iteration={options.prompts}",
                    f"algorithm.group_size={GROUP_SIZE}",
                    f"rollout.max_new_tokens={options.tokens}",
                    f"job.seed={number}",
                ]
                run = task / f"{way}-{number}"
                lines = heavy_tail_task.train("dapo", task, run, settings, options.iterations, WARM_UP)
                seconds = sum(line["time/iteration"] for line in lines)
                speeds[way].append(sum(line["dapo/groups"] for line in lines) * GROUP_SIZE / seconds)
                print(f"{way}: {speeds[way][-1]:.1f} samples/s, {seconds / len(lines):.2f} s an iteration", flush=True)
    medians = {way: statistics.median(values) for way, values in speeds.items()}
    for way, value in medians.items():
        print(f"{way:10} {value:7.1f} samples/s")
    print(f"streaming over rounds: {medians['streaming'] / medians['rounds']:.2f}")


if __name__ == "__main__":
    main()
