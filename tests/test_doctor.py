"""`verl-mg doctor` as it is started: alone, and by the launcher on two ranks; and with the configuration of a job."""

import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from tests.helpers.launched import Ended, finished, torchrun
from tests.helpers.tiny_jobs import write_sums
from tests.helpers.traces import needs_sglang
from verl_mg.doctor import _differences, bandwidth_problems, describe_machine, machine_problems, unmet
from verl_mg.models.tiny_model import make_tiny_model


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


@pytest.fixture(scope="module")
def described(tmp_path_factory):
    """Configuration of a small job whose engine is SGLang, which can be planned."""
    folder = tmp_path_factory.mktemp("job")
    model = make_tiny_model(folder / "model", "qwen3", hidden=32, head_dim=32, ffn=64, max_positions=256)
    write_sums(folder)
    file = folder / "job.yaml"
    file.write_text(
        f"model: {{path: {model}, dtype: bfloat16}}\ndata: {{train: {folder / 'sums.jsonl'}, max_prompt_tokens: 64}}\n"
        f"rollout: {{engine: sglang, max_new_tokens: 8}}\nreward: {{function: verl_mg.rewards.exact:score}}\n"
        f"job: {{output: {folder / 'run'}}}\n"
    )
    return file


@needs_sglang
def test_doctor_of_a_job_prints_its_table_on_all_ranks_without_training(described):
    arguments = ["doctor", "--output", str(described.parent / "runs"), "--job", str(described), "grpo"]
    changes = ["actor.layout=tp2", "algorithm.kl.coefficient=0.1", "reference.backend=fsdp"]
    printed = finished([*torchrun(2), "-m", "verl_mg", *arguments, *changes]).completed().out
    report, _, table = printed.partition("\n\n")
    assert "all is well" in report and table.count("precision") == 2
    rows = [re.split(r"  +", line) for line in table.splitlines()]
    assert ["actor, tp2", "precision", "bfloat16"] in rows
    assert ["", "attention, full", "torch's SDPA, run by run"] in rows
    assert ["", "weight gradients", "added to their buffers by torch"] in rows
    assert any(row[0].startswith("reference") for row in rows)
    assert ["engine sglang, not started", "attention", "torch_native"] in rows
    assert ["devices", "kind", "CPU"] in rows and ["", "collectives", "gloo over TCP"] in rows
    assert any(row[1:2] == ["training"] and row[2].endswith(" GiB planned") for row in rows)
    assert rows[-1] == ["warnings: known on a GPU only"] and not (described.parent / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["actor.layout=tp2"], "doctor actor.layout=tp2: --job is missing. Write verl-mg doctor RECIPE --job CONFIG"),
        (["--job", "{file}", "actor.layout=tp2"], "doctor --job: the recipe is missing. Write verl-mg doctor RECIPE"),
        (["grpo", "--job", "{file}", "actor.layuot=tp2"], "actor.layuot"),
    ],
)
def test_doctor_of_a_job_that_cannot_be_read_ends_with_one_line(described, tmp_path, arguments, words):
    given = [text.format(file=described) for text in arguments]
    assert words in finished(["-m", "verl_mg", "doctor", "--output", str(tmp_path), *given]).refusal()
