"""Replies of sessions whose tokens are given."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from tests.agents.agent_runs import requests_of
from tests.agents.conversations import KEEPING, chat_tokenizer, renderer_of
from verl_mg.agents import parsers
from verl_mg.agents.call import Call, RequestError
from verl_mg.agents.history import Context
from verl_mg.agents.parsers import ParsedReply, ReplyParser
from verl_mg.agents.sessions import OpenSession, Sessions
from verl_mg.engines.engine import Finish, Sample, Sampling
from verl_mg.errors import UserError


@pytest.mark.parametrize(
    ("stops", "content", "kept"),
    [
        ((), "one two", 8),
        (("|im_end",), "one two", 8),
        (("e t", "two"), "on", 5),
        (("<",), "one two", 8),
        (("o",), "", 1),
    ],
)
def test_reply_with_stop_texts_ends_before_the_first(stops: tuple[str, ...], content: str, kept: int) -> None:
    renderer = renderer_of(KEEPING)
    tokens = renderer.tokens("one two<|im_end|>")
    sample = Sample(0, tokens, (-1.0,) * len(tokens), (0,) * len(tokens), "stop")

    async def generate(session: OpenSession, context: Context, sampling: Sampling) -> Sample:
        return sample

    sessions = Sessions(renderer, ReplyParser(chat_tokenizer(KEEPING), "qwen25", None), generate, 512, ())
    session = sessions.open(requests_of(1)[0], Sampling(max_new_tokens=40, stop_token_ids=tokens[-1:]))
    call = Call(({"role": "user", "content": "count"},), stop=stops)
    reply = asyncio.run(sessions.complete(session.id, session.key, call))
    assert (reply.text, reply.finish, len(reply.tokens)) == (content, "stop", kept)
    (segment,) = session.trajectory(None, "").segments
    assert segment.tokens[-kept:] == tokens[:kept] and sum(v == 0 for v in segment.policy_versions) == kept


CALL = Call(({"role": "user", "content": "count"},))


async def generate_two(session: OpenSession, context: Context, sampling: Sampling) -> Sample:
    tokens = renderer_of(KEEPING).tokens("two<|im_end|>")
    return Sample(0, tokens, (-1.0,) * len(tokens), (0,) * len(tokens), "stop")


def test_session_closed_between_the_steps_of_a_request_is_not_found() -> None:
    parser = ReplyParser(chat_tokenizer(KEEPING), "qwen25", None)
    sessions = Sessions(renderer_of(KEEPING), parser, generate_two, 512, ())
    session = sessions.open(requests_of(1)[0], Sampling(max_new_tokens=40))
    sessions.authorize(session.id, session.key)
    sessions.close(session)
    for request in (sessions.complete, sessions.count_tokens):
        with pytest.raises(RequestError, match="is not open") as refused:
            asyncio.run(request(session.id, session.key, CALL))  # type: ignore[arg-type]
        assert refused.value.status == 404


def test_session_closed_while_a_reply_is_recorded_has_all_of_it() -> None:
    finished: list[int] = []

    class Closing(ReplyParser):
        """Closes the session in another thread while the reply is recorded."""

        def parse(self, text: str, tools: Sequence[Any], prompt: str = "") -> ParsedReply:
            closing.start()
            closing.join(0.2)
            return super().parse(text, tools, prompt)

    def close() -> None:
        sessions.close(session)
        trajectory = session.trajectory(None, "")
        finished.extend(len(part) for s in trajectory.segments for part in (s.tokens, s.logprobs, s.policy_versions))
        finished.append(len(trajectory.turns))

    closing = threading.Thread(target=close)
    parser = Closing(chat_tokenizer(KEEPING), "qwen25", None)
    sessions = Sessions(renderer_of(KEEPING), parser, generate_two, 512, ())
    session = sessions.open(requests_of(1)[0], Sampling(max_new_tokens=40))
    reply = asyncio.run(sessions.complete(session.id, session.key, CALL))
    closing.join()
    assert finished == [reply.prompt_tokens + len(reply.tokens)] * 3 + [1]


@pytest.mark.parametrize(
    ("finish", "message"), [("abort", "was aborted"), ("timeout", "no token within its time limit")]
)
def test_reply_without_tokens_is_refused_and_not_recorded(finish: Finish, message: str) -> None:
    async def generate(session: OpenSession, context: Context, sampling: Sampling) -> Sample:
        return Sample(0, (), (), (), finish)

    parser = ReplyParser(chat_tokenizer(KEEPING), "qwen25", None)
    sessions = Sessions(renderer_of(KEEPING), parser, generate, 512, ())
    session = sessions.open(requests_of(1)[0], Sampling(max_new_tokens=40))
    with pytest.raises(RequestError, match=message) as refused:
        asyncio.run(sessions.complete(session.id, session.key, CALL))
    assert refused.value.status == 503 and session.trajectory(None, "").segments == ()


def test_tools_without_sglang_end_the_job_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsers, "_sglang", lambda: None)
    parser = ReplyParser(chat_tokenizer(KEEPING), "qwen25", None)
    sessions = Sessions(renderer_of(KEEPING), parser, generate_two, 512, ())
    session = sessions.open(requests_of(1)[0], Sampling(max_new_tokens=40))
    assert asyncio.run(sessions.complete(session.id, session.key, CALL)).text == "two"
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    with pytest.raises(UserError, match=r"rollout.tool_call_parser=qwen25: .* Install it"):
        asyncio.run(sessions.complete(session.id, session.key, Call(CALL.messages, (tool,))))
