"""Episodes in real servers of OpenEnv, with a scripted policy."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agents.scripted_session import Message, ScriptedSample, ScriptedSession, policy
from verl_mg.agents.agent import AgentError
from verl_mg.errors import UserError
from verl_mg.recipes.environments import openenv

SERVERS = Path(__file__).with_name("openenv_servers.py")


@pytest.fixture(scope="module")
def url(start_server) -> str:
    return start_server("openenv", str(SERVERS))


def play(
    reply: Callable[[dict[str, Any]], str | Message], options: dict[str, Any], record: dict[str, Any] | None = None
) -> tuple[Any, list[dict[str, Any]]]:
    """Plays an episode; returns its result and the requests that the policy got."""
    requests: list[dict[str, Any]] = []

    def reply_to(body: dict[str, Any]) -> str | Message:
        requests.append(body)
        return reply(body)

    with policy(reply_to) as base_url:
        session = ScriptedSession(base_url, options, messages=[{"role": "user", "content": "Play."}])
        return asyncio.run(openenv.run(session, ScriptedSample(record=record or {}))), requests


def calls(*called: tuple[str, str]) -> Message:
    """A reply that calls tools."""
    return {
        "tool_calls": [
            {"id": f"call-{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(called)
        ]
    }


@pytest.mark.nightly
def test_run_text_actions_play_the_episode_that_the_record_seeds(url):
    def right_once(body: dict[str, Any]) -> str:
        digit = body["messages"][-1]["content"][-2]
        return 2 * digit if len(body["messages"]) == 1 else digit + "x"

    options = {"url": f"{url}/digits", "reset_fields": ["seed"], "max_tokens": 2}
    result, (first, second) = play(right_once, options, {"seed": 3})
    assert result == {"reward": 0.75, "turns": 2, "done": 1.0}
    assert first["max_tokens"] == 2
    assert [message["content"] for message in second["messages"]] == ["Play.\n\n2=", "22", "5="]  # those of seed 3
    assert play(right_once, {**options, "reward": "last"}, {"seed": 3})[0]["reward"] == 0.25
    assert play(right_once, {**options, "max_turns": 1}, {"seed": 3})[0] == {"reward": 0.5, "turns": 1, "done": 0.0}


@pytest.mark.nightly
def test_run_more_episodes_than_sessions_wait_for_each_other(url):
    async def play_together(base_url: str) -> list[Any]:
        session = ScriptedSession(base_url, {"url": f"{url}/digits"})
        return await asyncio.gather(*(openenv.run(session, ScriptedSample()) for _ in range(3)))

    with policy(lambda body: 2 * body["messages"][-1]["content"][-2]) as base_url:
        assert [result["reward"] for result in asyncio.run(play_together(base_url))] == [1.0] * 3


@pytest.mark.nightly
def test_run_tool_actions_have_the_schema_and_report_invalid_ones(url):
    moves = iter(
        [
            calls(("act", '{"direction": "up", "steps": 1}')),
            calls(("act", "[1"), ("jump", "{}")),
            calls(("act", '{"direction": "right", "steps": 1}'), ("act", '{"direction": "right", "steps": 4}')),
        ]
    )
    result, requests = play(lambda body: next(moves), {"url": f"{url}/moves", "actions": "tool", "reset": {"goal": 5}})
    assert result == {"reward": 0.75, "turns": 3, "done": 1.0}
    (tool,) = requests[0]["tools"]
    assert list(tool["function"]["parameters"]["properties"]) == ["direction", "steps"]
    assert requests[0]["messages"][-1]["content"] == 'Play.\n\n{"x": 0, "goal": 5}'
    results = [message["content"] for message in requests[-1]["messages"] if message["role"] == "tool"]
    assert "'left' or 'right'" in results[0]
    assert results[1].startswith("error: act: no such tool, or its arguments")
    assert results[2].startswith("error: jump: no such tool")


@pytest.mark.nightly
def test_run_tools_of_the_environment_are_offered_and_called(url):
    def use_tools(body: dict[str, Any]) -> Message:
        results = [message["content"] for message in body["messages"] if message["role"] == "tool"]
        if not results:
            return calls(("double", '{"number": "much"}'), ("double", '{"number": 21}'))
        return calls(("submit", json.dumps({"answer": int(results[1])})))

    result, requests = play(use_tools, {"url": f"{url}/tools", "actions": "mcp", "observation_field": ""})
    assert result == {"reward": 1.0, "turns": 2, "done": 1.0}
    assert [tool["function"]["name"] for tool in requests[0]["tools"]] == ["double", "submit"]
    assert requests[1]["messages"][-2]["content"].startswith("error:")
    result, _ = play(lambda body: "I give up.", {"url": f"{url}/tools", "actions": "mcp"})
    assert result == {"reward": 0.0, "turns": 1, "done": 0.0}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("path", "options", "error", "message"),
    [
        ("/digits", {"action_field": "text"}, AgentError, "the action text is invalid"),
        ("/digits", {"observation_field": "digit"}, UserError, "an observation has no digit. Use text"),
        ("/nothing", {}, AgentError, "InvalidStatus"),
    ],
)
def test_run_that_fails_names_the_reason(url, path, options, error, message):
    with pytest.raises(error, match=message):
        play(lambda body: "1", {"url": url + path, **options})


@pytest.fixture
def scripted_url() -> Iterator[str]:
    """A server whose environment has no state before `reset`, with a place for one session at a time."""
    pytest.importorskip("websockets")
    from websockets.sync.server import ServerConnection, serve

    free = threading.Semaphore()

    def play(connection: ServerConnection) -> None:
        if not free.acquire(blocking=False):
            connection.send(json.dumps({"type": "error", "data": {"code": "CAPACITY_REACHED", "message": "full"}}))
            return
        observation: dict[str, Any] = {"observation": {"text": "Go."}, "reward": None, "done": False}
        done = {**observation, "reward": 0.5, "done": True}
        failed = {"code": "EXECUTION_ERROR", "message": "no attribute _state"}
        for message in connection:
            kind = json.loads(message)["type"]
            answer = {"state": failed, "reset": observation, "step": done}[kind]
            connection.send(json.dumps({"type": "error" if kind == "state" else "observation", "data": answer}))
        free.release()

    with serve(play, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()
        thread.join()


def test_run_environment_without_a_state_before_reset_is_played(scripted_url):
    async def play_together(base_url: str) -> list[Any]:
        session = ScriptedSession(base_url, {"url": scripted_url, "action_field": "text"})
        return await asyncio.gather(*(openenv.run(session, ScriptedSample()) for _ in range(2)))

    with policy(lambda body: "1") as base_url:
        assert asyncio.run(play_together(base_url)) == [{"reward": 0.5, "turns": 1, "done": 1.0}] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reset_fields": ["seed"]}, "record of '1.1=': it has no `seed`"),
        ({"actions": "tools"}, "rollout.agent_options.actions: Input should be 'text', 'tool' or 'mcp'"),
    ],
)
def test_run_wrong_options_raise(options, message):
    with pytest.raises(UserError, match=message):
        play(lambda body: "1", {"url": "http://127.0.0.1:9", **options})


def test_run_without_a_server_or_its_address_raises():
    pytest.importorskip("websockets")
    with pytest.raises(AgentError, match=r"http://127.0.0.1:9: ConnectionRefusedError"):
        play(lambda body: "1", {"url": "http://127.0.0.1:9"})
    with pytest.raises(UserError, match=r"rollout.agent_options.url: missing"):
        play(lambda body: "1", {})
