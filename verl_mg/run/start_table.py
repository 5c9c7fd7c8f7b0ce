"""Table of what a job computes with, collected from its roles, engines and devices when it starts, with warnings.

Rows come from the part that has made the choice:

    actor, tp2        attention, full          cuDNN by Transformer Engine
    engine sglang     attention                fa3
    devices           NCCL within a node       NVLink (the driver's list of links)
    memory            training                 61.2 of 79.2 GiB planned

On the CPU it has only the seconds of the start, and the memory of the ranks after the first iteration.
"""

from __future__ import annotations

import json
import logging
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from verl_mg import device
from verl_mg.choice import Choice
from verl_mg.config import Config
from verl_mg.distributed.collectives import all_gather_json
from verl_mg.distributed.transport import transports
from verl_mg.errors import UserError
from verl_mg.job.job import RunningJob
from verl_mg.jsonl import replacing
from verl_mg.library import installed_versions
from verl_mg.planner.job_memory import JobMemory, job_memory

START = "start.json"
GIB = 2**30
SHORTEST_SECONDS = 0.005  # phases of the start that are shorter are not listed
OF_PLAN = {
    "imports": ("imports",),
    "build": ("data", "models"),
    "training": ("forward", "update", "optimizer"),
    "generation": ("generate",),
    "weight sync": ("weight_sync",),
}
"""Phases of a plan, and the imports before it, with the timer's phases that belong to each."""
RAN_ON = {(9, 0): "H100 and H200"}
"""GPUs on which this project has run, by their compute capability: the folders of `benchmarks/`."""
RAN_WITH = {
    "torch": ("2.11.0", "2.14.1"),
    "NCCL": ("2.28.9", "2.30.7"),
    "megatron-core": ("0.19.2",),
    "transformer-engine": ("2.20.2",),
    "sglang": ("0.5.23",),
    "transformers": ("5.19.0",),
}
"""Versions with which it has run there."""
NEVER_RAN = (
    "rollout.engine=vllm",
    "rollout.engine=sglang job.deterministic=true",
    "rollout.wire=int4",
    "rollout.wire=mxfp8",
    "rollout.urls",
    "rollout.num_ranks",
    "rollout.sglang.speculative_algorithm",
    "megatron.transformer.fp8",
    "actor.optimizer.kind=muon",
    "actor.optimizer.cpu_offload=true",
)
"""Options with which no job has run to its end on a GPU; docs/gpu_differences.md has them in its first list."""
UNTRIED = "it has not run on a GPU in this project. Run its tests first (bash tools/test_gpu.sh), and watch mismatch/."

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StartTable:
    """Rows of all ranks, each once."""

    sections: Mapping[str, Sequence[Choice]]
    memory: JobMemory | None = None  # planned memory; None where it cannot be planned, and except on rank 0

    @property
    def warnings(self) -> list[str]:
        """One line for each row that is slow or untried, with the remedy; none on the CPU."""
        # GPU: rows that are slow or untried there are warnings.
        # GPU-TEST: tests/run/test_start_table.py::test_job_on_cuda_prints_and_writes_its_table_once
        # GPU-RAN: not yet
        if not torch.cuda.is_available():
            return []
        return [
            f"{section}, {row.part}: {row.chosen}: {row.warning}"
            for section, rows in self.sections.items()
            for row in rows
            if row.warning
        ]

    def lines(self) -> list[str]:
        """Returns the table as text, without the warnings."""
        rows = [
            ("" if number else section, *row)
            for section, of_section in self.sections.items()
            for number, row in enumerate(of_section)
        ]
        names, parts = (max(len(row[column]) for row in rows) for column in (0, 1))
        return [f"{name:<{names}}  {part:<{parts}}  {chosen}" for name, part, chosen, _ in rows]

    def write(self, folder: Path) -> None:
        """Writes the table for programs."""
        content = {"rows": {name: [row._asdict() for row in rows] for name, rows in self.sections.items()}}
        with replacing(folder / START) as file:
            file.write_text(json.dumps(content | {"warnings": self.warnings}, indent=2) + "\n", encoding="utf-8")

    def started(self, job: RunningJob) -> StartTable:
        """Returns the table with the seconds up to the first iteration; all ranks call it together."""
        seconds = job.timer.take()
        rows = [Choice(phase, f"{value:.2f} s") for phase, value in seconds.items() if value >= SHORTEST_SECONDS]
        return self._with_rows("start", [*rows, Choice("together", f"{sum(seconds.values()):.2f} s")], job.config)

    def compare_memory(self, job: RunningJob) -> None:
        """Adds the memory of the fullest rank so far, with that of the plan; all ranks call it together."""
        measured, job.timer.memory = job.timer.memory, None
        of_ranks = all_gather_json(measured.bytes if measured else {})
        # GPU: the tensors of the fullest rank, and the largest phase of the plan.
        # GPU-TEST: tests/run/test_start_table.py::test_memory_of_the_first_iteration_is_printed_with_the_plan
        # GPU-RAN: not yet
        on_gpu = torch.cuda.is_available()
        of_device = max(all_gather_json(torch.cuda.max_memory_allocated())) if on_gpu else 0
        if dist.get_rank() == 0:
            plan = self.memory or _memory(job)[0]
            planned = plan.phases if plan else {}
            rows = _host_rows(of_ranks, {} if on_gpu else planned)
            if on_gpu:
                phase = max(planned, key=planned.__getitem__, default="")
                of_plan = f", {_gib(planned[phase])} planned ({phase})" if phase else ""
                rows.append(Choice("tensors", f"{_gib(of_device)} GiB at most{of_plan}"))
            self._with_rows("fullest rank", rows, job.config)

    def _with_rows(self, section: str, rows: list[Choice], config: Config) -> StartTable:
        """Returns the table with a further section, which rank 0 prints, and writes with the others."""
        table = replace(self, sections={**self.sections, section: rows})
        if dist.get_rank() == 0:
            if config.job.console:
                print("\n".join(StartTable({section: rows}).lines()), flush=True)
            table.write(config.job.folder)
        return table


def start_table(job: RunningJob) -> StartTable:
    """Collects the table of a job whose roles are built; all ranks call it together."""
    places = {tuple(place) for place in all_gather_json([socket.gethostname(), str(device.current_device())])}
    hosts = {host for host, _ in places}
    here = _described("job", job.chosen)
    here |= _described("devices", lambda: {"devices": [*_devices(len(places)), *transports(len(hosts))]})
    sections: dict[str, dict[Choice, None]] = {}
    for of_rank in all_gather_json(here):
        for section, rows in of_rank.items():
            sections.setdefault(section, {}).update(dict.fromkeys(Choice(*row) for row in rows))
    memory = None
    if dist.get_rank() == 0:
        memory, rows = _memory(job)
        sections |= {"memory": dict.fromkeys(rows), "options": dict.fromkeys(_untried(job))}
    return StartTable({section: list(rows) for section, rows in sections.items() if rows}, memory)


def _host_rows(ranks: Sequence[Mapping[str, Sequence[int]]], planned: Mapping[str, float]) -> list[Choice]:
    """Returns rows with the resident memory of the fullest rank by phase, with the bytes that are `planned`."""
    names = {of_timer: of_plan for of_plan, several in OF_PLAN.items() for of_timer in several}
    largest: dict[str, tuple[int, int]] = {}
    for rank in ranks:
        for phase, (peak, kept) in rank.items():
            name = names.get(phase, "other")
            before = largest.get(name, (0, 0))
            largest[name] = max(before[0], peak), max(before[1], kept)
    tensors = {phase: f", {size / GIB:.2f} of tensors planned" for phase, size in planned.items()}
    return [
        Choice(phase, f"{peak / GIB:.2f} GiB at most, {kept / GIB:.2f} kept{tensors.get(phase, '')}")
        for phase, (peak, kept) in largest.items()
    ]


def _described(section: str, describe: Callable[[], dict[str, list[Choice]]]) -> dict[str, list[Choice]]:
    """Returns rows, or one with the error where none can be made: a report must not end a job."""
    try:
        return describe()
    except Exception as error:
        log.warning("what a rank computes with cannot be described", exc_info=True)
        reason = re.sub(r"\s+", " ", f"{type(error).__name__}: {error}")
        return {section: [Choice("table", f"none: {reason}", "Report it; it does not end the job.")]}


def announce(job: RunningJob) -> StartTable:
    """Prints and writes the table of a job that starts, with its warnings; all ranks call it together."""
    table, config = start_table(job), job.config.job
    if dist.get_rank() == 0:
        if config.console:
            print("\n".join(table.lines()), flush=True)
        for line in table.warnings:
            log.warning("%s", line)
        table.write(config.folder)
    return table


def _devices(count: int) -> Iterator[Choice]:
    versions = {name: version for name, version in installed_versions().items() if version != "none"}
    if not torch.cuda.is_available():
        # GPU: its name, and warnings of a kind or of versions with which nothing has run.
        # GPU-TEST: tests/run/test_start_table.py::test_device_or_version_that_nothing_has_run_with_is_a_warning
        # GPU-RAN: not yet
        yield Choice("kind", "CPU")
        return
    capability = torch.cuda.get_device_capability()
    name = f"{torch.cuda.get_device_name()}, compute capability {'.'.join(map(str, capability))}"
    yield Choice("number", f"{count}", f"several GPUs: {UNTRIED}" if count > 1 else "")
    untried = f"this project has run on {' and '.join(RAN_ON.values())} only. Run bash tools/test_gpu.sh first."
    yield Choice("kind", name, "" if capability in RAN_ON else untried)
    for package, tried in RAN_WITH.items():
        version = versions.get(package, "").partition("+")[0]
        if version:
            remedy = f"it has run with {' and '.join(tried)}. Install launch/requirements-gpu.txt."
            yield Choice(package, version, "" if version in tried else remedy)


def _memory(job: RunningJob) -> tuple[JobMemory | None, list[Choice]]:
    size, ranks = device.total_memory(), dist.get_world_size()
    try:
        memory = job_memory(job.config, set(job.requested), ranks, device.ranks_of_a_node(ranks), size)
    except UserError as error:
        return None, [Choice("plan", f"none: {error}")]
    except Exception as error:  # a report must not end a job
        log.warning("the memory of the job cannot be planned", exc_info=True)
        return None, [Choice("plan", f"none: {type(error).__name__}: {error}")]
    of_device = f" of {_gib(size)}" if size else ""
    rows = [Choice(phase, f"{_gib(planned)}{of_device} GiB planned") for phase, planned in memory.phases.items()]
    if memory.problem:
        rows.append(Choice("plan", "does not fit", f"{memory.problem}. verl-mg plan --search finds layouts that do."))
    return memory, rows


def _untried(job: RunningJob) -> Iterator[Choice]:
    # GPU: options with which no job has run there are rows too.
    # GPU-TEST: tests/run/test_start_table.py::test_option_that_has_not_run_on_a_gpu_is_a_warning
    # GPU-RAN: not yet
    if torch.cuda.is_available():
        for options in NEVER_RAN:
            used = "rollout" in job.requested or not options.startswith("rollout.")
            if used and all(_is_set(job.config, option) for option in options.split()):
                yield Choice("untried", options, UNTRIED)


def _is_set(config: Config, option: str) -> bool:
    """Returns whether a configuration has an option: KEY=VALUE, or KEY with any value."""
    key, _, wanted = option.partition("=")
    value: Any = config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else getattr(value, name)
    return str(value).lower() == wanted if wanted else bool(value)


def _gib(size: float) -> str:
    return f"{size / GIB:,.1f}"
