"""SandboxFusion against a server with its interface that runs the programs."""

from typing import Any

import pytest

from tests.helpers.json_server import JsonRequest, JsonResponse, serving
from verl_mg import http_client
from verl_mg.errors import UserError
from verl_mg.rewards import AsyncScorer, Reward, Sample, load_reward
from verl_mg.sandbox import run_python

pytestmark = pytest.mark.usefixtures("sandbox")

DOUBLE = {"inputs": ["1\n", "21\n"], "outputs": ["2\n", "42\n"]}
ASSERTIONS = ["assert add(1, 2) == 3", "assert isinstance(add(1, 2), int)"]
STATUS = {"ok": "Finished", "timeout": "TimeLimitExceeded"}


def run_code(requested: JsonRequest) -> JsonResponse:
    assert (requested.path, requested.body["language"]) == ("/run_code", "python")
    outcome = run_python(
        requested.body["code"],
        stdin=requested.body["stdin"],
        seconds=requested.body["run_timeout"],
        memory_mb=requested.body["memory_limit_MB"],
    )
    result = {
        "status": STATUS.get(outcome.ended, "Finished"),
        "execution_time": 0.1,
        "return_code": None if outcome.ended == "timeout" else int(outcome.ended != "ok"),
        "stdout": outcome.stdout,
        "stderr": outcome.stderr,
    }
    status = "Success" if outcome.ended == "ok" else "Failed"
    return JsonResponse({"status": status, "message": "", "compile_result": None, "run_result": result, "files": {}})


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(http_client, "FIRST_PAUSE", 0.01)


def score(url: str, *programs: str, record: dict[str, Any], **options: Any) -> list[Reward]:
    reward = load_reward("verl_mg.rewards.sandbox_fusion:SandboxFusion", {"url": url} | options)
    with AsyncScorer({"": reward}, workers=2) as scorer:
        return scorer.score([Sample("p", f"```python\n{text}\n```", None, record, "stop") for text in programs])


def test_sandbox_fusion_scores_equal_those_of_the_local_sandbox():
    with serving(run_code) as url:
        programs = ("print(int(input()) * 2)", "print(2)", "print(int(input()) * 2)\n1/0")
        rewards = score(f"{url}/", *programs, record={"tests": DOUBLE}, seconds=60, partial=True)
        assert [reward.value for reward in rewards] == [1.0, 0.5, 0.0]
        assert score(url, "while True: pass", record={"tests": DOUBLE}, seconds=1)[0].value == 0.0
        programs = ("def add(a, b): return a + b", "def add(a, b): return 3.5", "import os\nos._exit(0)")
        rewards = score(url, *programs, record={"test_list": ASSERTIONS})
        assert [reward.value for reward in rewards] == [1.0, 0.0, 0.0]


def test_sandbox_fusion_transient_failure_is_retried():
    broken = [
        JsonResponse({"status": "SandboxError", "message": "no runner", "run_result": None}),
        JsonResponse("busy", 502),
    ]
    with serving(lambda requested: broken.pop() if broken else run_code(requested)) as url:
        assert score(url, "print(2)", record={"tests": {"inputs": [""], "outputs": ["2"]}})[0].value == 1.0
    assert broken == []


def test_sandbox_fusion_program_that_did_not_run_scores_0():
    with serving(lambda _: JsonResponse({"status": "Failed", "run_result": None})) as url:
        assert score(url, "x = (", record={"tests": DOUBLE})[0].value == 0.0


@pytest.mark.parametrize(
    "content", [{"status": "SandboxError", "message": "no runner"}, ["x"], {"status": "Success", "run_result": 3}]
)
def test_sandbox_fusion_permanent_failure_raises(content):
    with serving(lambda _: JsonResponse(content)) as url, pytest.raises(UserError, match="/run_code: failed 2 times"):
        score(url, "print(2)", record={"tests": DOUBLE}, retries=1)
