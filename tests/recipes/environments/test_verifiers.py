"""Episodes in an environment of the real verifiers, served by tools/serve_verifiers.py, with a scripted policy."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.agents.scripted_session import episode
from tests.helpers.json_lines import read_lines
from tests.helpers.json_server import JsonResponse, serving
from verl_mg.agents.agent import AgentError
from verl_mg.errors import UserError
from verl_mg.recipes.environments import verifiers

SCRIPT = Path(__file__).parents[3] / "tools" / "serve_verifiers.py"
# Its harness `null` is a loop of chat completions; `uv` runs it.
ENV = {"taskset": {"id": "echo_word"}, "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}
VARIABLES = {
    **{name: value for name, value in os.environ.items() if name.startswith(("UV_", "SSL_"))},
    "UV_SYSTEM_CERTS": "1",
    "HOME": str(Path.home()),
    "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
    "PYTHONPATH": str(Path(__file__).with_name("verifiers_tasksets")),
}


run = partial(episode, verifiers.run)


@pytest.mark.nightly
def test_run_plays_the_episodes_of_written_tasks_and_returns_their_rewards(python_of, start_server, tmp_path):
    env, data = json.dumps(ENV), tmp_path / "train.jsonl"
    command = [python_of("verifiers"), str(SCRIPT), "--env", env, "--write-tasks", str(data)]
    subprocess.run(command, check=True, env=VARIABLES)
    records = read_lines(data)
    assert [record["prompt"][-1]["content"] for record in records] == ["Say one.", "Say two."]
    url = start_server("verifiers", str(SCRIPT), "--env", env, variables=VARIABLES)
    requests = []

    def reply(body: dict[str, Any]) -> str:
        requests.append(body)
        return "one!"

    right, wrong = (run(url, record, reply, max_tokens=9) for record in records)
    assert right == {"reward": 2.0, "letters": 4.0}
    assert wrong == {"reward": 0.0, "letters": 4.0}
    assert requests[0]["messages"] == records[0]["prompt"]
    assert requests[0]["max_tokens"] == 9


def test_run_failed_episode_and_wrong_record_raise():
    result = {"reward": 0.0, "metrics": {}, "errors": ["ProviderError: refused"]}
    with serving(lambda request: JsonResponse(result)) as url:
        with pytest.raises(AgentError, match="ProviderError: refused"):
            run(url, {"task": {}}, lambda body: "")
        with pytest.raises(UserError, match="has no `task` of verifiers"):
            run(url, {"task": 3}, lambda body: "")
    broken = JsonResponse({"error": "broken"}, status=500)
    with serving(lambda request: broken) as url, pytest.raises(AgentError, match="status 500"):
        run(url, {"task": {}}, lambda body: "")
    with pytest.raises(UserError, match="is no HTTP address"):
        run("localhost:80", {"task": {}}, lambda body: "")
