"""What `verl-mg doctor` finds in versions, limits and measurements."""

from importlib.metadata import version

import pytest
import torch
from packaging.requirements import Requirement

from verl_mg.doctor import _differences, bandwidth_problems, describe_machine, machine_problems, unmet


def test_requirement_that_no_installed_version_meets_is_reported_with_both():
    required = [Requirement("numpy<1"), Requirement("torch>=2"), Requirement("no-such-package>=3")]
    old, missing = unmet(required, [""])
    assert old.startswith(f"numpy<1: {version('numpy')} is installed. ")
    assert missing.startswith("no-such-package>=3: it is not installed. ")


def test_requirement_of_another_extra_or_python_is_not_reported():
    required = [Requirement('numpy<1; extra == "gpu"'), Requirement('torch<1; python_version < "3.9"')]
    assert list(unmet(required, [""])) == []
    assert len(list(unmet(required, ["", "gpu"]))) == 1


@pytest.mark.parametrize(("ranks", "found"), [(100, 0), (1024, 1)])
def test_open_files_below_those_of_all_ranks_are_reported(ranks, found):
    machine = describe_machine() | {"open_files": 2048}
    problems = [line for line in machine_problems(machine, ranks) if line.startswith("open files")]
    assert len(problems) == found


def test_shared_memory_of_a_container_is_reported():
    problems = list(machine_problems(describe_machine() | {"shared_memory": 64 * 2**20}, 1))
    assert any(line.startswith("/dev/shm: 64 MiB are free") for line in problems)


def test_driver_without_gpu_is_reported():
    problems = list(machine_problems(describe_machine() | {"driver": "580.1", "gpus": []}, 1))
    assert any("driver 580.1" in line and "finds no GPU" in line for line in problems)


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
