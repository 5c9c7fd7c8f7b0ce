"""Compares GRPO on the CPU, from prompts to new weights, with TRL's GRPOTrainer, in turn, in one run.

    python -m tools.bench.bench_end_to_end [--rounds 3] [--iterations 1] [--prompts 16] [--tokens 256] [--hidden 256]
    python -m tools.bench.bench_end_to_end --draw SEED [--rounds 1]

With `--draw`, five sizes that the seed draws, each number log-uniform and independent of the others (`RANGES`), instead
of the given one; a draw that would take TRL more than `LIMIT` seconds by its FLOPs is drawn again before anything runs.
Small ones count several iterations (`COUNTED`).

Both use the same tiny model, prompts, group size, temperature, limit of tokens, loss (GRPO, no KL) and optimizer, with
one step per iteration, without a pass for old log-probs; each draws its samples itself. Lengths have a heavy tail: most
responses end early, some at the limit. Both get `--threads` threads, as that many ranks with one thread each or as one
process with all of them; each form is compared with the same form of TRL, and with the faster one.
end_to_end_trl.py explains TRL's settings (tools/install/peers.sh installs TRL).

A run is a separate process tree. The first iteration is a warm-up; the others count completely, with rollout, training
and logging, by the reader's clock from line "step 1" to the last. This project prints a line while the next iteration
generates: where the metrics' own seconds of the counted iterations are more, they count. tokens/s: response tokens
that a loss was computed on.
Memory: peak memory of all processes of the tree, launcher included, without files that the kernel could drop, a page
that several processes share counted once (Pss_Anon + Pss_Shmem, sampled). Processor: CPU seconds of the tree, which
other work on the machine changes less than wall-clock seconds. Medians over the rounds.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import statistics
import string
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from tools.bench.end_to_end_trl import MODEL, PROMPTS, Workload
from tools.bench.harness import options_of
from verl_mg.data import read_records
from verl_mg.models.tiny_model import ROLES, make_tiny_model

HERE = Path(__file__).parent
LETTERS = string.ascii_letters + string.digits
# Mean and standard deviation of the end token's logit; logits of characters are near 0. A few responses never end.
END = (0.5, 1.5)
SIZES = 5
RANGES = {
    "hidden": (64, 768),
    "layers": (2, 8),
    "vocabulary": (128, 32_000),
    "prompts": (4, 64),
    "group": (2, 16),
    "tokens": (16, 512),
}
MULTIPLES = {"hidden": 16, "prompts": 2}  # 4 heads of an even width, and an equal share for each of TRL's ranks
LIMIT = 60.0
"""Seconds of an iteration: both variants of a side, with a warm-up and a counted iteration each, take four minutes."""
RATE = 2e10
"""FLOP/s of TRL with two threads, for `LIMIT` and `COUNTED`."""
COUNTED = (10.0, 5)
"""Seconds of TRL by its FLOPs for which a drawn size counts iterations, and the largest number of them."""


@dataclass(frozen=True)
class Size:
    """Size of a model and of an iteration.

    Size(hidden=256, layers=4, vocabulary=128, prompts=16, group=4, tokens=256)
    """

    hidden: int
    layers: int
    vocabulary: int
    prompts: int
    group: int
    tokens: int

    @property
    def seconds(self) -> float:
        """Seconds of an iteration of TRL, which computes all rows to the longest: a forward pass, then an update."""
        parameters = 12 * self.layers * self.hidden**2 + self.vocabulary * self.hidden
        return 8 * parameters * self.prompts * self.group * self.tokens / RATE

    @property
    def iterations(self) -> int:
        """Iterations that are counted."""
        seconds, most = COUNTED
        return min(max(round(seconds / self.seconds), 1), most)

    @classmethod
    def draw(cls, random: random.Random) -> Size:
        while True:
            drawn = {name: math.exp(random.uniform(*map(math.log, ends))) for name, ends in RANGES.items()}
            size = cls(**{name: (unit := MULTIPLES.get(name, 1)) * round(drawn[name] / unit) for name in RANGES})
            if size.seconds <= LIMIT:
                return size


@dataclass(frozen=True)
class Watched:
    """Measurements of a process tree between its first and its last line "step N"."""

    seconds: float
    """Wall-clock seconds."""
    processor: float
    """CPU seconds of all processes."""
    peak_bytes: int
    """Peak memory of all processes together, in bytes."""
    last_line: str
    """Last line of the output."""


@dataclass(frozen=True)
class Run:
    """Result of one process tree in its counted iterations."""

    watched: Watched
    """Measurements from outside."""
    generation: float
    """Seconds of generation."""
    lengths: list[int]
    """Length of each response, in tokens."""
    reported: float = 0.0
    """Seconds of the iterations by the program's own clock, where it has one."""

    @property
    def seconds(self) -> float:
        return max(self.watched.seconds, self.reported)

    @property
    def rate(self) -> float:
        return sum(self.lengths) / self.seconds

    @property
    def rate_of_processor(self) -> float:
        return sum(self.lengths) / self.watched.processor


def main() -> None:
    parser = options_of(__doc__, rounds=0, iterations=1, threads=2, layers=4, vocabulary=0, hidden=256, prompts=16)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--draw", type=int, metavar="SEED")
    options = parser.parse_args()
    if options.draw is None:
        sizes = [Size(**{field.name: getattr(options, field.name) for field in fields(Size)})]
    else:
        draw = random.Random(options.draw)
        sizes = [Size.draw(draw) for _ in range(SIZES)]
    for size in sizes:
        print(f"\n{size}", flush=True)
        drawn = options.draw is not None
        iterations = size.iterations if drawn else options.iterations
        compare(size, options.rounds or (1 if drawn else 3), iterations, options.threads)


def compare(size: Size, rounds: int, iterations: int, threads: int) -> None:
    """Runs both sides in turn and prints each run, medians and ratios."""
    folder = Path(tempfile.mkdtemp(prefix="end-to-end-"))
    make_model(folder / MODEL, size.hidden, size.layers, size.vocabulary)
    write_prompts(folder / PROMPTS, size.prompts)
    ways = {
        f"{side}, {ranks} x {threads // ranks}": (run, ranks)
        for ranks in dict.fromkeys((1, threads))
        for side, run in (("verl_mg", run_verl_mg), ("TRL", run_trl))
    }
    runs: dict[str, list[Run]] = {name: [] for name in ways}
    for number in range(rounds):
        work = Workload(size.prompts, size.group, size.tokens, iterations + 1, seed=number)
        for name, (run, ranks) in ways.items():
            place = folder / f"{number}-{name.replace(' ', '')}"
            runs[name].append(run(folder, place, work, ranks, threads // ranks))
            print(line_of(f"{name}, run {number + 1}", runs[name][-1:], work), flush=True)
    for name, results in runs.items():
        print(line_of(name, results, work))
    _compare(runs)


# -- the task


@torch.no_grad()
def make_model(folder: Path, hidden: int, layers: int = 4, vocabulary: int = 0) -> None:
    """Writes a model with random weights; the probability to end a response depends on the prompt, see END.

    A vocabulary above 0 is padded to that size, as published models' are: its last tokens are never sampled.
    """
    fields = {"vocab_size": vocabulary} if vocabulary else {}
    make_tiny_model(folder, "qwen3", characters=LETTERS, hidden=hidden, layers=layers, ffn=3 * hidden, fields=fields)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    pad, end, *others = (model.config.pad_token_id, model.config.eos_token_id, *range(2, 3 + len(ROLES)))
    head, embedding = model.lm_head.weight, model.model.embed_tokens.weight
    # The head has no bias; a direction that all hidden states share replaces it.
    embedding[:, 0] = embedding.norm(dim=1).mean()
    draw = torch.Generator().manual_seed(0)
    used = others[-1] + 1 + len(LETTERS)
    texts = torch.randint(others[-1] + 1, used, (64, 96), generator=draw)
    states = model.model(input_ids=texts).last_hidden_state.flatten(0, 1)
    common = states.mean(0)
    common_unit = common / common.norm() ** 2
    head -= torch.outer(head @ common, common_unit)
    head[end] *= END[1] / (states @ head[end]).std()
    head[end] += END[0] * common_unit
    # These tokens are never written, so a response has as many characters as tokens and its text gives its length.
    head[[pad, *others, *range(used, len(head))]] += -20 * common_unit
    model.save_pretrained(folder)


def write_prompts(file: Path, count: int) -> None:
    """Writes a file of random prompts."""
    draw = random.Random(0)
    texts = ["".join(draw.choices(LETTERS, k=draw.randint(16, 48))) for _ in range(count)]
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")


# -- the sides


def run_verl_mg(folder: Path, place: Path, work: Workload, ranks: int, threads: int, backend: str = "megatron") -> Run:
    """Runs a job of this project."""
    config = {
        "model": {"path": str(folder / MODEL)},
        "data": {"train": str(folder / PROMPTS)},
        "actor": {"backend": backend, "optimizer": {"lr": work.lr, "clip_grad": 1.0}},
        "rollout": {"max_new_tokens": work.tokens, "temperature": work.temperature},
        "reward": {"function": f"{HERE / 'end_to_end_trl.py'}:score"},
        "algorithm": {"prompts_per_iteration": work.prompts, "group_size": work.group, "old_logprobs": "skip"},
        "job": {"output": str(place), "iterations": work.iterations, "seed": work.seed, "save": False},
    }
    place.with_suffix(".yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    launch = ["-m", "verl_mg.launch", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    train = ["-m", "verl_mg", "train", str(HERE.parents[1] / "recipes" / "grpo.py")]
    watched = _watch([*launch, *train, "--config", f"{place}.yaml"], place, threads)
    counted = _json_lines(place / "metrics.jsonl")[1:]
    files = sorted((place / "samples").glob("*/rank-*.parquet"))
    samples = [record for file in files for record in read_records(file) if record["iteration"] > 1]
    lengths = [len(record["response"]) + (record["finish"] == "stop") for record in samples]
    reported = sum(line["response/length"] * line["response/samples"] for line in counted)
    assert abs(sum(lengths) - reported) < 0.5, f"the text has {sum(lengths)} tokens, the metrics {reported}"
    generation, seconds = (sum(line[f"time/{name}"] for line in counted) for name in ("rollout_busy", "iteration"))
    return Run(watched, generation, lengths, seconds)


def run_trl(folder: Path, place: Path, work: Workload, ranks: int, threads: int) -> Run:
    """Runs the GRPOTrainer of TRL."""
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    watched = _watch([*launch, str(HERE / "end_to_end_trl.py"), str(folder), work.json()], place, threads)
    result = json.loads(watched.last_line)
    return Run(watched, sum(result["generation"][1:]), [n for step in result["lengths"][1:] for n in step])


def _json_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


# -- watching


def _watch(arguments: Sequence[str], place: Path, threads: int) -> Watched:
    """Runs Python until it ends; exits if it fails."""
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    log = place.with_suffix(".log")
    with log.open("w") as errors, _Peak() as peak:
        process = subprocess.Popen(
            [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        )
        peak.watch(process.pid)
        marks, line = [], ""
        assert process.stdout
        for line in process.stdout:
            if line.startswith("step "):
                marks.append((time.perf_counter(), _processor_seconds(process.pid)))
        if process.wait():
            sys.exit(f"error: {arguments[-1]} ended with code {process.returncode}:\n{log.read_text()[-2000:]}")
    seconds, processor = (end - start for start, end in zip(marks[0], marks[-1], strict=True))
    return Watched(seconds, processor, peak.bytes, line)


class _Peak:
    """Peak memory of a process and its descendants together.

    The kernel counts shared pages by walking all of them, which takes a tenth of a second for these processes: so it
    does when what each process maps, looked at ten times a second, is more than before, and every `LONGEST` seconds.
    """

    LONGEST = 3.0

    def __init__(self) -> None:
        self.bytes = 0
        self._over = threading.Event()

    def __enter__(self) -> _Peak:
        return self

    def watch(self, pid: int) -> None:
        self._thread = threading.Thread(target=self._look, args=(pid,), daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self, pid: int) -> None:
        most, counted = 0, -math.inf
        while not self._over.wait(0.1):
            mapped = _kibibytes(pid, "status", r"^Rss(?:Anon|Shmem):")
            if mapped > 1.01 * most or time.monotonic() - counted > self.LONGEST:
                held = _kibibytes(pid, "smaps_rollup", r"^Pss_(?:Anon|Shmem):")
                self.bytes = max(self.bytes, 1024 * held)
                most, counted = max(most, mapped), time.monotonic()


def _tree(pid: int) -> list[int]:
    """Returns the process and its descendants."""
    try:
        children = " ".join(file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/children"))
    except OSError:  # it has just ended
        return []
    return [pid, *chain.from_iterable(_tree(int(child)) for child in children.split())]


def _read_of_tree(pid: int, file: str) -> list[str]:
    """Reads a file of /proc for each process of the tree."""
    texts = []
    for process in _tree(pid):
        with suppress(OSError):
            texts.append(Path(f"/proc/{process}/{file}").read_text())
    return texts


def _kibibytes(pid: int, file: str, names: str) -> int:
    texts = _read_of_tree(pid, file)
    return sum(int(n) for text in texts for n in re.findall(names + r"\s+(\d+) kB", text, re.MULTILINE))


def _processor_seconds(pid: int) -> float:
    # After the name in brackets, which may contain anything: utime and stime of all threads, in ticks, and the same of
    # children that have ended.
    fields = [text.rpartition(")")[2].split() for text in _read_of_tree(pid, "stat")]
    return sum(int(value) for values in fields for value in values[11:15]) / os.sysconf("SC_CLK_TCK")


# -- report


def line_of(name: str, runs: Sequence[Run], work: Workload) -> str:
    """Returns a line with the medians of runs."""
    lengths = sorted(length for run in runs for length in run.lengths)
    seconds, processor, generation, peak = (
        statistics.median(values)
        for values in zip(
            *((r.seconds, r.watched.processor, r.generation, r.watched.peak_bytes) for r in runs), strict=True
        )
    )
    each = work.iterations - 1
    return (
        f"{name:20} {statistics.median(run.rate for run in runs):6.0f} tokens/s  "
        f"iteration {seconds / each:5.2f} s (generation {generation / each:5.2f}, "
        f"the rest {(seconds - generation) / each:5.2f}; processor {processor / each:5.2f})  "
        f"peak {peak / 2**20:5.0f} MiB  lengths: mean {statistics.mean(lengths):.0f}, "
        f"median {lengths[len(lengths) // 2]}, p99 {lengths[len(lengths) * 99 // 100]}, "
        f"cut {lengths.count(work.tokens) / len(lengths):.0%}"
    )


def _compare(runs: dict[str, list[Run]]) -> None:
    """Prints the ratios of each form of this project to the same form of TRL, and to the faster one."""
    forms = list(dict.fromkeys(name.partition(", ")[2] for name in runs))
    fastest = max(forms, key=lambda form: statistics.median(run.rate for run in runs[f"TRL, {form}"]))
    for form in forms:
        for other in dict.fromkeys((form, fastest)):
            pairs = list(zip(runs[f"verl_mg, {form}"], runs[f"TRL, {other}"], strict=True))
            rate = statistics.median(our.rate / their.rate for our, their in pairs)
            processor = statistics.median(our.rate_of_processor / their.rate_of_processor for our, their in pairs)
            memory = statistics.median(our.watched.peak_bytes / their.watched.peak_bytes for our, their in pairs)
            print(
                f"verl_mg, {form} to TRL, {other}{' (the faster one)' * (other == fastest)}: {rate:.2f} times the "
                f"tokens/s, {processor:.2f} times the tokens a second of processor, {memory:.2f} times the peak memory",
                flush=True,
            )


if __name__ == "__main__":
    torch.set_num_threads(1)
    disable_progress_bar()
    main()
