"""The first iterations of every configuration have the recorded metrics."""

import pytest

from tests.helpers.tiny_models import daily_of
from tests.recipes import golden as recorded
from tests.recipes.golden import GOLDEN, ITERATIONS, Golden, Machine
from tests.recipes.tiny_runs import LETTERS, comparable, tiny_run
from tools.compare_metrics import METRICS, compare, read_metrics

ALWAYS = ("grpo", "ppo", "dapo", "dpo", "prime", "kl_cov")
NAMES = sorted(config.stem for config in LETTERS.glob("*.yaml"))
REL_ELSEWHERE = 1e-4
"""Relative tolerance on another machine than the recorded one."""
SENSITIVE = {"distillation": 0.15, "gkd": 0.15, "mt_grpo": 0.02}
"""The same where rounding grows: Adam's steps are as long for a gradient of rounding alone as for any other, by which a
teacher is trained on this machine, and a token at the edge of a clip falls on its other side."""
ROUNDING = ("mismatch/",)
"""Metrics of the difference between engine and trainer: of rounding only, so they are compared on the same machine."""


@pytest.mark.parametrize("name", daily_of(NAMES, *ALWAYS))
def test_golden_metrics_of_first_iterations_are_unchanged(ranks, tasks, tmp_path, name):
    tiny_run(ranks, name, tasks(0), tmp_path / name, [f"job.iterations={ITERATIONS}", "job.save=false"])
    golden = Golden.read(name)
    expected, lines = golden.lines, read_metrics(tmp_path / name / METRICS)
    same_machine = golden.machine == Machine.here()
    if not same_machine:
        expected, lines = comparable(expected, ROUNDING), comparable(lines, ROUNDING)
    differences = list(compare(expected, lines, 0.0 if same_machine else SENSITIVE.get(name, REL_ELSEWHERE)))
    assert not differences, "\n".join(differences[:10])


def test_golden_files_cover_every_configuration():
    assert {file.stem for file in GOLDEN.glob("*.json")} == set(NAMES)


def test_machine_with_another_stepping_is_another(monkeypatch, tmp_path):
    here, other = Machine.here(), tmp_path / "cpuinfo"
    text = recorded.CPU_INFO.read_text()
    other.write_text(text.replace(text[text.index("stepping") :].split("\n", 1)[0], "stepping\t: 99", 1))
    monkeypatch.setattr(recorded, "CPU_INFO", other)
    assert Machine.here() != here and Machine.here().instructions == here.instructions


def test_machine_whose_libraries_are_held_to_fewer_instructions_is_another(monkeypatch):
    here = Machine.here()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX")
    assert Machine.here() != here
