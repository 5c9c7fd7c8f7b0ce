"""`verl-mg view`, from the command line; and over a run that a real job has left."""

import signal
import socket
import subprocess
import sys
from functools import partial
from itertools import pairwise
from urllib.request import urlopen

import pytest

from tests.run.jobs import job, make_inputs
from tests.view.runs import write_run
from verl_mg.cli import main
from verl_mg.view.run import Run
from verl_mg.view.search import Query


def test_view_prints_its_address_and_ends_with_ctrl_c(tmp_path):
    folders = [str(write_run(tmp_path / name, iterations=1)) for name in ("one", "two")]
    command = [sys.executable, "-m", "verl_mg", "view", *folders]
    # Tests may run where interrupts are ignored, as jobs in the background do.
    heeding = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, preexec_fn=heeding) as process:
        try:
            said, url = process.stdout.readline().split()[:2]
            assert said == "view" and url.startswith("http://127.0.0.1:")
            with urlopen(f"{url}api/runs", timeout=600) as answer:
                assert b'"name": "two"' in answer.read()
        finally:
            process.send_signal(signal.SIGINT)
        try:
            _, complaints = process.communicate(timeout=600)
        finally:
            process.kill()
    assert process.returncode == 0 and complaints == ""


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["nowhere"], "nowhere: no such folder"),
        (["empty"], "empty: not a run"),
        (["run", "empty"], "empty: not a run"),
        (["run", "--port", "taken"], "Omit --port"),
        (["run", "--port", "123456"], "Omit --port"),
        (["run", "--host", "203.0.113.1"], "--host 203.0.113.1"),
    ],
)
def test_view_invalid_arguments_print_one_line(tmp_path, monkeypatch, capsys, arguments, reason):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    write_run(tmp_path / "run", iterations=1)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        taken = str(listening.getsockname()[1])
        with pytest.raises(SystemExit) as ended:
            main(["view", *(taken if word == "taken" else word for word in arguments)])
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and reason in err


def test_view_run_of_a_real_job(ranks, tmp_path):
    inputs = make_inputs(tmp_path)
    ranks.run(2, job, "grpo", inputs, tmp_path / "run", ["algorithm.kl.coefficient=0.01"])
    run = Run(tmp_path / "run")
    about = run.about()
    assert about["status"]["state"] == "finished" and about["status"]["iteration"] == 3
    assert about["samples"] == [[1, 3]] and about["timeline"] == [1, 3]
    assert run.metrics.curve("reward/mean").steps.tolist() == [1, 2, 3]
    for line in run.timeline(2):
        spans = line["spans"]
        assert {"generate", "update", "optimizer", "weight_sync", "forward"} <= {phase for phase, _, _ in spans}
        assert all(0 <= begin < end for _, begin, end in spans)
        assert all(one[2] <= other[1] for one, other in pairwise(spans))
    found = run.samples.find(Query(first=2, last=2, sort="reward", descending=True))
    assert found["total"] == 10
    whole = run.samples.get(2, found["rows"][0]["call"], found["rows"][0]["sample_id"])
    (turn,) = whole["turns"]
    assert turn == {"by": "policy", "start": whole["prompt_length"], "end": len(whole["tokens"])}
    scores = ("advantages", "old_logprobs", "rollout_logprobs", "ref_logprobs")
    for name in ("pieces", *scores, "policy_versions", "loss_mask"):
        assert len(whole[name]) == len(whole["tokens"])
    assert found["rows"][0]["length"] == turn["end"] - turn["start"]
    assert [one["samples"] for one in run.samples.prompts(2)] == [2] * 5
