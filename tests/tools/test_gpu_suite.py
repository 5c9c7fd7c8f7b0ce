"""The suite for GPUs: rehearsals on the CPU, and what its report says of parts that fail or hang."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from tests.helpers import fake_cuda, warm_start
from tests.helpers.machine import Machine
from tools import gpu_suite as suite

SCRIPT, INSTALL = suite.ROOT / "tools" / "test_gpu.sh", suite.ROOT / "tools" / "install"
TEST = {"outcome": "passed", "seconds": 1.0, "reason": "a | b"}
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


@pytest.mark.nightly
def test_rehearsal_of_a_slice_writes_outcomes_and_names_the_other_tests(tmp_path):
    selected = ("--slice", "memory", "-k", "not (offload and fsdp)")
    done = rehearse(tmp_path / "new" / "report.md", *selected, PYTEST_ADDOPTS="--most-ranks 2")
    report = (tmp_path / "new" / "report.md").read_text()
    assert done.returncode == 0, done.stdout + done.stderr
    assert report.startswith("# Rehearsal on the CPU: nothing here ran on a GPU\n\n- 0 GPUs\n- driver none")
    rows = rows_of(report)
    assert rows["memory"][0] == rows["collection"][0] == "passed"
    handover = "test_handover.py::test_payload_opened_by_another_process_is_the_same_memory"
    assert rows[f"{handover}[False]"][0] == "passed"
    assert rows[f"{handover}[True]"] == ["skipped", "0.0", "there is no GPU"]
    assert rows["test_reshard.py::test_reshard_between_two_devices_is_bitwise_equal[tp2-pp2]"][0] == "not started"
    for test, ranks in (
        ("test_reshard.py::test_reshard_with_silent_ranks_ends", 3),
        ("test_layouts.py::test_train_in_float32_on_devices_equals_transformers[tied-tp2-pp2-False]", 4),
        ("test_fsdp.py::test_updates_in_bfloat16_on_devices_are_near_transformers[dense-cp2-dp2-4-options6]", 4),
    ):
        assert rows[test] == ["skipped", "0.0", f"{ranks} ranks: --most-ranks 2"]
    assert re.search(r"\n3 passed, 0 failed, \d+ skipped, 0 did not end, \d+ not started\n", report)
    assert "offload_of_role_returns_its_memory_to_the_device[fsdp]" not in report
    tests = suite.Record(tmp_path / "new" / "report.jsonl", append=True).tests()
    used = {suite.slice_of(test) for test in tests}
    assert used == suite.SLICES.keys() - {"others"}


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_rehearsal_of_whole_suite_passes(tmp_path):
    done = rehearse(tmp_path / "report.md")
    report = (tmp_path / "report.md").read_text()
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr
    rows = rows_of(report)
    assert rows[suite.DOCTOR][0] == rows["layouts"][0] == "passed"
    assert all(rows[name][0] == "passed" for name in suite.BENCH)
    skipped = {name: row[2] for name, row in rows.items() if len(row) == 3 and row[0] == "skipped"}
    assert len(skipped) == 22 and set(skipped.values()) == {"there is no GPU"}
    for text in ("## verl-mg doctor", "## One device: qwen3_1_7b, tiny", "in an update: ", "offload to the host"):
        assert text in report, text
    assert re.search(r"\d\d+ passed, 0 failed, 22 skipped, 0 did not end, 0 not started", report)


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_rehearsal_on_a_bare_machine_runs_what_needs_no_further_package(tmp_path):
    """An environment with torch 2.11, transformers 5.17 and no registry: what is carried there are a dozen wheels."""
    own = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHON_EXEC")
    }
    for command in (["bare_machine.sh", str(tmp_path / "machine")], ["bare_wheels.sh"]):
        made = subprocess.run(
            ["bash", str(INSTALL / command[0]), *command[1:]], capture_output=True, text=True, env=own
        )
        assert made.returncode == 0, made.stderr
    bare = own | {"PATH": f"{tmp_path / 'machine' / 'bin'}:{own['PATH']}", "PIP_NO_INDEX": "1"}
    command = ["bash", str(SCRIPT), "--bare", "--rehearse", "--output", str(tmp_path / "report.md")]
    done = subprocess.run(command, capture_output=True, text=True, env=bare)
    report = (tmp_path / "report.md").read_text()
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr
    assert "torch 2.11.0" in report and "transformer-engine none" in report and suite.DOCTOR not in rows_of(report)
    skipped = {row[2] for row in rows_of(report).values() if len(row) == 3 and row[0] == "skipped"}
    assert skipped == {
        "there is no GPU",
        "SGLang is not installed; run bash tools/install/sglang_cpu.sh",
        "vLLM is not installed; run bash tools/install/vllm_cpu.sh",
    }
    counts = re.search(r"\n(\d+) passed, 0 failed, (\d+) skipped, 0 did not end, 0 not started\n", report)
    assert counts and int(counts[1]) > 80, report


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
    assert rows[suite.DOCTOR][0] == rows["nodes"][0] == "passed"
    assert rows["weights from first node to last node"][0] == rows["SFT job"][0] == "passed"
    assert "4 ranks on 1 node" in report and "8 passed, 0 failed" in report


def test_part_that_hangs_is_ended_with_its_processes():
    before = set(psutil.Process().children(recursive=True))
    ended = suite.run(suite.Part("hangs", ["-c", HANGS]), 2.0)
    assert (ended.outcome, ended.log) == ("took too long", "begun\n")
    assert not set(psutil.Process().children(recursive=True)) - before


INTERRUPTED = f"""
import signal, sys
from tools import gpu_suite as suite
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started the tests with it ignored
suite.described = lambda: ({MACHINE!r}, {{}})
suite.one_node_parts = lambda *_: [suite.Part("hangs", ["-c", {HANGS!r}])]
sys.exit(suite.main(["--output", sys.argv[1]]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_suite_that_is_interrupted_ends_its_part_and_writes_the_report(tmp_path, number):
    program = [sys.executable, "-c", INTERRUPTED, str(tmp_path / "report.md")]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout and any(line == "begun\n" for line in process.stdout)
            below = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(number)
            assert process.wait(30) != 0
        finally:
            process.kill()
    _, left = psutil.wait_procs(below, timeout=10)
    for one in left:
        one.kill()
    assert len(below) == 2 and left == []
    assert rows_of((tmp_path / "report.md").read_text())["hangs"][0] == "not started"


@pytest.fixture
def outputs(tmp_path, monkeypatch) -> Callable[..., tuple[int, dict[str, list[str]]]]:
    """A function: options -> exit code and rows of the report, of a suite whose parts are programs of one line."""
    monkeypatch.setattr(suite, "described", lambda: (MACHINE, {"NCCL": "2.30.7"}))
    programs = {"doctor": "print('well')", "devices": "import sys; sys.exit(FAILS)", "reshard": HANGS, "memory": HANGS}

    def run(*options: str, fails: int = 0) -> tuple[int, dict[str, list[str]]]:
        def parts(options: Namespace, *_: object) -> list[suite.Part]:
            commands = {name: ["-c", program.replace("FAILS", str(fails))] for name, program in programs.items()}
            # `reshard` is expected to take too long.
            made = [suite.Part(name, command, 1e5 * (name == "reshard")) for name, command in commands.items()]
            return [part for part in made if part.name in (options.slice or programs)]

        monkeypatch.setattr(suite, "one_node_parts", parts)
        code = suite.main(["--output", str(tmp_path / "report.md"), *options])
        return code, rows_of((tmp_path / "report.md").read_text())

    return run


def outcomes(rows: dict[str, list[str]]) -> list[str]:
    return [rows[name][0] for name in ("doctor", "devices", "reshard", "memory")]


def test_suite_that_is_out_of_time_names_the_rest_and_a_slice_that_is_run_later_keeps_it(outputs):
    code, rows = outputs("--limit", "3")
    assert outcomes(rows) == ["passed", "passed", "not started", "ended by --limit"] and code == 0
    code, rows = outputs("--slice", "devices", fails=1)
    assert outcomes(rows) == ["passed", "failed", "not started", "ended by --limit"] and code == 1


def test_suite_reports_after_each_part(tmp_path):
    seen: list[list[str]] = []
    record = suite.Record(tmp_path / "record.jsonl", append=False)
    running = suite.Suite(
        record, float("inf"), 0, lambda: seen.append([part["outcome"] for part in record.parts().values()])
    )
    running.run([suite.Part(name, ["-c", ""]) for name in ("one", "two")])
    assert seen == [["passed", "not started"], ["passed", "passed"]] and not running.failed
    assert suite.Record(record.file, append=True).parts() and not suite.Record(record.file, append=False).parts()


@pytest.mark.parametrize(("outcome", "limit"), [("passed", []), ("failed", ["--most-ranks", "1"])])
def test_tests_after_ranks_that_could_not_share_a_gpu_have_as_many_as_gpus(tmp_path, monkeypatch, outcome, limit):
    record, commands = suite.Record(tmp_path / "record.jsonl", append=False), []
    record.add(TEST | {"name": suite.MEET, "outcome": outcome})

    def run(part: suite.Part, _: float) -> suite.Ended:
        commands.append(part.command)
        return suite.Ended(part, "passed", 1.0, "")

    monkeypatch.setattr(suite, "run", run)
    parts = [suite.Part("reshard", ["-m", "pytest", "x"]), suite.Part("bench", ["-m", "x"])]
    suite.Suite(record, float("inf"), 1, lambda: None).run(parts)
    assert commands == [["-m", "pytest", "x", *limit], ["-m", "x"]]


def test_slice_has_the_tests_that_the_machine_can_run(tmp_path, monkeypatch):
    """A collection that found three tests."""
    found = [("gpu/test_layouts.py::test_a_float32[b-tp1-c]", "not started"), ("gpu/test_x.py::test", "not started")]
    lines = "".join(json.dumps(TEST | {"name": name, "outcome": outcome}) + "\n" for name, outcome in found)
    skipped = json.dumps(TEST | {"name": "gpu/test_reshard.py::test", "outcome": "skipped", "reason": "no"}) + "\n"
    running = suite.Suite(suite.Record(tmp_path / "record.jsonl", append=False), float("inf"), 0, lambda: None)
    monkeypatch.setattr(suite, "run", lambda part, _: suite.Ended(part, "passed", 1.0, ""))
    (tmp_path / "collected").write_text(lines + skipped)
    running.record.add(TEST | {"name": found[0][0]})  # by an earlier run
    made = suite.slices(running, tmp_path / "collected", "")
    assert {part.name: part.command[-1] for part in made} == {
        "layouts": "tests/gpu/test_layouts.py::test_a_float32[b-tp1-c]",
        "others": "tests/gpu/test_x.py::test",
    }
    assert running.record.tests()["gpu/test_reshard.py::test"]["reason"] == "no"
    assert running.record.tests()[found[0][0]]["outcome"] == "passed"


def test_slices_are_expected_to_take_less_than_three_minutes():
    assert all(0 < seconds < 180 for _, seconds in (*suite.SLICES.values(), *suite.BENCH.values()))


def test_report_counts_tests_and_shows_what_parts_wrote(tmp_path):
    record = suite.Record(tmp_path / "record.jsonl", append=False)
    for name, outcome in (("one", suite.NOT_ENDED), ("one", "failed"), ("two", suite.NOT_ENDED)):
        record.add(TEST | {"name": name, "outcome": outcome})
    (tmp_path / "bench.md").write_text("# B\n")
    parts = suite.Part(suite.DOCTOR, []), suite.Part("bench", [], document=tmp_path / "bench.md")
    for part in parts:
        shown = suite.Ended(part, "failed", 3.0, "ill").shown
        record.add({"part": part.name, "outcome": "failed", "seconds": 3.0, "shown": shown})
    with record.file.open("a") as file:
        file.write('{"name": "three", "outc')  # the machine was taken away
    report = suite.report(MACHINE, {"NCCL": "2.30.7"}, 2, False, record)
    assert "- 2 nodes with 8 GPUs: NVIDIA H200 140 GiB\n- driver 580.65" in report and "- NCCL 2.30.7\n" in report
    assert "0 passed, 1 failed, 0 skipped, 1 did not end" in report and "| one | failed | 1.0 | a \\| b |" in report
    assert "| doctor | failed | 3 |" in report and "```text\nill\n```" in report and "\n## B\n" in report


def test_record_whose_last_line_was_cut_off_takes_further_lines(tmp_path):
    file = tmp_path / "record.jsonl"
    file.write_text(json.dumps(TEST | {"name": "one"}) + '\n{"name": "two", "outc')
    record = suite.Record(file, append=True)
    record.add(TEST | {"name": "three"})
    assert list(record.tests()) == ["one", "three"]


def test_default_output_names_hardware():
    assert suite.default_output(MACHINE["gpus"], 1) == suite.ROOT / "benchmarks/nvidia-h200-140-gib-8/test_gpu.md"
    assert suite.default_output(MACHINE["gpus"], 2).parent.name == "nvidia-h200-140-gib-8-nodes-2"


def test_suite_without_requirement_names_it_and_its_installation(monkeypatch):
    assert suite.missing() is None
    monkeypatch.setattr(suite, "REQUIRED", {"torch": "launch/requirements-gpu.txt", "no.such": "such"})
    assert suite.missing() == f"no.such is not installed for {sys.executable}. Run: pip install such"


def test_carried_stack_and_wheels_are_unpacked_before_the_suite_starts(tmp_path):
    """A checkout with stand-ins for the programs that the script calls."""
    tools, wheels = tmp_path / "tools", tmp_path / "build" / "bare_wheels"
    (tools / "install").mkdir(parents=True)
    shutil.copy(SCRIPT, tools)
    (tools / "gpu_suite.py").write_text(
        "import os, sys; print(sys.argv[1:], os.environ['PYTHONPATH'], os.environ['OF'])"
    )
    (tools / "install" / "unpack_stack.sh").write_text('mkdir -p "$2"; echo "export OF=$1" >"$2/environment.sh"')

    (tmp_path / "elsewhere").mkdir()

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(tools / "test_gpu.sh"), *options]
        variables = environment() | {"PYTHONPATH": "mine"}
        return subprocess.run(command, cwd=tmp_path / "elsewhere", capture_output=True, text=True, env=variables)

    assert run("--bare", "--stack").returncode == 2
    without = run("--bare")
    assert without.returncode == 2 and "tools/install/bare_wheels.sh" in without.stderr
    wheel_of_one_module(wheels, "1")
    done = run("--bare", "--stack", "pieces", "--limit", "9")
    assert done.returncode == 0, done.stderr
    options, path, folder = re.fullmatch(r"(\[.*\]) (\S+) (\S+)\n", done.stdout).groups()
    assert options == "['--bare', '--limit', '9']" and folder == f"{tmp_path}/elsewhere/pieces"
    root, site, own = path.split(":")
    assert (root, own) == (str(tmp_path), "mine") and (Path(site) / "carried.py").exists()
    compiled = Path(site) / "compiled"
    compiled.touch()
    assert run("--bare", "--stack", "pieces").returncode == 0 and compiled.exists()
    shutil.rmtree(wheels)
    wheel_of_one_module(wheels, "2")
    assert run("--bare", "--stack", "pieces").returncode == 0 and not compiled.exists()


def wheel_of_one_module(folder: Path, version: str) -> None:
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / f"carried-{version}-py3-none-any.whl", "w") as wheel:
        about = {"METADATA": f"Name: carried\nVersion: {version}\n", "WHEEL": "Wheel-Version: 1.0\n", "RECORD": ""}
        for name, text in about.items():
            wheel.writestr(f"carried-{version}.dist-info/{name}", text)
        wheel.writestr("carried.py", "")


def test_process_of_the_fake_gpu_finds_carried_packages(tmp_path, monkeypatch):
    """A stand-in for Python writes where it would look for modules."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$PYTHONPATH" >{tmp_path}/path; exec sleep 999\n')
    python.chmod(0o755)
    monkeypatch.setattr(fake_cuda.sys, "executable", str(python))
    monkeypatch.setenv("PYTHONPATH", "/carried")
    with fake_cuda.FakeCudaProcess():
        while not (tmp_path / "path").exists() or not (path := (tmp_path / "path").read_text()):
            time.sleep(0.01)
    assert path.strip().split(":") == [str(suite.ROOT), "/carried"]


@pytest.mark.parametrize(
    ("machine", "needs", "reason"),
    [
        (Machine(0, ()), {"gpu": True}, "there is no GPU"),
        (Machine(0, ()), {"te": True}, "there is no GPU"),
        (Machine(0, ()), {"torch": "2.14", "ranks": 8}, None),
        (Machine(0, (), 2), {"ranks": 3}, "3 ranks: --most-ranks 2"),
        (Machine(1, (2, 30, 7)), {"ranks": 8, "gpu": True}, None),
        (
            Machine(1, (2, 28, 9)),
            {"ranks": 2},
            "2 ranks: this machine has 1 GPUs, which ranks share from NCCL 2.30.3 on; this is 2.28.9",
        ),
        (Machine(1, (2, 28, 9)), {"torch": "2.11"}, None),
        (Machine(1, (2, 28, 9)), {"torch": "2.14", "why": "it fails"}, "torch 2.11.0 is older than 2.14: it fails"),
        (Machine(1, (2, 28, 9)), {"te": True}, "Transformer Engine is not installed"),
        (Machine(1, (2, 28, 9)), {"sglang": True}, "SGLang is not installed; run bash tools/install/sglang_cpu.sh"),
        (Machine(1, (2, 28, 9)), {"vllm": True}, "vLLM is not installed; run bash tools/install/vllm_cpu.sh"),
    ],
)
def test_machine_without_a_need_returns_the_reason(monkeypatch, tmp_path, machine, needs, reason):
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    monkeypatch.setattr("tests.helpers.machine.VLLM_PYTHON", tmp_path / "python")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert machine.missing(**needs) == reason


@pytest.mark.needs(gpu=True)
def test_need_of_a_gpu_is_met_where_the_test_runs(machine):
    assert machine.gpus > 0
