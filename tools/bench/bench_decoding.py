"""Tokens per second of the engine hf on the CPU, of this tree and of another one in turn.

    python -m tools.bench.bench_decoding [--baseline FOLDER] [--rounds 3] [--threads 1] [--only heavy,small]

Each case is a batch of groups whose samples share a prompt. `heavy`: responses with a heavy tail on more requests than
the engine has slots (`heavy_tail_task.py`). The others are random models, of which no response ends before its limit,
or whose responses end at random tokens (`ends`). Seconds are CPU seconds of the process, which other work on the
machine changes less than wall-clock seconds; medians over the rounds, each in a new process.

The tokens of both trees are compared: where batches differ, rounding may let a sample take another token.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tools.bench.harness import options_of


@dataclass(frozen=True)
class Case:
    """A model and the requests that it continues."""

    hidden: int
    layers: int
    vocab: int
    prompts: int
    group: int
    tokens: int
    ends: int = 0
    """Mean length of responses; 0: all have `tokens` tokens."""


CASES = {
    "heavy": Case(64, 2, 40, prompts=256, group=8, tokens=1024),
    "small": Case(64, 2, 128, prompts=16, group=4, tokens=128),
    "tail": Case(256, 4, 68, prompts=16, group=4, tokens=256, ends=40),
    "middle": Case(256, 4, 4096, prompts=8, group=8, tokens=96),
    "large": Case(768, 8, 32000, prompts=4, group=4, tokens=24),
}
SLOTS = 256


def measure(name: str, folder: Path) -> None:
    """Prints seconds, tokens and a digest of the tokens of a case as a JSON line."""
    import torch

    from verl_mg.engines.engine import Request, Sampling
    from verl_mg.engines.hf.engine import HFEngine

    case, draw = CASES[name], random.Random(0)
    if name == "heavy":
        lines = (folder / name / "train.jsonl").read_text().splitlines()
        characters = [json.loads(line)["prompt"] for line in lines]
        model = folder / name / "model"
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model)
        prompts = [tuple(tokenizer(draw.choice(characters))["input_ids"]) for _ in range(case.prompts)]
        stops: tuple[int, ...] = (tokenizer.eos_token_id,)
    else:
        model = folder / name
        prompts = [tuple(draw.randrange(case.vocab) for _ in range(draw.randint(16, 48))) for _ in range(case.prompts)]
        # Of a model with random weights all tokens are about as likely.
        stops = tuple(range(round(case.vocab / case.ends))) if case.ends else ()
    engine = HFEngine(model, "cpu", torch.float32, max_running_requests=SLOTS, longest_row=case.tokens + 64)
    sampling = Sampling(max_new_tokens=case.tokens, stop_token_ids=stops)
    requests = [Request(i, prompts[i // case.group], seed=i) for i in range(case.prompts * case.group)]
    engine.generate(requests[: case.group], Sampling(max_new_tokens=4))
    started, wall = time.process_time(), time.perf_counter()
    samples = engine.generate(requests, sampling)
    seconds, wall = time.process_time() - started, time.perf_counter() - wall
    tokens = [list(sample.tokens) for sample in samples]
    print(json.dumps({"seconds": seconds, "wall": wall, "tokens": tokens}))


def make(name: str, folder: Path) -> None:
    """Writes the model of a case."""
    case = CASES[name]
    if name == "heavy":
        from tools.bench import heavy_tail_task

        heavy_tail_task.make(folder / name, case.hidden, case.layers, case.tokens + 64)
        return
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        hidden_size=case.hidden, num_hidden_layers=case.layers, vocab_size=case.vocab, num_attention_heads=8,
        num_key_value_heads=4, head_dim=case.hidden // 8, intermediate_size=3 * case.hidden,
        max_position_embeddings=case.tokens + 64,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)


def main() -> None:
    parser = options_of(__doc__, rounds=3, threads=1)
    parser.add_argument("--baseline", type=Path, help="folder of another tree")
    parser.add_argument("--only", default=",".join(CASES), help="cases, separated by commas")
    options = parser.parse_args()
    trees = {"this tree": Path(__file__).parents[2]} | ({"baseline": options.baseline} if options.baseline else {})
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        for name in options.only.split(","):
            make(name, folder)
            results: dict[str, list[dict]] = {tree: [] for tree in trees}
            for _ in range(options.rounds):
                for tree, root in trees.items():
                    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": str(options.threads)}
                    output = subprocess.run(
                        [sys.executable, __file__, name, text], env=environment, check=True, stdout=subprocess.PIPE
                    ).stdout
                    results[tree].append(json.loads(output.splitlines()[-1]))
            report(name, results)


def report(name: str, results: dict[str, list[dict]]) -> None:
    """Prints a line for each tree, and one that compares them."""
    rates = {}
    for tree, runs in results.items():
        lengths = sorted(map(len, runs[0]["tokens"]))
        seconds, wall = (statistics.median(run[key] for run in runs) for key in ("seconds", "wall"))
        rates[tree] = sum(lengths) / seconds
        print(
            f"{name:8} {tree:10} {rates[tree]:8.0f} tokens/s of processor, {sum(lengths) / wall:8.0f} of wall clock; "
            f"{len(lengths)} samples, mean {statistics.mean(lengths):.0f}, longest {lengths[-1]}",
            flush=True,
        )
    if len(results) == 2:
        ours, theirs = (runs[0]["tokens"] for runs in results.values())
        same = sum(a == b for a, b in zip(ours, theirs, strict=True))
        first, second = rates.values()
        print(f"{name:8} {first / second:.2f} times the baseline; {same} of {len(ours)} samples with equal tokens")


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] in CASES:
        measure(sys.argv[1], Path(sys.argv[2]))
    else:
        main()
