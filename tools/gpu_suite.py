"""Runs all tests for GPUs in slices of minutes, and writes one report; see tools/test_gpu.sh.

One node: `verl-mg doctor`, the tests of tests/gpu, tools/bench/bench_gpu.py. Several nodes: `verl-mg doctor` and
tests/gpu/nodes.py over all of them. A part that fails does not end the suite.

    tests, parts --JSON lines--> record next to the report --after each part--> report

The report is made from the record, to which a run with `--slice` adds.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
REQUIRED = {
    "torch": "launch/requirements-gpu.txt",
    "megatron.core": "launch/requirements-gpu.txt",
    "transformers": "launch/requirements-gpu.txt",
    "pydantic": "launch/requirements-gpu.txt",
    "pytest": "pytest pytest-timeout hypothesis",
    "pytest_timeout": "pytest pytest-timeout hypothesis",
    "hypothesis": "pytest pytest-timeout hypothesis",
}
"""Modules without which no part runs, and what installs them."""
DOCTOR, COLLECTION = "doctor", "collection"
SLICES = {
    "devices": ("test_devices", 20),
    # What has not run on a GPU yet, as docs/gpu_differences.md lists it.
    "vllm": ("test_engine_jobs.*vllm", 150),
    "sglang-repeated": ("test_jobs.*deterministic_job_with_sglang", 175),
    "quickstart": ("test_jobs.*quickstart", 120),
    "int4": ("test_engine_jobs.*int4", 150),
    "torch-native": ("test_engine_jobs.*torch_native", 100),
    "fsdp-rows": ("test_fsdp.*(of_packed_rows|rows_with_images)", 45),
    # What users do first.
    "jobs": ("test_jobs.*(sft|gkd|fsdp)", 150),
    "jobs-sglang": ("test_jobs.*with_sglang", 130),
    "jobs-repeated": ("test_jobs.*(run_twice|resumed)", 135),
    "jobs-killed": ("test_jobs.*killed", 150),
    "sleep": ("test_engine[.]py", 120),
    "sglang": ("test_engine_jobs.*colocated", 150),
    "float32": ("test_engine_jobs.*float32", 100),
    "adapters": ("test_engine_jobs.*adapters", 155),
    "fp8": ("test_engine_jobs.*fp8", 145),
    "layouts": ("test_layouts.*float32.*-tp1-", 75),
    "layouts-bfloat16": ("test_layouts.*bfloat16", 90),
    "layouts-te": ("test_layouts.*transformer_engine", 130),
    "prefixes-te": ("test_shared_prefixes.*transformer_engine", 75),
    "layouts-two": ("test_layouts.*float32.*-(tp2|cp2|ep2|pp2-vpp3|tp2-ep2-etp1)-(True|False)", 165),
    "layouts-more": ("test_layouts.*float32", 130),
    "memory": ("test_(memory|handover|host_waits)", 110),
    "fsdp-float32": ("test_fsdp.*updates_in_float32", 85),
    "fsdp-bfloat16": ("test_fsdp.*updates_in_bfloat16", 115),
    "prefixes": ("test_shared_prefixes", 130),
    "reshard": ("test_reshard", 110),
    "others": ("", 170),
}
"""Tests of a slice, by the first expression that is found in a name, and the seconds that it is expected to take."""
BENCH = {
    "bench": (("device", "kept"), 130),
    "bench-vocabulary": (("vocabulary",), 60),
    "bench-recomputed": (("recomputed", "torch"), 175),
    "bench-rollout": (("rollout",), 150),
}
"""Parts of tools/bench/bench_gpu.py in a slice, and expected seconds."""
MEET = "gpu/test_devices.py::test_ranks_meet_on_their_devices"
HANGS_S = 1800.0
"""Seconds after which a part is ended in any case; its tests have shorter limits."""
NOT_STARTED, NOT_ENDED = "not started", "did not end"  # outcomes of parts and tests, and of tests
TOO_LONG, OUT_OF_TIME = "took too long", "ended by --limit"  # of parts


@dataclass(frozen=True)
class Part:
    """One program of the suite."""

    name: str
    """Name in the report, and for --slice."""
    command: Sequence[str]
    """Arguments of Python."""
    expected_s: float = 0.0
    """Seconds that it is expected to take on a GPU; where less is left it is not started."""
    document: Path | None = None
    """Markdown that it writes for the report."""


@dataclass(frozen=True)
class Ended:
    """Outcome of one part of the suite."""

    part: Part
    outcome: str
    """"passed", "failed", or that it was ended."""
    seconds: float
    """Duration."""
    log: str
    """Its standard output."""

    @property
    def shown(self) -> str:
        """Section of the report about it, as Markdown."""
        if self.part.document and self.part.document.exists():
            return re.sub(r"^#", "##", self.part.document.read_text(encoding="utf-8"), flags=re.MULTILINE)
        return f"## verl-mg doctor\n\n```text\n{self.log.strip()}\n```\n" if self.part.name == DOCTOR else ""


class Record:
    """File of JSON lines: each test appends two, the suite one for each part; the last line of a name counts."""

    def __init__(self, file: Path, append: bool) -> None:
        """Begins a new file unless it is to `append`."""
        self.file = file
        file.parent.mkdir(parents=True, exist_ok=True)
        if not append:
            file.unlink(missing_ok=True)
        elif file.exists():  # a line that was cut off would take in the next one
            text = file.read_bytes()
            os.truncate(file, text.rfind(b"\n") + 1)

    def add(self, line: Mapping[str, Any], replaces: bool = True) -> None:
        """Appends the line of a "part" or of a test with a "name", also where there is one already if it `replaces`."""
        known = {} if replaces else self.parts() | self.tests()
        if line.get("part", line.get("name")) not in known:
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def parts(self) -> dict[str, dict[str, Any]]:
        """Returns {name of the part: line}."""
        return last_lines(self.file, "part")

    def tests(self) -> dict[str, dict[str, Any]]:
        """Returns {name of the test: line}."""
        return last_lines(self.file, "name")


def last_lines(file: Path, key: str) -> dict[str, dict[str, Any]]:
    """Returns the last line with each value of the key, in the order of the first ones."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return {line[key]: line for line in lines if key in line}


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 1 if a part failed, 2 if the suite cannot run, otherwise 0."""
    deadline, options = time.monotonic(), _options(arguments)
    deadline += options.limit
    if problem := missing():
        print(f"error: {problem}", file=sys.stderr)
        return 2
    nodes = int(os.environ.get("NODES", "1"))
    with tempfile.TemporaryDirectory(prefix="test-gpu-") as folder:
        machine, versions = described()
        output = options.output or default_output(machine["gpus"], nodes)
        # Nodes may have the folder of the report in common; only that of rank 0 has tests to report.
        file = output.with_suffix(".jsonl") if nodes == 1 else Path(folder) / "record.jsonl"
        record = Record(file, append=bool(options.slice))

        def write_report() -> None:
            if nodes == 1 or record.tests():
                output.parent.mkdir(parents=True, exist_ok=True)
                output.write_text(report(machine, versions, nodes, options.rehearse, record), encoding="utf-8")

        suite = Suite(record, deadline, len(machine["gpus"]), write_report)
        # As Ctrl-C, the signal of `timeout` and of job schedulers ends the part that runs.
        before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        try:
            if nodes > 1:
                suite.run(node_parts(file, nodes))
            else:
                suite.run(one_node_parts(options, suite, Path(folder), len(machine["gpus"])))
        finally:
            signal.signal(signal.SIGTERM, before)
            write_report()
        if output.exists():
            print(f"report: {output}", flush=True)
    return 1 if suite.failed else 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    epilog = "--stack PIECES, also an option: unpacks the pieces of tools/install/bare_stack.sh, and uses them."
    parser = argparse.ArgumentParser(prog="tools/test_gpu.sh", description=__doc__.splitlines()[0], epilog=epilog)
    parser.add_argument("--output", type=Path, help="file of the report (default: benchmarks/GPU-COUNT/test_gpu.md)")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with small sizes; GPUs are not used")
    text = "with the wheels of tools/install/bare_wheels.sh; without the slice doctor, which checks versions"
    parser.add_argument("--bare", action="store_true", help=text)
    text = "seconds after which the suite ends; slices that are expected to take longer are not started"
    parser.add_argument("--limit", type=float, default=float("inf"), metavar="SECONDS", help=text)
    names = (DOCTOR, *SLICES, *BENCH)
    text = "only this part of one node's (repeatable); a report that is there keeps its others: %(choices)s"
    parser.add_argument("--slice", action="append", choices=names, metavar="NAME", help=text)
    parser.add_argument("-k", dest="selected", default="", help="expression of pytest that selects tests")
    options = parser.parse_args(arguments)
    if options.bare and options.slice and DOCTOR in options.slice:
        parser.error(f"--slice {DOCTOR}: it checks versions, which --bare does not. Leave one of them out.")
    if options.rehearse:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        options.output = options.output or ROOT / "runs" / "test_gpu.md"
    return options


def missing() -> str | None:
    """Returns what cannot be imported and how to install it; None if all parts can run."""
    for module, remedy in REQUIRED.items():
        try:
            spec = importlib.util.find_spec(module)
        except ModuleNotFoundError:  # of a package above it
            spec = None
        if spec is None:
            files = "--no-deps -r " if remedy.endswith(".txt") else ""
            return f"{module} is not installed for {sys.executable}. Run: pip install {files}{remedy}"
    return None


def described() -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the machine and the versions, asked in a process that does not keep memory of the GPU."""
    code = (
        "import json; from verl_mg.doctor import describe_machine as m; "
        "from verl_mg.doctor import installed_versions as v; print(json.dumps([m(), v()]))"
    )
    printed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    machine, versions = json.loads(printed.stdout.splitlines()[-1])
    return machine, versions


def one_node_parts(options: argparse.Namespace, suite: Suite, folder: Path, gpus: int) -> list[Part]:
    """Returns the parts for one node; tests of a slice are those that the collection finds and this machine can run."""
    parts = []
    if not options.bare:
        doctor = launched(["--standalone", "--nproc-per-node", str(max(gpus, 1))], ["-m", "verl_mg", "doctor"])
        parts.append(Part(DOCTOR, doctor, 30))
    if not options.slice or set(options.slice) & SLICES.keys():
        parts += slices(suite, folder / "collected.jsonl", options.selected)
    small = ["--tiny", "--repeats", "1"] if options.rehearse else []
    for name, (measured, expected_s) in BENCH.items():
        document = folder / f"{name}.md"
        chosen = [word for part in measured for word in ("--part", part)]
        command = ["-m", "tools.bench.bench_gpu", "--output", str(document), *chosen, *small]
        parts.append(Part(name, command, expected_s, document))
    return [part for part in parts if not options.slice or part.name in options.slice]


def slices(suite: Suite, file: Path, selected: str) -> list[Part]:
    """Collects the tests, records those that this machine cannot run, and returns the slices of the others."""
    pytest = ["-m", "pytest", "tests/gpu", "-m", "gpu", "-k", selected, "-q", "--collect-only", "--outcomes", str(file)]
    suite.run([Part(COLLECTION, pytest)])
    tests: dict[str, list[str]] = {name: [] for name in SLICES}
    for name, line in last_lines(file, "name").items():
        suite.record.add(line, replaces=False)
        if line["outcome"] == NOT_STARTED:
            tests[slice_of(name)].append(f"tests/{name}")
    pytest = ["-m", "pytest", "-m", "gpu", "-rs", "--outcomes", str(suite.record.file)]
    return [Part(name, [*pytest, *tests[name]], SLICES[name][1]) for name in SLICES if tests[name]]


def slice_of(test: str) -> str:
    """Returns the name of a test's slice."""
    return next(name for name, (expression, _) in SLICES.items() if re.search(expression, test))


def node_parts(record: Path, nodes: int) -> list[Part]:
    """Returns the parts for several nodes; each meets at another port, because the last one's may still be in use."""
    host, _, port = os.environ.get("RENDEZVOUS", "").rpartition(":")
    if not host or not port.isdigit():
        sys.exit("error: several nodes need RENDEZVOUS=HOST:PORT, where HOST is one of them")
    programs = {DOCTOR: ["-m", "verl_mg", "doctor"], "nodes": ["-m", "tests.gpu.nodes", str(record)]}
    parts = []
    for number, (name, program) in enumerate(programs.items()):
        place = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{host}:{int(port) + number}"]
        place += ["--rdzv-id", f"{os.environ.get('JOB', 'test_gpu')}-{number}"]
        ranks = ["--nnodes", str(nodes), "--nproc-per-node", os.environ.get("RANKS", "auto")]
        parts.append(Part(name, launched([*ranks, *place], program)))
    return parts


def launched(options: Sequence[str], program: Sequence[str]) -> list[str]:
    """Returns the arguments of Python for a program on several ranks."""
    return ["-m", "verl_mg.launch", *options, *program]


class Suite:
    """Runs parts one after the other until a deadline, and writes the report after each."""

    def __init__(self, record: Record, deadline: float, gpus: int, write_report: Callable[[], None]) -> None:
        """`deadline` is a time of time.monotonic()."""
        self.record, self.failed = record, False
        self._deadline, self._gpus, self._write_report = deadline, gpus, write_report

    def run(self, parts: Sequence[Part]) -> None:
        """Runs the parts; one that is expected to take longer than what is left is named as not started."""
        for part in parts:
            self.record.add({"part": part.name, "outcome": NOT_STARTED, "seconds": 0.0, "shown": ""}, replaces=False)
        for part in parts:
            left = self._deadline - time.monotonic()
            if left <= part.expected_s:
                print(f"== {part.name}: {NOT_STARTED}, {part.expected_s:.0f} s expected", flush=True)
                continue
            ended = run(self._with_ranks_that_meet(part), min(left, HANGS_S))
            outcome = OUT_OF_TIME if ended.outcome == TOO_LONG and left < HANGS_S else ended.outcome
            print(f"== {part.name}: {outcome}", flush=True)
            line = {"part": part.name, "outcome": outcome, "seconds": ended.seconds, "shown": ended.shown}
            self.record.add(line)
            self._write_report()
            self.failed |= outcome in ("failed", TOO_LONG)

    def _with_ranks_that_meet(self, part: Part) -> Part:
        """Returns the part with no more ranks than GPUs if ranks could not share one."""
        met = self.record.tests().get(MEET, {}).get("outcome") not in ("failed", NOT_ENDED)
        if met or not self._gpus or "pytest" not in part.command:
            return part
        return replace(part, command=[*part.command, "--most-ranks", str(self._gpus)])


def run(part: Part, limit_s: float) -> Ended:
    """Runs a part, shows what it prints, and ends it with all its processes where it takes too long."""
    print(f"== {part.name}", flush=True)
    started, lines = time.monotonic(), []
    process = subprocess.Popen(
        [os.environ.get("PYTHON_EXEC", sys.executable), *part.command],  # the variable of torchrun
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    late = threading.Event()
    timer = threading.Timer(limit_s, lambda: (late.set(), _kill(process.pid)))
    timer.start()
    assert process.stdout
    try:
        for line in process.stdout:
            lines.append(line)
            print(line, end="", flush=True)
        code = process.wait()
    finally:
        timer.cancel()
        if process.poll() is None:  # the suite is interrupted, and its part would not be: it is in another session
            _kill(process.pid)
    outcome = TOO_LONG if late.is_set() else "failed" if code else "passed"
    return Ended(part, outcome, time.monotonic() - started, "".join(lines))


def _kill(pid: int) -> None:
    """Kills a process and all below it: the launcher starts its ranks in separate sessions."""
    import psutil

    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in [*process.children(recursive=True), process]:
            with suppress(psutil.NoSuchProcess):
                each.kill()


# -- the report


def default_output(gpus: Sequence[str], nodes: int) -> Path:
    """Returns the file of the report for this hardware, such as benchmarks/nvidia-h200-141-gib-8/test_gpu.md."""
    name = re.sub(r"[^a-z0-9]+", "-", gpus[0].lower()).strip("-") if gpus else "cpu"
    across = f"-nodes-{nodes}" if nodes > 1 else ""
    return ROOT / "benchmarks" / f"{name}-{max(len(gpus), 1)}{across}" / "test_gpu.md"


def report(machine: Mapping[str, Any], versions: Mapping[str, str], nodes: int, rehearsed: bool, record: Record) -> str:
    """Returns the report as Markdown."""
    hardware = "\n".join(f"- {line}" for line in _hardware(machine, versions, nodes))
    lines, tests = record.parts().values(), record.tests()
    parts = _table(("part", "outcome", "seconds"), ((p["part"], p["outcome"], f"{p['seconds']:.0f}") for p in lines))
    rows = [
        (name.removeprefix("gpu/"), test["outcome"], f"{test['seconds']:.1f}", test["reason"])
        for name, test in tests.items()
    ]
    counted = Counter(test["outcome"] for test in tests.values())
    kinds = ("passed", "failed", "skipped", NOT_ENDED, NOT_STARTED)
    counts = ", ".join(f"{counted[kind]} {kind}" for kind in kinds)
    title = "# Rehearsal on the CPU: nothing here ran on a GPU" if rehearsed else "# Tests and measurements on GPUs"
    table = _table(("test", "outcome", "seconds", "reason"), rows)
    shown = "".join(f"\n{part['shown']}" for part in lines if part["shown"])
    return f"{title}\n\n{hardware}\n\n{parts}\n## Tests\n\n{counts}\n\n{table}{shown}"


def _hardware(machine: Mapping[str, Any], versions: Mapping[str, str], nodes: int) -> Iterator[str]:
    gpus = machine["gpus"]
    yield f"{f'{nodes} nodes with ' if nodes > 1 else ''}{len(gpus)} GPUs{f': {gpus[0]}' if gpus else ''}"
    yield f"driver {machine['driver'] or 'none'}, {os.cpu_count()} cores"
    yield ", ".join(f"{name} {version}" for name, version in versions.items())
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    yield f"{datetime.now(UTC):%Y-%m-%d}, commit {commit.stdout.strip() or 'unknown'}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
