"""Compares checkpoints that can be read under any layout: ours and megatron-core's `dist_checkpointing`, in turn.

    python -m tools.bench.bench_checkpoint [--hidden 768] [--layers 12] [--rounds 6]

Four ranks over gloo share a network in float32 under tp2 with two data-parallel ranks, with megatron-core's
distributed optimizer after one real step. All methods save this state, and read it into newly built jobs:

    ours        verl_mg.run.checkpointer: each rank writes its shards, in a thread
    all-gather  dist_checkpointing, the optimizer `fully_reshardable`, saving and loading fully parallel, as it
                advises: every data-parallel rank gathers the optimizer states of all
    async       the same, its files written by forked processes (async_sharded_save)
    gather      all-gather in its memory-efficient mode: the first data-parallel rank gathers the optimizer

On the CPU megatron-core runs on verl_mg/megatron/cpu_shim.py, as in training. It needs two more changes: for `gather`,
the data-parallel group, which uses gloo, is also set as its gloo group; and reading does not touch the steps of torch's
Adam, which it would set from its count and then fail to find as tensors.

Seconds are medians over the rounds, without the first (a warm-up), of the slowest rank. Files are read from the page
cache, and our reading includes the check of every SHA-256. Bytes sent are counted in every collective, once for each
receiving rank. Memory is the growth of the resident set of the worst rank in the worst round; processes that
dist_checkpointing forks to write are excluded, and ours keeps its memory for the next checkpoint. After each reading
every weight and moment, and the count of steps, is compared with the saved network; one different bit ends the run.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import logging
import os
import re
import shutil
import statistics
import string
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers.utils.logging import disable_progress_bar

from tools.bench.dist_checkpoints import DistCheckpoints, adapt
from tools.bench.harness import options_of
from verl_mg.checkpoint.sharded_safetensors import StoredBox
from verl_mg.config import load_config
from verl_mg.job.job import RunningJob
from verl_mg.job.recipe import Recipe, load_recipe
from verl_mg.layout import Layout
from verl_mg.models.tiny_model import make_tiny_model
from verl_mg.roles.models import TrainableRole
from verl_mg.run.checkpointer import AsyncCheckpointer, newest_intact
from verl_mg.run.job_state import restore
from verl_mg.run.loop import one_iteration
from verl_mg.sharding.boxes import slices
from verl_mg.stores.folders import LocalFolders
from verl_mg.training.weights import weights

RECIPE = Path(__file__).parents[2] / "recipes" / "sft.py"
RANKS = 4
SAVED_UNDER = "tp2"
READ_UNDER = ("tp2", "tp4", "tp1")
MIB = 2**20
LIBC = ctypes.CDLL("libc.so.6")


@dataclass(frozen=True)
class Cost:
    """Measurements of a save or a read on one rank, or merged over all ranks."""

    blocked: float
    """Seconds until training could continue."""
    seconds: float
    """Seconds until the checkpoint was complete."""
    sent: int
    """Bytes sent in collectives."""
    peak: int
    """Growth of the resident set, in bytes."""


class Method(Protocol):
    """Method of saving and reading; all ranks call it together."""

    def begin(self, job: RunningJob, folder: Path) -> None:
        """Starts to save; training may continue when this returns."""

    def finish(self) -> None:
        """Completes the save: the checkpoint is on disk when this returns."""

    def load(self, job: RunningJob, folder: Path) -> None:
        """Reads into a job that may have another layout."""


def main() -> None:
    """Writes the model and starts the ranks."""
    options = options_of(__doc__, hidden=768, layers=12, rounds=6).parse_args()
    disable_progress_bar()
    torch.set_num_threads(1)  # before the fork: threads of OpenMP do not outlive it
    folder = Path(tempfile.mkdtemp(prefix="bench-checkpoint-"))
    try:
        _write_inputs(folder, options.hidden, options.layers)
        multiprocessing.start_processes(_rank, (folder, options), nprocs=RANKS, start_method="fork")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _rank(rank: int, folder: Path, options: argparse.Namespace) -> None:
    # A server that dist_checkpointing spawns would import this program again, which takes seconds and is not needed.
    vars(sys.modules["__main__"]).update(__spec__=None, __file__=None)
    gc.freeze()  # what was imported is never garbage: collecting between the measurements is short
    # With `gather` it warns each time, since ranks that gathered nothing save other keys.
    logging.getLogger("megatron.core.dist_checkpointing.validation").setLevel(logging.ERROR)
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("gloo", store=dist.PrefixStore("job", store), rank=rank, world_size=RANKS)
    recipe = load_recipe(RECIPE)
    job = _job(recipe, folder, SAVED_UNDER, store)
    one_iteration(recipe, job, 1)
    methods: dict[str, Method] = {
        "ours": Ours(recipe, job, folder / "ours"),
        "all-gather": DistCheckpoints(job.actor),
        "async": DistCheckpoints(job.actor, asynchronous=True),
        "gather": DistCheckpoints(job.actor, memory_efficient=True),
    }
    saving = _saves(methods, job, folder, options.rounds)
    _keep(job.actor, folder / "truth")
    shapes = [torch.Size(whole.shape) for whole in job.actor.runner.table.huggingface().values()]
    reading = {}
    for layout in READ_UNDER:
        job = _job(recipe, folder, layout, store)
        reading[layout] = _reads(methods, job, folder, options.rounds)
        del job
    if rank == 0:
        disk = {name: _size(folder / name) for name in methods}
        print(_report(options, sum(shape.numel() for shape in shapes), saving, disk, reading), flush=True)
    dist.barrier()
    dist.destroy_process_group()


# -- the job


def _write_inputs(folder: Path, hidden: int, layers: int) -> None:
    make_tiny_model(
        folder / "model",
        "qwen3",
        characters=string.ascii_letters + string.digits + "+=",
        hidden=hidden,
        layers=layers,
        heads=8,
        kv_heads=4,
        ffn=3 * hidden,
    )
    lines = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _job(recipe: Recipe, folder: Path, layout: str, store: dist.Store) -> RunningJob:
    overrides = [
        f"model.path={folder / 'model'}",
        "model.dtype=float32",
        f"data.train={folder / 'sums.jsonl'}",
        f"actor.layout={layout}",
        "actor.optimizer.lr=1e-3",
        "algorithm.examples_per_iteration=8",
    ]
    config = load_config(None, overrides, recipe.config)
    job = RunningJob(config, recipe.roles(config.algorithm), store)
    for optimizer in job.actor.trainer.optimizer.chained_optimizers:
        adapt(optimizer)
    return job


# -- ours


class Ours:
    """Checkpoints of the job, as its loop writes and reads them."""

    def __init__(self, recipe: Recipe, job: RunningJob, folder: Path) -> None:
        self._recipe, self._saver = (
            recipe.name,
            AsyncCheckpointer(LocalFolders(folder), job.config.checkpoint, recipe.name),
        )

    def begin(self, job: RunningJob, folder: Path) -> None:
        self._saver.begin(job, {})

    def finish(self) -> None:
        if problem := self._saver.finish():
            raise RuntimeError(problem)

    def load(self, job: RunningJob, folder: Path) -> None:
        checkpoint = newest_intact(LocalFolders(folder))
        assert checkpoint is not None
        restore(job, checkpoint, self._recipe)


# -- measuring


def _saves(methods: dict[str, Method], job: RunningJob, folder: Path, rounds: int) -> dict[str, Cost]:
    measured: dict[str, list[Cost]] = defaultdict(list)
    for _ in range(rounds):
        for name, method in methods.items():
            if dist.get_rank() == 0:
                shutil.rmtree(folder / name, ignore_errors=True)
            measured[name].append(_measured(partial(method.begin, job, folder / name), method.finish))
    return {name: _median(costs) for name, costs in measured.items()}


def _reads(methods: dict[str, Method], job: RunningJob, folder: Path, rounds: int) -> dict[str, Cost]:
    measured: dict[str, list[Cost]] = defaultdict(list)
    for _ in range(rounds):
        for name, method in methods.items():
            for part in _held(job.actor):
                part.values.fill_(float("nan"))
            measured[name].append(_measured(partial(method.load, job, folder / name)))
            _verify(name, job.actor, folder / "truth")
    return {name: _median(costs) for name, costs in measured.items()}


def _measured(begin: Callable[[], None], finish: Callable[[], None] | None = None) -> Cost:
    gc.collect()
    LIBC.malloc_trim(0)  # freed memory of an earlier run that malloc kept would hide a peak
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    resident = _status("VmRSS")
    dist.barrier()
    with _counted() as sent:
        started = time.perf_counter()
        begin()
        blocked = time.perf_counter() - started
        if finish:
            finish()
        seconds = time.perf_counter() - started
    local = Cost(blocked, seconds, sum(sent), _status("VmHWM") - resident)
    costs: list[Any] = [None] * RANKS
    dist.all_gather_object(costs, local)
    return Cost(
        blocked=max(cost.blocked for cost in costs),
        seconds=max(cost.seconds for cost in costs),
        sent=sum(cost.sent for cost in costs),
        peak=max(cost.peak for cost in costs),
    )


def _median(rounds: Sequence[Cost]) -> Cost:
    """Leaves out the seconds of the first round, a warm-up, if there are several; its memory counts."""
    warm = rounds[1:] or rounds
    return Cost(
        blocked=statistics.median(cost.blocked for cost in warm),
        seconds=statistics.median(cost.seconds for cost in warm),
        sent=rounds[-1].sent,
        peak=max(cost.peak for cost in rounds),
    )


def _status(field_name: str) -> int:
    """Returns a line of /proc/self/status in bytes."""
    (kib,) = re.findall(rf"{field_name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kib) * 1024


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _to_scatter(group: ProcessGroup, inputs: Sequence[Sequence[Tensor]], root: int) -> int:
    return sum(_bytes(parts) - parts[root].nbytes for parts in inputs) if group.rank() == root else 0


# Bytes that a rank sends in a collective of torch, computed from the arguments of the group's method.
COLLECTIVES: dict[str, Callable[..., int]] = {
    "allgather": lambda group, outputs, inputs, *_: _bytes(inputs) * (group.size() - 1),
    "allreduce": lambda group, tensors, *_: 2 * _bytes(tensors) * (group.size() - 1) // group.size(),
    "broadcast": lambda g, tensors, how, *_: _bytes(tensors) * (g.size() - 1) if g.rank() == how.rootRank else 0,
    "gather": lambda group, outputs, inputs, how, *_: _bytes(inputs) if group.rank() != how.rootRank else 0,
    "scatter": lambda group, outputs, inputs, how, *_: _to_scatter(group, inputs, how.rootRank),
    "send": lambda group, tensors, *_: _bytes(tensors),
}


@contextmanager
def _counted() -> Iterator[list[int]]:
    """Appends the bytes that this rank sends in any thread; a collective that cannot be counted is an error."""
    sent: list[int] = []
    others = ("reduce", "reduce_scatter", "alltoall", "alltoall_base", "_allgather_base", "_reduce_scatter_base")
    originals = {name: vars(ProcessGroup)[name] for name in (*COLLECTIVES, *others)}

    def counting(name: str) -> Callable[..., Any]:
        def call(group: ProcessGroup, *arguments: Any) -> Any:
            sent.append(COLLECTIVES[name](group, *arguments))
            return originals[name](group, *arguments)

        return call

    for name in originals:
        setattr(ProcessGroup, name, counting(name))
    try:
        yield sent
    finally:
        for name, original in originals.items():
            setattr(ProcessGroup, name, original)


# -- verification


def _held(role: TrainableRole) -> Iterator[StoredBox]:
    """Yields all weights and moments on this rank, in the memory used for computation."""
    yield from weights(role.runner)
    yield from role.trainer.stored_boxes()


def _keep(role: TrainableRole, folder: Path) -> None:
    """Writes weights and moments of the whole network, independently of the methods, to files that all ranks map."""
    folder.mkdir(exist_ok=True)
    for part in role.trainer.stored_boxes():
        _whole(role, folder, part)[slices(part.box)] = part.values
    dist.barrier()


def _verify(name: str, role: TrainableRole, folder: Path) -> None:
    for part in _held(role):
        expected = _whole(role, folder, part)[slices(part.box)]
        if not torch.equal(part.values.view(torch.int32), expected.view(torch.int32)):
            raise RuntimeError(f"{name}, {role.runner.layout}: {part.key} differs from the saved value")
    if role.trainer.counters().moments != 1:
        raise RuntimeError(f"{name}, {role.runner.layout}: the count of steps differs from the saved value")


def _whole(role: TrainableRole, folder: Path, part: StoredBox) -> Tensor:
    """Returns the tensor of which a part is a box."""
    shape = torch.Size(role.runner.table.huggingface()[part.tensor].shape)
    path = folder / f"{part.namespace}.{part.tensor}"
    return torch.from_file(str(path), shared=True, size=shape.numel(), dtype=torch.float32).view(shape)


# -- report


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _report(
    options: argparse.Namespace,
    parameters: int,
    saving: dict[str, Cost],
    disk: dict[str, int],
    reading: dict[str, dict[str, Cost]],
) -> str:
    rows = {
        "training waits, s": {name: cost.blocked for name, cost in saving.items()},
        "on disk after, s": {name: cost.seconds for name, cost in saving.items()},
        "on disk, MiB": {name: size / MIB for name, size in disk.items()},
        "sent, MiB": {name: cost.sent / MIB for name, cost in saving.items()},
        "memory of a rank, MiB": {name: cost.peak / MIB for name, cost in saving.items()},
    }
    for layout, costs in reading.items():
        place = f"read under {layout} x dp{Layout.parse(layout).fit(RANKS).dp}"
        rows[f"{place}, s"] = {name: cost.seconds for name, cost in costs.items()}
        rows[f"{place}: sent, MiB"] = {name: cost.sent / MIB for name, cost in costs.items()}
        rows[f"{place}: memory of a rank, MiB"] = {name: cost.peak / MIB for name, cost in costs.items()}
    chosen = " ".join(f"--{name} {value}" for name, value in vars(options).items())
    lines = [
        f"`python -m tools.bench.bench_checkpoint {chosen}`: {parameters / 1e6:.1f} million parameters in float32, "
        f"saved under {SAVED_UNDER} x dp2 on {RANKS} ranks over gloo; {_machine()}.",
        "",
        f"| | {' | '.join(saving)} |",
        f"|---|{'---:|' * len(saving)}",
        *(f"| {what} | {' | '.join(_cells(values))} |" for what, values in rows.items()),
        "",
        "In brackets: times ours. Everything that was read is bitwise identical to what was saved.",
    ]
    return "\n".join(lines)


def _cells(values: dict[str, float]) -> Iterator[str]:
    for value in values.values():
        ratio = value / values["ours"]
        number = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
        # Ours sends only a few digests, so a ratio of bytes sent has no meaning.
        yield number if value == values["ours"] or ratio > 1000 else f"{number} ({ratio:.1f}x)"


def _machine() -> str:
    model = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores ({model[1] if model else 'unknown'}), {memory:.0f} GiB of memory"


if __name__ == "__main__":
    main()
