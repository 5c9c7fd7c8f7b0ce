"""The suite for GPUs: rehearsals on the CPU, and what its report says of parts that fail or hang."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.helpers import warm_start
from tools import gpu_suite as suite

SCRIPT = suite.ROOT / "tools" / "test_gpu.sh"
MACHINE = {"gpus": ["NVIDIA H200 140 GiB"] * 8, "driver": "580.65"}
HANGS = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(9999)'], "
HANGS += "start_new_session=True); print('begun', flush=True); time.sleep(9999)"


def rehearse(output: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SCRIPT), "--rehearse", "--output", str(output), *options]
    return subprocess.run(command, capture_output=True, text=True, env=environment() | variables)


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return os.environ | warm_start.shared().environment | {"OMP_NUM_THREADS": "1", "PATH": path}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def rows_of(report: str) -> dict[str, list[str]]:
    """{first cell: the others} of all tables."""
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in report.splitlines() if line[:1] == "|"]
    return {row[0]: row[1:] for row in rows}


def test_rehearsal_of_selected_tests_writes_their_outcomes(tmp_path):
    selected = "two_devices and tp2-pp2 or expandable or (payload and True)"
    done = rehearse(tmp_path / "new" / "report.md", "--part", "tests/gpu", "-k", selected)
    report = (tmp_path / "new" / "report.md").read_text()
    assert done.returncode == 0, done.stdout + done.stderr
    assert report.startswith("# Rehearsal on the CPU: nothing here ran on a GPU\n\n- 0 GPUs\n- driver none")
    rows = rows_of(report)
    assert rows["tests/gpu"][0] == "passed"
    assert rows["test_reshard.py::test_reshard_between_two_devices_is_bitwise_equal[tp2-pp2]"][0] == "passed"
    (skipped,) = (row for name, row in rows.items() if "test_handover" in name)
    assert skipped[0] == "skipped" and skipped[2] == "expandable segments are of the allocator for GPUs"
    assert "1 passed, 0 failed, 1 skipped, 0 did not end" in report


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_rehearsal_of_whole_suite_passes(tmp_path):
    done = rehearse(tmp_path / "report.md")
    report = (tmp_path / "report.md").read_text()
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr
    rows = rows_of(report)
    assert all(rows[part][0] == "passed" for part in suite.PARTS)
    skipped = {name: row[2] for name, row in rows.items() if len(row) == 3 and row[0] == "skipped"}
    no_transformer_engine = "no GPU, or Transformer Engine is not installed"
    assert len(skipped) == 14 and set(skipped.values()) <= {
        *("there is no GPU", "expandable segments are of the allocator for GPUs", no_transformer_engine),
        "tests/roles has such a job with engines on the CPU",
    }
    assert sum(reason == no_transformer_engine for reason in skipped.values()) == 9
    for text in ("## verl-mg doctor", "## One device: qwen3_1_7b, tiny", "in an update: ", "offload to the host"):
        assert text in report, text
    assert re.search(r"\d\d+ passed, 0 failed, 14 skipped, 0 did not end", report)


@pytest.mark.nightly
def test_rehearsal_of_two_nodes_moves_weights_and_trains_across_them(tmp_path):
    place = {"NODES": "2", "RANKS": "2", "RENDEZVOUS": f"127.0.0.1:{free_port()}", "JOB": "rehearsal"}
    nodes = [
        subprocess.Popen(
            ["bash", str(SCRIPT), "--rehearse", "--output", str(tmp_path / f"{node}.md")],
            # Nodes are numbered by their addresses.
            env=environment() | place | {"PET_LOCAL_ADDR": f"127.0.0.{1 + node}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    printed = [node.communicate()[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(printed)
    (report,) = (file.read_text() for file in tmp_path.glob("*.md"))
    rows = rows_of(report)
    assert rows["verl-mg doctor"][0] == rows["tests/gpu/nodes.py"][0] == "passed"
    assert rows["weights from first node to last node"][0] == rows["SFT job"][0] == "passed"
    assert "4 ranks on 1 node" in report and "8 passed, 0 failed" in report


def test_part_that_hangs_is_ended_with_its_processes():
    before = set(psutil.Process().children(recursive=True))
    ended = suite.run(suite.Part("hangs", ["-c", HANGS], 2.0))
    assert (ended.outcome, ended.log) == ("took too long", "begun\n")
    assert not set(psutil.Process().children(recursive=True)) - before


def test_report_counts_failed_and_unfinished_tests(tmp_path):
    file = tmp_path / "outcomes"
    lines = [("one", suite.NOT_ENDED), ("one", "failed"), ("two", suite.NOT_ENDED)]
    tests = [{"name": name, "outcome": outcome, "seconds": 1.0, "reason": "a | b"} for name, outcome in lines]
    file.write_text("".join(json.dumps(test) + "\n" for test in tests))
    found = suite.outcomes(file)
    assert [(test["name"], test["outcome"]) for test in found] == [("one", "failed"), ("two", suite.NOT_ENDED)]
    assert suite.failed(found) and not suite.failed([]) and suite.outcomes(tmp_path / "none") == []
    part = suite.Part("verl-mg doctor", [], 1.0)
    report = suite.report(
        MACHINE, {"NCCL": "2.30.7"}, 2, False, [suite.Ended(part, "failed", 3.0, "ill")], found, "# B\n"
    )
    assert "- 2 nodes with 8 GPUs: NVIDIA H200 140 GiB\n- driver 580.65" in report and "- NCCL 2.30.7\n" in report
    assert "0 passed, 1 failed, 0 skipped, 1 did not end" in report and "| one | failed | 1.0 | a \\| b |" in report
    assert "| verl-mg doctor | failed | 3 |" in report and "```text\nill\n```" in report and "\n## B\n" in report


def test_default_output_names_hardware():
    assert suite.default_output(MACHINE["gpus"], 1) == suite.ROOT / "benchmarks/nvidia-h200-140-gib-8/test_gpu.md"
    assert suite.default_output(MACHINE["gpus"], 2).parent.name == "nvidia-h200-140-gib-8-nodes-2"


def test_suite_without_requirement_names_it_and_its_installation(monkeypatch):
    assert suite.missing() is None
    monkeypatch.setattr(suite, "REQUIRED", {"torch": "launch/requirements-gpu.txt", "no.such": "such"})
    assert suite.missing() == f"no.such is not installed for {sys.executable}. Run: pip install such"


def test_quick_suite_measures_before_it_tests():
    files = {name: Path(name) for name in ("outcomes", "bench.md")}
    parts = suite.one_node_parts(suite._options(["--quick"]), files, 1)
    assert [part.name for part in parts] == ["verl-mg doctor", "tools/bench/bench_gpu.py", "tests/gpu"]
