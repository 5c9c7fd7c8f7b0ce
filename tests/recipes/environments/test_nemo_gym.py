"""Episodes in the real servers of NeMo Gym, with our model server and a scripted policy."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.agents.scripted_session import Message, episode
from tests.helpers.json_server import JsonRequest, JsonResponse, serving
from verl_mg.agents.agent import AgentError
from verl_mg.recipes.environments import nemo_gym

SERVERS = Path(__file__).with_name("nemo_gym_servers.py")
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
RECORD = {
    "prompt": "Weather in Bern?",
    "responses_create_params": {
        "input": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Weather in Bern?"}],
        "tools": [TOOL],
        "metadata": {"level": "easy"},
    },
}


run = partial(episode, nemo_gym.run)


@pytest.mark.nightly
def test_run_plays_an_episode_with_a_tool_and_returns_the_reward_of_gym(start_server):
    requests = []

    def reply(body: dict[str, Any]) -> str | Message:
        requests.append(body)
        if len(requests) > 1:
            return "It is cold."
        function = {"name": "get_weather", "arguments": '{"city": "Bern"}'}
        return {"tool_calls": [{"id": "call_1", "type": "function", "function": function}]}

    url = start_server("nemo_gym", str(SERVERS))
    result = run(url, RECORD, reply, max_tokens=50)
    assert result == {"reward": 1.0, "outputs": 3.0}  # the call, its result, the message
    first, second = requests
    assert (first["model"], first["max_tokens"]) == ("policy", 50)
    assert [message["role"] for message in first["messages"]] == ["system", "user"]
    assert first["tools"][0]["function"]["name"] == "get_weather"
    assert second["messages"][-1]["content"] == '{"city":"Bern","weather_description":"The weather in Bern is cold."}'
    result = run(url, {"prompt": "1+1="}, lambda body: body["messages"][0]["content"])
    assert result == {"reward": 0.0, "outputs": 1.0}


def test_run_sends_the_record_with_the_address_of_the_policy():
    bodies = []

    def respond(request: JsonRequest) -> JsonResponse:
        bodies.append((request.path, request.body))
        return JsonResponse({**request.body, "reward": 0.5, "steps": 2, "_ng_index": 3} if len(bodies) == 1 else {})

    with serving(respond) as url:
        assert run(url, {**RECORD, "expected": "cold"}, lambda body: "") == {"reward": 0.5, "steps": 2.0}
        ((path, body),) = bodies
        assert (path, body["expected"], body["responses_create_params"]["tools"]) == ("/run", "cold", [TOOL])
        metadata = body["responses_create_params"]["metadata"]
        assert sorted(metadata) == ["level", "verl_mg_api_key", "verl_mg_base_url", "verl_mg_model"]
        with pytest.raises(AgentError, match="has no reward"):
            run(url, RECORD, lambda body: "")
