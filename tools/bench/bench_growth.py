"""Growth of the parts of an iteration outside models with prompts, length, samples that are kept, and ranks.

    python -m tools.bench.bench_growth rows [--iterations 8]    # seconds of phases on 2 ranks, each size doubled
    python -m tools.bench.bench_growth kept                     # seconds of records, index and checkpoint of samples
    python -m tools.bench.bench_growth ranks [--largest 8]      # messages, bytes, store operations, CPU of a rank

The job is GRPO with a reference on the task of recipes/tasks/repeat_digit.py and the engine `hf`. An exponent of 1 is
growth as that of rows, or of the other ranks, with equally many rows each: for one rank, all ranks together are one
more. Seconds are of the fastest iteration. On paper the bytes of rows come from `plan_deliveries` and `plan_returns`.
`exponent` is of all sizes, `last` of the last doubling.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tools.bench import wide_repeat_digit
from tools.bench.harness import on_ranks, options_of
from tools.bench.message_counter import Traffic, counted_traffic
from verl_mg.batch import ColumnKind
from verl_mg.config import load_config
from verl_mg.data import Prompt, PromptFeed, PromptSet
from verl_mg.distributed.world import World
from verl_mg.engines.engine import Sample
from verl_mg.job.recipe import load_recipe
from verl_mg.jsonl import read_lines
from verl_mg.layout.packing import plan_evenly
from verl_mg.models.transformers_module import read_tokenizer
from verl_mg.monitor.sample_schema import SAMPLES, FileMetadata
from verl_mg.monitor.sample_writer import SampleWriter
from verl_mg.phase_timer import COMPUTE_PHASES, WAIT
from verl_mg.roles.reward import SampleTexts
from verl_mg.rows.plan import ColumnSchema, RowIndex, plan_deliveries, plan_returns, whole_columns
from verl_mg.rows.samples import GeneratedRows, RolloutRecord, samples_to_batch
from verl_mg.run.loop import train
from verl_mg.run.sample_state import SampleState, reports_of
from verl_mg.view.index_builder import IndexBuilder

RANKS, TOKENS, PROMPTS = 2, 6, 64
HIDDEN, LAYERS = 64, 2
GROUP = 4
ROWS_OF_RANK = 32
NODE = 8
SIZES = {"prompts": [128, 256, 512, 1024], "length": [32, 64, 128, 256]}
KEPT = [128, 256, 512, 1024, 2048]
PHASES = ("row_dispatch", "wait_reward", "logging", "role_compute", "weight_sync", "other")
TOKEN_COLUMNS = {"tokens": torch.int64, "loss_mask": torch.bool, "policy_versions": torch.int64}
TOKEN_COLUMNS |= dict.fromkeys(("rollout_logprobs", "old_logprobs", "ref_logprobs", "advantages"), torch.float32)
ROW_COLUMNS = 9
"""Columns of GRPO's update with a number for each row."""


@dataclass
class Iteration:
    """Messages, store operations and CPU seconds of an iteration of a rank."""

    traffic: Traffic
    store: Counter[str]
    cpu_seconds: float


class _CountingStore(dist.Store):
    """Store that counts the operations of this rank."""

    def __init__(self, inner: dist.Store, operations: Counter[str] | None = None) -> None:
        super().__init__()
        self._inner, self.operations = inner, Counter[str]() if operations is None else operations

    def has_extended_api(self) -> bool:
        return self._inner.has_extended_api()  # type: ignore[attr-defined]  # not in torch's stubs

    def clone(self) -> dist.Store:
        # torch keeps the store, but not its part in Python.
        self._clone = _CountingStore(self._inner.clone(), self.operations)  # type: ignore[attr-defined]
        return self._clone


def _operation(name: str) -> Callable[..., Any]:
    def count(self: _CountingStore, *arguments: Any) -> Any:
        self.operations[name] += 1
        return getattr(self._inner, name)(*arguments)

    return count


for _name in ("set", "get", "add", "wait", "check", "multi_get", "multi_set", "append", "compare_set", "delete_key"):
    setattr(_CountingStore, _name, _operation(_name))
_CountingStore.deleteKey = _CountingStore.delete_key  # type: ignore[attr-defined]  # torch looks for this name


@dataclass(frozen=True)
class _Observed(World):
    """World that observes the ends of iterations."""

    traffic: Traffic = field(default_factory=Traffic)
    seen: list[tuple[Traffic, Counter[str], float]] = field(default_factory=list)

    def report_iteration(self, iteration: int) -> None:
        assert isinstance(self.store, _CountingStore)
        self.seen.append((self.traffic.copy(), self.store.operations.copy(), time.process_time()))

    def iterations(self) -> list[Iteration]:
        return [Iteration(b[0].since(a[0]), b[1] - a[1], b[2] - a[2]) for a, b in pairwise(self.seen)]


def _run(folder: Path, name: str, store: dist.Store, prompts: int, tokens: int, iterations: int) -> list[Iteration]:
    """Runs a job on this rank, whose records are in folder / name."""
    recipe = load_recipe(wide_repeat_digit.RECIPES / "grpo.py")
    overrides = [
        *wide_repeat_digit.overrides(folder, "grpo", prompts, tokens),
        f"job.output={folder / name}",
        f"job.iterations={iterations}",
        "job.save=false",
        "job.console=false",
        "checkpoint.every=0",
        "rollout.max_mismatch=null",
    ]
    counting = _CountingStore(dist.PrefixStore(name, store))
    with counted_traffic() as traffic, redirect_stdout(StringIO()):
        world = _Observed(dist.get_rank(), dist.get_world_size(), counting, traffic=traffic)
        train(recipe, load_config(None, overrides, recipe.config), world)
    return world.iterations()


# -- rows


def _rows(rank: int, store: dist.Store, folder: Path, iterations: int) -> None:
    _run(folder, "warmup", store, PROMPTS, TOKENS, 2)
    for what, sizes in SIZES.items():
        for size in sizes:
            prompts, tokens = (size, TOKENS) if what == "prompts" else (PROMPTS, size)
            _run(folder, f"{what}-{size}", store, prompts, tokens, iterations)
        if rank == 0:
            _print_phases(what, {size: _fastest(folder / f"{what}-{size}") for size in sizes})


def _fastest(run: Path) -> dict[str, float]:
    """Returns the seconds of each phase outside models in the iteration in which they are least."""
    lines = read_lines(run / "metrics.jsonl")[1:]
    names = {name for line in lines for name in line if name.startswith("time/phase/")}
    phases = {name: min(line.get(name) or 0.0 for line in lines) for name in names}
    chosen = {name.removeprefix("time/phase/"): seconds for name, seconds in phases.items()}
    return {n: s for n, s in chosen.items() if n not in COMPUTE_PHASES and (not n.startswith(WAIT) or n in PHASES)}


def _print_phases(what: str, seconds: Mapping[int, Mapping[str, float]]) -> None:
    names = [name for name in PHASES if any(name in phases for phases in seconds.values())]
    by_size = {size: phases | {"sum": sum(phases.values())} for size, phases in seconds.items()}
    _table(
        f"ms by {what}", {n: [by_size[size].get(n, 0.0) * 1e3 for size in seconds] for n in [*names, "sum"]}, seconds
    )


def _table(title: str, rows: Mapping[str, Sequence[float]], sizes: Iterable[int], less: int = 0) -> None:
    """Prints values by size, with the exponents of their growth with the sizes less a number."""
    sizes = list(sizes)
    grown = [size - less for size in sizes]
    print(f"\n{title:42}" + "".join(f"{size:>11,}" for size in sizes) + f"{'exponent':>10}{'last':>7}", flush=True)
    for name, values in rows.items():
        exponents = f"{exponent(grown, values):>10.2f}{exponent(grown[-2:], values[-2:]):>7.2f}"
        print(f"{name:42}" + "".join(f"{value:>11,.2f}" for value in values) + exponents, flush=True)


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Returns the slope of log(value) over log(size), by least squares; 0 for one size, and where a value is 0."""
    if min(values) <= 0 or len(sizes) == 1:
        return 0.0
    x, y = ([math.log(number) for number in numbers] for numbers in (sizes, values))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return slope / sum((a - mean_x) ** 2 for a in x)


# -- samples that are kept


def _kept(folder: Path) -> None:
    tokenizer = read_tokenizer(folder / "model")
    rows: dict[str, list[float]] = defaultdict(list)
    for count in KEPT:
        for name, seconds in _kept_seconds(folder / str(count), count, tokenizer).items():
            rows[name].append(seconds * 1e3)
    _table("ms by samples kept", rows, KEPT)


def _kept_seconds(folder: Path, count: int, tokenizer: Any) -> dict[str, float]:
    """Returns the least CPU seconds of three rounds."""
    draw = torch.Generator().manual_seed(0)
    prompt = Prompt(0, (3, 4), "3=", "3", {})
    tokens = torch.randint(3, 12, (count, 32), generator=draw).tolist()
    samples = [Sample(i, tuple(row), (-1.0,) * 32, (1,) * 32, "stop") for i, row in enumerate(tokens)]
    batch = samples_to_batch([prompt] * count, samples, 1)
    batch["group"], batch["reward"] = torch.arange(count) // GROUP, torch.rand(count, generator=draw)
    batch.put("answer", torch.zeros(count, dtype=torch.int64), ColumnKind.SEQUENCE)
    record = RolloutRecord.of(GeneratedRows(batch))
    writer = SampleWriter(
        folder / SAMPLES, 0, FileMetadata("grpo", "m", 1), SampleTexts(PromptFeed(PromptSet([prompt])), tokenizer, ())
    )
    index = folder / "index"
    index.mkdir(parents=True)
    kept = {
        "record": lambda: writer.write(1, [record], [batch]),
        "index": lambda: IndexBuilder(folder / SAMPLES, index)._add([1], {1: time.time_ns()}),
        "checkpoint": lambda: [
            (SampleState.of(sample).model_dump_json(), reports_of("x", sample)) for sample in samples
        ],
    }
    texts = [SampleState.of(sample).model_dump_json() for sample in samples]
    kept["resume"] = lambda: [SampleState.parse(text, "", "").to_sample("x", {}, {}) for text in texts]
    return {name: min(_cpu_seconds(work) for _ in range(3)) for name, work in kept.items()}


def _cpu_seconds(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


# -- ranks


def _ranks(rank: int, store: dist.Store, folder: Path) -> None:
    count = dist.get_world_size()
    done = _run(folder, f"ranks-{count}", store, ROWS_OF_RANK * count, TOKENS, 5)[1:]
    cpu = min(iteration.cpu_seconds for iteration in done)
    outside, store_operations = done[-1].traffic.outside_models, sum(done[-1].store.values())
    report = {"calls": outside.calls, "received": outside.received, "store": store_operations, "cpu": cpu}
    reports: list[Any] = [None] * count
    dist.all_gather_object(reports, report)
    if rank == 0:
        (folder / f"ranks-{count}.json").write_text(json.dumps(reports))


def _print_ranks(folder: Path, counts: Sequence[int]) -> None:
    reports = {count: json.loads((folder / f"ranks-{count}.json").read_text()) for count in counts}
    rows: dict[str, list[float]] = {}
    for what in ("calls", "received"):
        modules = sorted({module for report in reports.values() for rank in report for module in rank[what]})
        for module in modules:
            rows[f"{what}, {module}"] = [max(r[what].get(module, 0) for r in report) for report in reports.values()]
    rows["operations of the store"] = [max(rank["store"] for rank in report) for report in reports.values()]
    rows["CPU ms of the process, models too"] = [
        1e3 * sum(rank["cpu"] for rank in report) / len(report) for report in reports.values()
    ]
    _table("of a rank by ranks, the largest", rows, counts, less=1)
    paper = [2**power for power in range(1, 8)]
    planned = [on_paper(count) for count in paper]
    _table("rows of a rank on paper", {name: [row[name] for row in planned] for name in planned[0]}, paper, 1)


def on_paper(ranks: int) -> dict[str, float]:
    """Returns the messages of rows that a rank sends in an iteration, and the bytes that it receives; the largest."""
    count = ranks * ROWS_OF_RANK
    lengths = [2 + 1 + 37 * row * row % TOKENS for row in range(count)]
    owners = tuple(row // ROWS_OF_RANK for row in range(count))
    schema = {name: ColumnSchema(ColumnKind.TOKEN, dtype, ()) for name, dtype in TOKEN_COLUMNS.items()}
    schema |= {f"row {n}": ColumnSchema(ColumnKind.SEQUENCE, torch.int64, ()) for n in range(ROW_COLUMNS)}
    numbers = tuple(range(count))
    local = tuple(row % ROWS_OF_RANK for row in range(count))
    index = RowIndex(numbers, owners, local, tuple(lengths), tuple(lengths), (), schema)
    sent, received = Counter[int](), Counter[int]()
    plan = plan_evenly(lengths, list(map(float, lengths)), ranks, 1, 1 << 14)
    wanted = [[row for micro in steps for row in micro] for steps in plan.rows]
    for columns in (("tokens", "loss_mask"), tuple(schema)):
        parts = whole_columns({name: schema[name] for name in columns})
        for delivery in plan_deliveries(index, wanted, [parts] * ranks, NODE):
            for sender, receiver in delivery.hops:
                sent[sender] += 1
                received[receiver] += delivery.num_bytes
    for part in plan_returns(index, list(enumerate(wanted)), 2 * 4):
        if part.sender != part.owner:
            sent[part.sender] += 1
            received[part.owner] += part.num_bytes
    return {"messages sent": max(sent.values()), "bytes received": max(received.values())}


def main() -> None:
    """Prints the tables of one of the three parts."""
    parser = options_of(__doc__, iterations=8, largest=8)
    parser.add_argument("what", choices=("rows", "kept", "ranks"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wide_repeat_digit.make(folder, HIDDEN, LAYERS)
        _WHAT[options.what](folder, options)


def _measure_ranks(folder: Path, options: argparse.Namespace) -> None:
    counts = [count for count in (2, 4, 8, 16) if count <= options.largest]
    for count in counts:
        on_ranks(count, _ranks, folder)
    _print_ranks(folder, counts)


_WHAT: Mapping[str, Callable[[Path, argparse.Namespace], None]] = {
    "rows": lambda folder, options: on_ranks(RANKS, _rows, folder, options.iterations),
    "kept": lambda folder, options: _kept(folder),
    "ranks": _measure_ranks,
}


if __name__ == "__main__":
    main()
