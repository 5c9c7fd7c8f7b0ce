"""Measured figures, and how they enter a plan."""

import json

import pytest

from tests.planner.tiny_inputs import CONFIGS
from verl_mg.cli import main
from verl_mg.errors import UserError
from verl_mg.planner.inputs import FIGURES, read_hardware_profile


def test_read_hardware_profile_returns_figures(tmp_path):
    file = tmp_path / "measured.json"
    file.write_text(json.dumps({"flops": 410, "host": 25.5}))
    assert read_hardware_profile(file) == {"flops": 410.0, "host": 25.5}


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
    main(["plan", *model, "--measured", str(file), "--host", "9", "--json"])
    assumptions = " ".join(json.loads(capsys.readouterr().out)["assumptions"])
    assert (
        "reaches 123 TFLOP/s" in assumptions
        and "9 GB/s to its host" in assumptions
        and "a device has 141 GiB" in assumptions
    )
