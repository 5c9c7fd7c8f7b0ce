"""`verl-mg doctor` as it is started: alone, and by the launcher on two ranks."""

from pathlib import Path

from tests.helpers.launched import ended, started, torchrun


def doctor(output: Path, launcher: tuple[str, ...] = ()) -> tuple[int, str]:
    with started([*launcher, "-m", "verl_mg", "doctor", "--output", str(output)]) as process:
        code, printed, _ = ended(process)
    return code, printed


def test_doctor_of_one_process_in_the_tested_environment_finds_nothing(tmp_path):
    code, printed = doctor(tmp_path / "runs")
    lines = printed.splitlines()
    assert (code, lines[0], lines[-1]) == (0, "1 rank", "all is well"), printed
    assert list((tmp_path / "runs").iterdir()) == []


def test_doctor_of_two_ranks_measures_their_transfers(tmp_path):
    code, printed = doctor(tmp_path / "runs", tuple(torchrun(2)))
    assert code == 0, printed
    assert "2 ranks on 1 node\n" in printed and "slowest rank: all_reduce " in printed and ", p2p " in printed


def test_doctor_with_few_open_files_reports_the_limit(tmp_path):
    program = (
        "import resource; from verl_mg.cli import main\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)); main(['doctor', '--output', {str(tmp_path)!r}])"
    )
    with started(["-c", program]) as process:
        code, printed, _ = ended(process)
    assert code == 1 and "open files: the hard limit 256 is below 516" in printed


def test_doctor_with_one_folder_a_rank_names_the_rank_that_does_not_see_it(tmp_path):
    for rank in ("0", "1"):
        (tmp_path / rank).mkdir()
    program = tmp_path / "program.py"
    program.write_text(
        f"import os; from verl_mg.cli import main\n"
        f"os.chdir({str(tmp_path)!r} + '/' + os.environ['RANK']); main(['doctor', '--output', 'runs'])"
    )
    with started([*torchrun(2), str(program)]) as process:
        code, printed, _ = ended(process)
    assert code == 1
    assert f"{tmp_path}/1/runs: rank 1 does not see what rank 0 wrote there" in printed and "to fix: 1\n" in printed


def test_doctor_with_a_folder_that_cannot_be_made_reports_the_reason(tmp_path):
    (tmp_path / "file").write_text("")
    code, printed = doctor(tmp_path / "file" / "runs")
    assert code == 1 and "rank 0 cannot write it" in printed
