"""A job that a script builds and runs, under torchrun and alone."""

import pytest

from tests.helpers.launched import ROOT, finished, torchrun
from tests.helpers.tiny_jobs import logged, write_sums
from tests.helpers.tiny_models import tiny_model

SCRIPT = """
import sys

from verl_mg.recipes import grpo
from verl_mg.api import Job

def digits(sample):
    return float(sum(character.isdigit() for character in sample.response))

folder, output = sys.argv[1:3]
job = Job(
    actor={"path": f"{folder}/model", "optimizer": {"lr": 1e-3}},
    data=f"{folder}/sums.jsonl",
    reward=digits,
    output=output,
    rollout={"max_new_tokens": int(sys.argv[3])},
)
job.run(grpo, iterations=2, prompts_per_iteration=4, group_size=2)
"""


@pytest.fixture
def script(tmp_path):
    tiny_model(tmp_path / "model", "qwen3")
    write_sums(tmp_path, left=4)
    file = tmp_path / "my_job.py"
    file.write_text(SCRIPT)
    return file


def test_script_under_torchrun_trains(script, tmp_path):
    finished([*torchrun(2), str(script), str(tmp_path), str(tmp_path / "run"), "5"], PYTHONPATH=str(ROOT)).completed()
    lines = logged(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2] and lines[0]["actor/grad_norm"] > 0
    assert lines[0]["response/samples"] == 8
    assert "function: __main__:digits" in (tmp_path / "run" / "config.yaml").read_text()
    assert (tmp_path / "run" / "model" / "config.json").exists()


def test_script_with_a_mistake_exits_with_one_line(script, tmp_path):
    done = finished([str(script), str(tmp_path), str(tmp_path / "run"), "-5"], PYTHONPATH=str(ROOT))
    assert done.refusal() == "error: Job: rollout.max_new_tokens: -5 is invalid. Write a value greater than 0."
    assert not (tmp_path / "run").exists()
