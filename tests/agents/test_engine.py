"""Agents around real engines: recorded tokens, time limits, retries, aborts, limits, many sessions at once."""

import asyncio
import functools
import json
import re
import sys
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.agents import client_checks
from tests.agents.agent_runs import ask, trained_runs
from tests.agents.malformed_requests import check_malformed
from tests.helpers.loop_clock import pass_time
from verl_mg.agents.agent import Session
from verl_mg.agents.command import run_command
from verl_mg.agents.engine import AgentEngine
from verl_mg.engines.engine import Request, Sample
from verl_mg.engines.trajectory import NOT_GENERATED
from verl_mg.errors import UserError
from verl_mg.rewards.reward import Reward

LIMIT = 600.0
"""Time limit of agents in seconds, which passes when they want it to."""


async def send_by_socket(session: Session, messages: list[Any], **fields: Any) -> tuple[Any, Any]:
    """Sends a conversation by a connection of its own; httpx searches all of its connections for each request."""
    host, port, path = re.fullmatch(r"http://(.+):(\d+)(/.+)", session.base_url).groups()  # type: ignore[union-attr]
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({"model": "policy", "messages": messages, **fields}).encode()
    head = f"POST {path}/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {session.api_key}\r\n"
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    return reader, writer


async def ask_by_socket(session: Session, messages: list[Any], **fields: Any) -> str:
    """The text of a reply by a connection of its own."""
    reader, writer = await send_by_socket(session, messages, **fields)
    reply = await reader.read()
    writer.close()
    assert reply.startswith(b"HTTP/1.1 200"), reply[:300]
    return str(json.loads(reply.partition(b"\r\n\r\n")[2])["choices"][0]["message"]["content"])


def collected(engine: AgentEngine, count: int) -> list[Sample]:
    samples: list[Sample] = []
    while len(samples) < count:
        samples += engine.collect(1.0)
    return samples


async def three_turns(session: Session, sample: Any) -> float:
    messages = list(session.messages)
    for number in range(3):
        messages += [await ask(session, messages, max_tokens=8), {"role": "user", "content": f"and {number}"}]
    return float(sample.record["n"])


def test_agents_trained_tokens_are_those_of_the_engine(any_engine, run_agents, chat_model):
    samples, engine = run_agents(any_engine, three_turns, 6)
    assert sorted(trained_runs(samples)) == sorted(engine.log) and len(engine.log) == 18
    assert [sample.trajectory.reward for sample in samples if sample.trajectory] == [Reward(float(i)) for i in range(6)]
    whole = AutoModelForCausalLM.from_pretrained(chat_model, dtype=torch.float32)
    for sample in samples:
        assert sample.finish == "stop" and sample.trajectory is not None and sample.trajectory.error == ""
        assert len(sample.trajectory.turns) == 3
        (segment,) = sample.trajectory.segments
        mask = torch.tensor(segment.policy_versions) != NOT_GENERATED
        tokens = torch.tensor([segment.tokens])
        scores = whole(tokens).logits[0].log_softmax(-1)[:-1].gather(1, tokens[0, 1:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(segment.logprobs)[1:][mask[1:]], scores[mask[1:]], atol=1e-4, rtol=0)
        assert not torch.tensor(segment.logprobs)[~mask].any() and 0 < mask.sum() < len(mask)


def test_agent_has_its_options_and_an_endpoint_at_the_host(hf_engine, run_agents):
    seen: list[tuple[str | None, dict[str, Any]]] = []

    async def agent(session: Session, sample: Any) -> None:
        await ask(session, session.messages, max_tokens=2)
        seen.append((httpx.URL(session.base_url).host, session.options))

    run_agents(hf_engine, agent, 1, host="127.0.0.2", level=3)
    assert seen == [("127.0.0.2", {"level": 3})]


@pytest.mark.parametrize("name", client_checks.CHECKS)
def test_endpoint_of_real_engine_satisfies_official_client(any_engine, run_agents, name):
    check = getattr(client_checks, name)

    async def agent(session: Session, sample: Any) -> float:
        where = (session.base_url, session.api_key)
        await (check(*where) if asyncio.iscoroutinefunction(check) else asyncio.to_thread(check, *where))
        return 1.0

    samples, _ = run_agents(any_engine, agent, 1, tokens=800)
    assert [(s.trajectory.error, s.trajectory.reward) for s in samples if s.trajectory] == [("", Reward(1.0))]


def test_malformed_requests_to_a_real_engine_lose_no_sample(hf_engine, run_agents, capfd):
    async def agent(session: Session, sample: Any) -> None:
        first = await ask(session, session.messages, max_tokens=4)
        if sample.record["n"] == 0:
            await asyncio.to_thread(check_malformed, session.base_url, session.api_key, 500)
        await ask(session, [*session.messages, first, {"role": "user", "content": "and then"}], max_tokens=4)

    samples, engine = run_agents(hf_engine, agent, 4, tokens=1000)
    assert [s.trajectory.error for s in samples if s.trajectory] == [""] * 4
    assert sorted(trained_runs(samples)) == sorted(engine.log) and len(engine.log) >= 8
    assert "Traceback" not in "".join(capfd.readouterr())


def test_request_of_a_client_that_leaves_is_trained_like_the_one_that_follows(hf_engine, run_agents, monkeypatch):
    submitted: list[Request] = []
    submit, alone = hf_engine.submit, asyncio.Lock()
    monkeypatch.setattr(hf_engine, "submit", lambda given, *rest: (submitted.extend(given), submit(given, *rest)))

    async def leave(session: Session) -> None:
        """Closes the connection once the engine has the request, or one of another agent."""
        before = len(submitted)
        _, writer = await send_by_socket(session, session.messages, max_tokens=9)
        await writer.drain()
        while len(submitted) == before:
            await asyncio.sleep(0.01)
        writer.close()

    async def agent(session: Session, sample: Any) -> None:
        async with alone:
            await leave(session)
        again = await ask(session, session.messages, max_tokens=9)  # as clients do after a time-out
        await ask(session, [*session.messages, again, {"role": "user", "content": "on"}], max_tokens=9)

    samples, engine = run_agents(hf_engine, agent, 8)
    turns = [len(s.trajectory.turns) for s in samples if s.trajectory]
    assert sorted(trained_runs(samples)) == sorted(engine.log) and len(engine.log) == sum(turns)
    assert 3 in turns and set(turns) <= {2, 3}, "a later one may be lost if its client leaves before it is read"


def test_agent_over_its_time_keeps_what_was_generated_and_is_not_tried_again(hf_engine, run_agents):
    async def agent(session: Session, sample: Any) -> None:
        await ask(session, session.messages, max_tokens=4)
        session.log("waiting")
        pass_time(LIMIT)
        try:
            await asyncio.sleep(5.0)  # it is over its time before it is here
        finally:
            raise RuntimeError("interrupted")

    (sample,), engine = run_agents(hf_engine, agent, 1, retries=2, timeout=LIMIT)
    assert sample.finish == "timeout" and sample.trajectory is not None
    assert sample.trajectory.reward == Reward(-1.0) and f"longer than {LIMIT:g} s" in sample.trajectory.error
    assert "waiting" in sample.trajectory.log
    assert trained_runs([sample]) == engine.log and len(engine.log) == 1


def test_agent_that_fails_is_tried_again_in_a_new_session(hf_engine, run_agents):
    keys: list[str] = []

    async def agent(session: Session, sample: Any) -> dict[str, Any]:
        keys.append(session.api_key)
        await ask(session, session.messages, max_tokens=3)
        if len(keys) < 3:
            raise ValueError(f"failure {len(keys)}")
        return {"reward": 0.5, "steps": 2, "note": "text"}

    (sample,), engine = run_agents(hf_engine, agent, 1, retries=2)
    assert len(set(keys)) == 3 and len(engine.log) == 3
    assert sample.trajectory is not None and sample.trajectory.reward == Reward(0.5, {"steps": 2.0})
    assert trained_runs([sample]) == engine.log[2:]

    keys.clear()
    (sample,), engine = run_agents(hf_engine, agent, 1, retries=1)
    assert sample.finish == "stop" and sample.trajectory is not None
    assert sample.trajectory.error == "ValueError: failure 2" and sample.trajectory.reward == Reward(-1.0)
    assert trained_runs([sample]) == engine.log[1:], "the last attempt is kept"


def test_task_of_an_agent_that_ends_the_loop_ends_the_job(hf_engine, run_agents):
    async def leave() -> None:
        sys.exit("no key")

    async def agent(session: Session, sample: Any) -> None:
        await asyncio.create_task(leave())

    with pytest.raises(RuntimeError, match=r"the endpoint of agents failed: SystemExit\('no key'\)"):
        run_agents(hf_engine, agent, 1)


@pytest.mark.parametrize(
    ("returned", "reward", "error"),
    [
        (None, None, ""),
        (Reward(2.0, {"a": 1.0}, "x"), Reward(2.0, {"a": 1.0}, "x"), ""),
        (True, Reward(1.0), ""),
        (float("nan"), Reward(-1.0), "not a finite number"),
        ({"score": 1.0}, Reward(-1.0), "without 'reward'"),
        ("1.0", Reward(-1.0), "not a finite number"),
        ({"reward": {"solver": 1.0}}, Reward(-1.0), "names the agent 'solver', but rollout.agent_names is empty"),
        ({"reward": 1.0} | {f"part {number}": 0.0 for number in range(101)}, Reward(-1.0), "more than 100 parts"),
        ({"reward": 1.0, "\udc80": 0.0}, Reward(-1.0), "one whose name cannot be printed"),
        (asyncio.CancelledError(), Reward(-1.0), "CancelledError"),
        (SystemExit("no"), Reward(-1.0), "SystemExit: no"),
    ],
)
def test_agent_result_becomes_the_reward(hf_engine, run_agents, returned, reward, error):
    async def agent(session: Session, sample: Any) -> Any:
        if isinstance(returned, BaseException):
            raise returned
        return returned

    (sample,), engine = run_agents(hf_engine, agent, 1)
    assert sample.trajectory is not None and sample.trajectory.reward == reward and error in sample.trajectory.error
    assert (error == "") == (sample.trajectory.error == "")
    assert not engine.log and not sample.trajectory.segments


def test_abort_cancels_agents_and_their_requests_whatever_they_raise(any_engine, run_agents):
    begun: list[int] = []
    ended: list[int] = []

    async def agent(session: Session, sample: Any) -> None:
        begun.append(sample.record["n"])
        try:
            while True:
                await ask(session, session.messages, max_tokens=150)
        finally:
            ended.append(sample.record["n"])
            raise RuntimeError("interrupted")

    def drive(engine: AgentEngine) -> list[Sample]:
        while len(begun) < 4:
            engine.collect(0.05)
        engine.collect(0.3)
        engine.abort()
        return collected(engine, 4)

    samples, _ = run_agents(any_engine, agent, 4, tokens=100_000, drive=drive)
    assert [(s.finish, s.trajectory, s.tokens) for s in samples] == [("abort", None, ())] * 4
    assert sorted(ended) == [0, 1, 2, 3]
    assert any_engine.collect(0.0) == []


def test_abort_right_after_submit_returns_every_sample(hf_engine, run_agents):
    def drive(engine: AgentEngine) -> list[Sample]:
        engine.abort()
        return collected(engine, 50)

    samples, _ = run_agents(hf_engine, three_turns, 50, drive=drive)
    assert sorted(s.id for s in samples) == list(range(50)) and {s.finish for s in samples} == {"abort"}


def test_agents_run_up_to_the_limit_at_once(hf_engine, run_agents):
    slots: list[int] = []

    def drive(engine: AgentEngine) -> list[Sample]:
        slots.append(engine.num_free_slots())
        samples = collected(engine, 3)
        slots.append(engine.num_free_slots())
        return samples

    run_agents(hf_engine, three_turns, 3, concurrency=5, drive=drive)
    assert slots == [2, 5]


def test_reply_ends_at_stop_text_with_the_tokens_up_to_it(any_engine, run_agents):
    replies: list[tuple[str, str]] = []

    async def agent(session: Session, sample: Any) -> None:
        free = await ask(session, session.messages, max_tokens=40)
        text = str(free["content"])
        if not (stop := text[len(text) // 2 :][:2]):
            return
        cut = await ask(session, session.messages, max_tokens=40, stop=[stop])
        replies.append((stop, str(cut["content"])))

    samples, _ = run_agents(any_engine, agent, 8)
    assert len(replies) > 3 and all(stop not in text for stop, text in replies)
    cuts = [turn for s in samples if s.trajectory for turn in s.trajectory.turns[1:]]
    assert any(turn.finish == "stop" and turn.tokens < 40 for turn in cuts)
    turns = [turn for s in samples if s.trajectory for turn in s.trajectory.turns]
    assert sum(len(tokens) for _, tokens in trained_runs(samples)) == sum(turn.tokens for turn in turns)


def test_reply_beyond_the_tokens_of_a_sample_is_refused(hf_engine, run_agents):
    errors: list[str] = []

    async def agent(session: Session, sample: Any) -> None:
        try:
            for _ in range(100):
                await ask(session, session.messages)
        except RuntimeError as error:
            errors.append(str(error))

    (sample,), engine = run_agents(hf_engine, agent, 1, tokens=30)
    assert sum(len(tokens) for _, tokens in engine.log) == 30
    assert errors[0].startswith("400: messages: no token is left") and "rollout.max_new_tokens=30" in errors[0]
    assert sample.trajectory is not None and sample.trajectory.segments[-1].truncated


def test_reply_that_the_agent_limits_is_not_truncated(hf_engine, run_agents):
    async def agent(session: Session, sample: Any) -> None:
        reply = await ask(session, session.messages, max_tokens=3)
        if sample.record["n"]:
            await ask(session, [*session.messages, reply, {"role": "user", "content": "on"}])

    samples, _ = run_agents(hf_engine, agent, 2, tokens=7)
    trajectories = [sample.trajectory for sample in samples if sample.trajectory]
    assert [turn.finish for trajectory in trajectories for turn in trajectory.turns] == ["length"] * 3
    assert [[segment.truncated for segment in t.segments] for t in trajectories] == [[False], [True]]


def test_replies_of_models_that_are_not_named_are_not_trained(hf_engine, run_agents):
    async def agent(session: Session, sample: Any) -> None:
        messages = list(session.messages)
        for side in ("white", "black", "white"):
            reply = await ask(session, messages, model=side, max_tokens=6)
            messages += [reply, {"role": "user", "content": "your move"}]

    (sample,), engine = run_agents(hf_engine, agent, 1, trained=["white"])
    assert sample.trajectory is not None and [t.trained for t in sample.trajectory.turns] == [True, False, True]
    assert trained_runs([sample]) == [engine.log[0], engine.log[2]]


async def debate(session: Session, sample: Any) -> Any:
    """Two agents in one conversation, of which each takes the replies of the other as given."""
    messages = list(session.messages)
    for name in ("solver", "critic", "solver", "critic"):
        reply = await ask(session, messages, model=session.agent(name).model, max_tokens=5)
        messages += [reply, {"role": "user", "content": "and you"}]
    return {"reward": {"solver": 1.0, "critic": {"reward": 0.5, "tone": 3.0}}, "turns": 4}


DEBATE = """
import json, os, urllib.request
messages = json.load(open(os.environ["VERL_MG_SAMPLE"]))["messages"]
for name in ("solver", "critic", "solver", "critic"):
    body = json.dumps({"model": name, "messages": messages, "max_tokens": 5}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    reply = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages += [{"role": "assistant", "content": reply["content"]}, {"role": "user", "content": "and you"}]
reward = {"reward": {"solver": 1.0, "critic": {"reward": 0.5, "tone": 3.0}}, "turns": 4}
json.dump(reward, open(os.environ["VERL_MG_REWARD"], "w"))
"""
OF_DEBATE = {"solver": Reward(1.0, {"turns": 4.0}), "critic": Reward(0.5, {"turns": 4.0, "tone": 3.0})}


def test_replies_of_agents_with_names_do_not_depend_on_who_asks_first(hf_engine, run_agents):
    def replies(*order: str) -> dict[str, Any]:
        async def agent(session: Session, sample: Any) -> None:
            for name in order:
                await ask(session, session.messages, model=name, max_tokens=5)

        (sample,), _ = run_agents(hf_engine, agent, 1, names=["solver", "critic"])
        return {turn.model: turn.reply for turn in sample.trajectory.turns}

    first = replies("solver", "critic")
    assert first == replies("critic", "solver") and first["solver"] != first["critic"]


def test_agents_with_numbers_in_their_names_draw_different_replies(hf_engine, run_agents):
    async def agent(session: Session, sample: Any) -> None:
        for name in ("player", "player1"):
            for _ in range(12):
                await ask(session, session.messages, model=name, max_tokens=9)

    (sample,), _ = run_agents(hf_engine, agent, 1, names=["player", "player1"])
    by_agent = {
        name: [turn.reply for turn in sample.trajectory.turns if turn.model == name] for name in ("player", "player1")
    }
    assert by_agent["player"][10] != by_agent["player1"][0] and by_agent["player"][11] != by_agent["player1"][1]


@pytest.mark.parametrize("kind", ["function", "command"])
def test_agents_with_names_have_separate_segments_and_rewards(hf_engine, run_agents, kind):
    command = functools.partial(run_command, ["python3", "-c", DEBATE], timeout=LIMIT)
    (sample,), engine = run_agents(
        hf_engine, debate if kind == "function" else command, 1, names=["solver", "critic"], trained=[]
    )
    assert sample.trajectory is not None and sample.trajectory.error == ""
    assert sample.trajectory.reward == Reward(0.75, agents=OF_DEBATE)
    assert [turn.model for turn in sample.trajectory.turns] == ["solver", "critic"] * 2
    segments = sample.trajectory.segments
    assert [segment.agent for segment in segments] == ["solver", "critic"] and segments[1].prefix_of == 0
    assert [turn.segment for turn in sample.trajectory.turns] == [0, 1, 0, 1]
    assert trained_runs([sample]) == [engine.log[turn] for turn in (0, 2, 1, 3)]


@pytest.mark.parametrize(
    ("reward", "error"),
    [
        ({"solver": 1.0}, "it has a number for solver, but none for critic, which has trained turns. Return one for"),
        ({"solver": 1.0, "critic": 1.0, "judge": 0.0}, "names the agent 'judge', but rollout.agent_names has solver,"),
        ({"solver": 1.0, "critic": "good"}, "the agent returned 'good', which is not a finite number"),
        ({"solver": 1.0, "critic": {"score": 1.0}}, "mapping without 'reward': {'score': 1.0}"),
    ],
)
def test_reward_by_agent_that_is_not_of_the_agents_fails(hf_engine, run_agents, reward, error):
    async def agent(session: Session, sample: Any) -> Any:
        for name in ("solver", "critic"):
            await ask(session, session.messages, model=name, max_tokens=2)
        return {"reward": reward}

    (sample,), _ = run_agents(hf_engine, agent, 1, names=["solver", "critic"])
    assert sample.trajectory is not None and error in sample.trajectory.error
    assert sample.trajectory.reward == Reward(-1.0)


@pytest.mark.parametrize("names", [(), ("solver", "critic")])
def test_agent_that_is_not_named_is_refused(hf_engine, run_agents, names):
    async def agent(session: Session, sample: Any) -> Any:
        if names:
            with pytest.raises(
                RuntimeError, match=r"404: model: 'judge' is not in rollout.agent_names \(solver, critic"
            ):
                await ask(session, session.messages, model="judge", max_tokens=2)
        session.agent("judge")

    message = "has solver, critic" if names else "is empty"
    with pytest.raises(UserError, match=f"rollout.agent_names: it {message}, and the agent names 'judge'. Add this"):
        run_agents(hf_engine, agent, 1, names=names)


def test_request_after_the_agent_has_returned_is_refused(hf_engine, run_agents):
    sessions: list[Session] = []

    async def agent(session: Session, sample: Any) -> None:
        sessions.append(session)

    run_agents(hf_engine, agent, 1)
    headers = {"authorization": f"Bearer {sessions[0].api_key}"}
    response = httpx.post(f"{sessions[0].base_url}/chat/completions", headers=headers, json={})
    assert response.status_code == 404 and "is not open" in response.json()["error"]["message"]


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.nightly)])
def test_agents_at_once_lose_no_turn(hf_engine, run_agents, count):
    received: dict[int, list[str]] = {}
    everybody = asyncio.Event()

    async def agent(session: Session, sample: Any) -> None:
        number = sample.record["n"]
        texts = received[number] = []
        if len(received) == count:
            everybody.set()
        await everybody.wait()  # all sessions are open before the first request

        async def branch(name: str) -> None:
            messages = [*session.messages, {"role": "user", "content": f"{name} of {number}"}]
            for _ in range(2):
                text = await ask_by_socket(session, messages, max_tokens=3)
                texts.append(text)
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "on"}]

        await asyncio.gather(branch("a"), branch("b"))

    samples, engine = run_agents(hf_engine, agent, count, timeout=600.0, concurrency=count)
    assert all(s.trajectory is not None and s.trajectory.error == "" for s in samples)
    assert sorted(trained_runs(samples)) == sorted(engine.log) and len(engine.log) == 4 * count
    for sample in samples:
        assert sample.trajectory is not None and len(sample.trajectory.turns) == 4
        assert sorted(t.reply["content"] for t in sample.trajectory.turns) == sorted(received[sample.id])
        written = [m["content"] for t in sample.trajectory.turns for m in t.messages]
        assert f"a of {sample.id}" in written and f"b of {sample.id}" in written
    assert engine.most_at_once > min(count, 256) // 2
