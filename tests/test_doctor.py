"""`verl-mg doctor` as it is started: alone, and by the launcher on two ranks."""

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from tests.helpers.launched import Ended, finished, torchrun
from verl_mg.doctor import _differences, bandwidth_problems, describe_machine, machine_problems, unmet


def doctor(output: Path, launcher: Sequence[str] = ()) -> Ended:
    return finished([*launcher, "-m", "verl_mg", "doctor", "--output", str(output)])


def test_doctor_of_one_process_in_the_tested_environment_finds_nothing(tmp_path):
    lines = doctor(tmp_path / "runs").completed().out.splitlines()
    assert (lines[0], lines[-1]) == ("1 rank", "all is well"), lines
    assert list((tmp_path / "runs").iterdir()) == []


def test_doctor_of_two_ranks_measures_their_transfers(tmp_path):
    printed = doctor(tmp_path / "runs", torchrun(2)).completed().out
    assert "2 ranks on 1 node\n" in printed and "slowest rank: all_reduce " in printed and ", p2p " in printed


def test_doctor_with_few_open_files_reports_the_limit(tmp_path):
    program = (
        "import resource; from verl_mg.cli import main\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)); main(['doctor', '--output', {str(tmp_path)!r}])"
    )
    code, printed, _ = finished(["-c", program])
    assert code == 1 and "open files: the hard limit 256 is below 516" in printed


def test_doctor_with_one_folder_a_rank_names_the_rank_that_does_not_see_it(tmp_path):
    for rank in ("0", "1"):
        (tmp_path / rank).mkdir()
    program = tmp_path / "program.py"
    program.write_text(
        f"import os; from verl_mg.cli import main\n"
        f"os.chdir({str(tmp_path)!r} + '/' + os.environ['RANK']); main(['doctor', '--output', 'runs'])"
    )
    code, printed, _ = finished([*torchrun(2), str(program)])
    assert code == 1
    assert f"{tmp_path}/1/runs: rank 1 does not see what rank 0 wrote there" in printed and "to fix: 1\n" in printed


def test_doctor_with_a_folder_that_cannot_be_made_reports_the_reason(tmp_path):
    (tmp_path / "file").write_text("")
    code, printed, _ = doctor(tmp_path / "file" / "runs")
    assert code == 1 and "rank 0 cannot write it" in printed


def test_requirement_that_no_installed_version_meets_is_reported_with_both():
    required = [Requirement("numpy<1"), Requirement("torch>=2"), Requirement("no-such-package>=3")]
    old, missing = unmet(required, [""])
    assert old.startswith(f"numpy<1: {version('numpy')} is installed. ")
    assert missing.startswith("no-such-package>=3: it is not installed. ")


def test_requirement_of_another_extra_or_python_is_not_reported():
    required = [Requirement('numpy<1; extra == "gpu"'), Requirement('torch<1; python_version < "3.9"')]
    assert list(unmet(required, [""])) == []
    assert len(list(unmet(required, ["", "gpu"]))) == 1


@pytest.mark.parametrize(
    ("changed", "ranks", "words"),
    [
        ({"open_files": 2048}, 1024, "open files: the hard limit 2048 is below"),
        ({"shared_memory": 64 * 2**20}, 1, "/dev/shm: 64 MiB are free"),
        ({"driver": "580.1", "gpus": []}, 1, "GPUs: there is driver 580.1, but torch"),
    ],
)
def test_machine_with_too_little_is_reported(changed, ranks, words):
    found = set(machine_problems(describe_machine() | changed, ranks)) - set(machine_problems(describe_machine(), 100))
    (problem,) = found
    assert problem.startswith(words)


def test_slow_transfers_are_reported_between_gpus_alone(monkeypatch):
    measured = {"all_reduce": 3e9, "p2p": 30e9}
    assert list(bandwidth_problems(measured, 1)) == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (problem,) = bandwidth_problems(measured, 1)
    assert problem.startswith("all_reduce: 3.00 GB/s") and list(bandwidth_problems(measured, 2)) == []


def test_versions_that_differ_between_nodes_are_reported():
    ranks = [
        {"machine": {"host": host}, "versions": {"torch": torch}} for host, torch in (("a", "2.14"), ("b", "2.13"))
    ]
    assert _differences(ranks) == ["b: torch 2.13 differs from 2.14 of a. Install the same environment on all nodes."]
