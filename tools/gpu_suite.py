"""Runs all tests for GPUs, each part with a time limit, and writes one report; see tools/test_gpu.sh.

One node: `verl-mg doctor`, the tests of tests/gpu, tools/bench/bench_gpu.py. Several nodes: `verl-mg doctor` and
tests/gpu/nodes.py over all of them. A part that fails does not end the suite.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
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
QUICK = "meet or dense-tp1 or mixture-tp1 or latent-tp1 or two_devices or silent or payload or offload or waits"
"""Tests for a short lease of one GPU."""
PARTS = ("verl-mg doctor", "tests/gpu", "tools/bench/bench_gpu.py")
NOT_ENDED = "did not end"


@dataclass(frozen=True)
class Part:
    """One program of the suite with its limit."""

    name: str
    """Name in the report."""
    command: Sequence[str]
    """Arguments of Python."""
    limit_s: float
    """Seconds after which it is ended."""


@dataclass(frozen=True)
class Ended:
    """Outcome of one part of the suite."""

    part: Part
    outcome: str
    """"passed", "failed" or "took too long"."""
    seconds: float
    """Duration."""
    log: str
    """Its standard output."""


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 1 if a part failed, 2 if the suite cannot run, otherwise 0."""
    options = _options(arguments)
    if problem := missing():
        print(f"error: {problem}", file=sys.stderr)
        return 2
    nodes = int(os.environ.get("NODES", "1"))
    with tempfile.TemporaryDirectory(prefix="test-gpu-") as folder:
        machine, versions = described()
        files = {name: Path(folder) / name for name in ("outcomes", "bench.md")}
        parts = node_parts(files, nodes) if nodes > 1 else one_node_parts(options, files, len(machine["gpus"]))
        ended = [run(part) for part in parts]
        tests = outcomes(files["outcomes"])
        bench = files["bench.md"].read_text(encoding="utf-8") if files["bench.md"].exists() else ""
        writes = nodes == 1 or files["outcomes"].exists()
    if writes:
        output = options.output or default_output(machine["gpus"], nodes)
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(report(machine, versions, nodes, options.rehearse, ended, tests, bench), encoding="utf-8")
        print(f"report: {output}", flush=True)
    return 1 if any(each.outcome != "passed" for each in ended) or failed(tests) else 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools/test_gpu.sh", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="file of the report (default: benchmarks/GPU-COUNT/test_gpu.md)")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with small sizes; GPUs are not used")
    parser.add_argument("--quick", action="store_true", help="a selection for eight minutes on one GPU")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part of one node's (repeatable)")
    parser.add_argument("-k", dest="selected", default="", help="expression of pytest that selects tests")
    options = parser.parse_args(arguments)
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


def one_node_parts(options: argparse.Namespace, files: Mapping[str, Path], gpus: int) -> list[Part]:
    """Returns the parts for one node; the bench comes first where time is short."""
    selected = " and ".join(f"({text})" for text in (options.selected, QUICK if options.quick else "") if text)
    small = ["--tiny", "--repeats", "1"] if options.rehearse else ["--repeats", "3"] if options.quick else []
    doctor = launched(["--standalone", "--nproc-per-node", str(max(gpus, 1))], ["-m", "verl_mg", "doctor"])
    tests = ["-m", "pytest", "tests/gpu", "-m", "gpu", "-rs", "--outcomes", str(files["outcomes"]), "-k", selected]
    bench = ["-m", "tools.bench.bench_gpu", "--output", str(files["bench.md"]), *small]
    parts = [
        Part(name, command, limit_s)
        for name, command, limit_s in zip(PARTS, (doctor, tests, bench), (300, 3600, 1800), strict=True)
        if name in (options.part or PARTS)
    ]
    return sorted(parts, key=lambda part: part.name == "tests/gpu") if options.quick else parts


def node_parts(files: Mapping[str, Path], nodes: int) -> list[Part]:
    """Returns the parts for several nodes; each meets at another port, because the last one's may still be in use."""
    host, _, port = os.environ.get("RENDEZVOUS", "").rpartition(":")
    if not host or not port.isdigit():
        sys.exit("error: several nodes need RENDEZVOUS=HOST:PORT, where HOST is one of them")
    programs = {
        "verl-mg doctor": ["-m", "verl_mg", "doctor"],
        "tests/gpu/nodes.py": ["-m", "tests.gpu.nodes", str(files["outcomes"])],
    }
    parts = []
    for number, (name, program) in enumerate(programs.items()):
        place = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{host}:{int(port) + number}"]
        place += ["--rdzv-id", f"{os.environ.get('JOB', 'test_gpu')}-{number}"]
        ranks = ["--nnodes", str(nodes), "--nproc-per-node", os.environ.get("RANKS", "auto")]
        parts.append(Part(name, launched([*ranks, *place], program), 900))
    return parts


def launched(options: Sequence[str], program: Sequence[str]) -> list[str]:
    """Returns the arguments of Python for a program on several ranks."""
    return ["-m", "verl_mg.launch", *options, *program]


def run(part: Part) -> Ended:
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
    timer = threading.Timer(part.limit_s, lambda: (late.set(), _kill(process.pid)))
    timer.start()
    assert process.stdout
    for line in process.stdout:
        lines.append(line)
        print(line, end="", flush=True)
    code = process.wait()
    timer.cancel()
    outcome = "took too long" if late.is_set() else "failed" if code else "passed"
    print(f"== {part.name}: {outcome}", flush=True)
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


def outcomes(file: Path) -> list[dict[str, Any]]:
    """Returns the last line of each test, in the order in which they started."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return list({test["name"]: test for test in map(json.loads, lines)}.values())


def failed(tests: Iterable[Mapping[str, Any]]) -> bool:
    """Returns whether a test failed, or did not end."""
    return any(test["outcome"] in ("failed", NOT_ENDED) for test in tests)


def default_output(gpus: Sequence[str], nodes: int) -> Path:
    """Returns the file of the report for this hardware, such as benchmarks/nvidia-h200-141-gib-8/test_gpu.md."""
    name = re.sub(r"[^a-z0-9]+", "-", gpus[0].lower()).strip("-") if gpus else "cpu"
    across = f"-nodes-{nodes}" if nodes > 1 else ""
    return ROOT / "benchmarks" / f"{name}-{max(len(gpus), 1)}{across}" / "test_gpu.md"


def report(
    machine: Mapping[str, Any],
    versions: Mapping[str, str],
    nodes: int,
    rehearsed: bool,
    ended: Sequence[Ended],
    tests: Sequence[Mapping[str, Any]],
    bench: str,
) -> str:
    """Returns the report as Markdown."""
    hardware = "\n".join(f"- {line}" for line in _hardware(machine, versions, nodes))
    parts = _table(("part", "outcome", "seconds"), ((e.part.name, e.outcome, f"{e.seconds:.0f}") for e in ended))
    rows = [
        (test["name"].removeprefix("gpu/"), test["outcome"], f"{test['seconds']:.1f}", test["reason"]) for test in tests
    ]
    counts = ", ".join(f"{_count(tests, kind)} {kind}" for kind in ("passed", "failed", "skipped", NOT_ENDED))
    title = "# Rehearsal on the CPU: nothing here ran on a GPU" if rehearsed else "# Tests and measurements on GPUs"
    logs = "".join(f"\n## {e.part.name}\n\n```text\n{e.log.strip()}\n```\n" for e in ended if "doctor" in e.part.name)
    table = _table(("test", "outcome", "seconds", "reason"), rows)
    demoted = re.sub(r"^#", "##", bench, flags=re.MULTILINE)
    return f"{title}\n\n{hardware}\n\n{parts}\n## Tests\n\n{counts}\n\n{table}{logs}\n{demoted}"


def _hardware(machine: Mapping[str, Any], versions: Mapping[str, str], nodes: int) -> Iterator[str]:
    gpus = machine["gpus"]
    yield f"{f'{nodes} nodes with ' if nodes > 1 else ''}{len(gpus)} GPUs{f': {gpus[0]}' if gpus else ''}"
    yield f"driver {machine['driver'] or 'none'}, {os.cpu_count()} cores"
    yield ", ".join(f"{name} {version}" for name, version in versions.items())
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    yield f"{datetime.now(UTC):%Y-%m-%d}, commit {commit.stdout.strip() or 'unknown'}"


def _count(tests: Iterable[Mapping[str, Any]], outcome: str) -> int:
    return sum(test["outcome"] == outcome for test in tests)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
