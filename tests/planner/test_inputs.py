"""Figures that a plan begins with: data sheets of GPUs, measured ones, and the configuration of a job."""

import json
from pathlib import Path

import pytest

from tests.planner.tiny_inputs import CONFIGS, planned, refused, request
from verl_mg.errors import UserError
from verl_mg.layout import Layout
from verl_mg.monitor.metrics import peak_flops
from verl_mg.planner.efficiency import GPUS
from verl_mg.planner.inputs import FIGURES, read_hardware_profile
from verl_mg.recipes import gkd

ROOT = Path(__file__).parents[2]
PLAN = ["plan", "--model", str(CONFIGS / "qwen3_1_7b.json"), "--train", "tp1", "--rollout", "tp1"]


@pytest.mark.parametrize("name", GPUS)
def test_peak_of_a_data_sheet_is_that_of_the_utilization_of_jobs(name):
    assert GPUS[name].bf16 * 1e12 == pytest.approx(peak_flops(f"NVIDIA {name.upper()}"), rel=1e-3)


@pytest.mark.parametrize("name", ["h100", "h200"])
def test_plan_for_a_measured_gpu_has_the_figures_of_its_report(capsys, name):
    report = ROOT / "benchmarks" / f"{name}-1" / f"measured_{name}.json"
    figures = {figure: round(value, 1) for figure, value in read_hardware_profile(report).items()}
    assert GPUS[name].measured == figures and figures.keys() == {"flops", "memory_bandwidth", "memory", "host"}
    by_default = planned(capsys, *PLAN, "--ranks", "8", "--gpu", name)
    from_file = planned(capsys, *PLAN, "--ranks", "8", "--gpu", name, "--measured", str(report))
    assert f"reaches {figures['flops']:g} TFLOP/s" in " ".join(by_default["assumptions"])
    assert by_default["seconds"] == pytest.approx(from_file["seconds"], rel=1e-3)


def test_plan_gpu_sets_what_no_option_sets(capsys):
    numbers = planned(capsys, *PLAN, "--ranks", "8", "--gpu", "h20", "--flops", "100")
    assumptions = " ".join(numbers["assumptions"])
    assert "reaches 100 TFLOP/s" in assumptions and "a device has 96 GiB" in assumptions and numbers["peak"] == 148
    assert numbers["utilization"] == pytest.approx(100 / 148 * 0.5, rel=0.4)


def test_plan_unknown_gpu_is_one_line(capsys):
    assert "--gpu: 'h300' is unknown. Use a100, " in refused(capsys, *PLAN, "--ranks", "8", "--gpu", "h300")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]", "it contains a list. Write an object of figures: flops"),
        ("{", "not a readable JSON file"),
        ('{"flop": 1}', f"unknown figure 'flop'. Use {', '.join(FIGURES)}"),
        ('{"flops": 0}', "flops is 0. Use a number above 0"),
        ('{"host": "25"}', "host is '25'. Use"),
        ('{"host": true}', "host is True. Use"),
        ('{"host": NaN}', "host is nan. Use"),
        ('{"host": Infinity}', "host is inf. Use"),
    ],
)
def test_read_hardware_profile_invalid_figure_raises(tmp_path, text, words):
    file = tmp_path / "measured.json"
    file.write_text(text)
    with pytest.raises(UserError, match="measured.json: ") as error:
        read_hardware_profile(file)
    assert words in str(error.value)


def test_plan_options_override_measured_figures(tmp_path, capsys):
    file = tmp_path / "measured.json"
    file.write_text(json.dumps({"flops": 123, "host": 7, "memory": 141}))
    model = ["--model", str(CONFIGS / "qwen2_5_7b.json"), "--ranks", "8", "--train", "tp2", "--rollout", "tp2"]
    assumptions = " ".join(planned(capsys, "plan", *model, "--measured", str(file), "--host", "9")["assumptions"])
    for words in ("reaches 123 TFLOP/s", "9 GB/s to its host", "a device has 141 GiB"):
        assert words in assumptions


UNSEEN = {
    "actor.lora={rank: 4}": "actor.lora: counted as if all weights were trained, and the reference's separate",
    "rollout.adapters=true": "rollout.adapters: the weight sync is counted as the first one, later ones send only",
    "reference.dynamic_context=true": "reference.dynamic_context: counted as if every row were sharded over all",
}


@pytest.mark.parametrize(("override", "note"), UNSEEN.items())
def test_plan_request_uncounted_setting_adds_note(override, note):
    assert request("algorithm.kl.coefficient=0.1").notes == ()
    (found,) = request("algorithm.kl.coefficient=0.1", override).notes
    assert found.startswith(note)


def test_plan_request_has_the_teachers_on_ranks_of_the_job():
    plan = request("teachers={math: {path: t, layout: tp2}, far: {url: 'http://h:1'}}", recipe=gkd)
    (role,) = plan.roles
    assert (role.name, role.layout, role.model, role.is_trained) == ("teachers.math", Layout(tp=2), "t", False)
    (note,) = plan.notes
    assert note == "algorithm.divergence: the teachers' output layers on the actor's last stage are not counted"


def test_plan_request_has_wire_and_delta_of_the_rollout():
    fields = request("rollout.wire=fp8_block", "rollout.delta=true").fields
    assert (fields["wire"], fields["delta"]) == ("fp8_block", True)
