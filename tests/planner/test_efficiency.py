"""Data sheets of GPUs, and what a plan makes of them."""

import json

import pytest

from tests.planner.tiny_inputs import CONFIGS
from verl_mg.cli import main
from verl_mg.monitor.metrics import peak_flops
from verl_mg.planner.efficiency import FITTED, GPUS

PLAN = ["plan", "--model", str(CONFIGS / "qwen3_1_7b.json"), "--train", "tp1", "--rollout", "tp1", "--json"]


@pytest.mark.parametrize("name", GPUS)
def test_peak_of_a_data_sheet_is_that_of_the_utilization_of_jobs(name):
    assert GPUS[name].bf16 * 1e12 == pytest.approx(peak_flops(f"NVIDIA {name.upper()}"), rel=1e-3)


def test_figures_are_fractions_of_the_data_sheet():
    sheet, reached = GPUS["h200"], FITTED.figures(GPUS["h200"])
    assert reached["memory"] == sheet.memory and reached["peak"] == sheet.bf16
    for name, peak in (("flops", sheet.bf16), ("memory_bandwidth", sheet.bandwidth), ("intra_node", sheet.link)):
        assert 0.4 * peak < reached[name] < peak


def test_plan_gpu_sets_what_no_option_sets(capsys):
    main([*PLAN, "--ranks", "8", "--gpu", "h20", "--flops", "100"])
    numbers = json.loads(capsys.readouterr().out)
    assumptions = " ".join(numbers["assumptions"])
    assert "reaches 100 TFLOP/s" in assumptions and "a device has 96 GiB" in assumptions and numbers["peak"] == 148
    assert numbers["utilization"] == pytest.approx(100 / 148 * 0.5, rel=0.4)


def test_plan_unknown_gpu_is_one_line(capsys):
    with pytest.raises(SystemExit) as left:
        main([*PLAN, "--ranks", "8", "--gpu", "h300"])
    err = capsys.readouterr().err
    assert left.value.code == 2 and "--gpu: 'h300' is unknown. Use a100, " in err and err.count("\n") == 1
