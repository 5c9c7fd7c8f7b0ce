"""Replies of sessions whose tokens are given."""

from __future__ import annotations

import asyncio

import pytest

from tests.rollout.agents.agent_runs import requests_of
from tests.rollout.agents.conversations import KEEPING, chat_tokenizer, renderer_of
from verl_mg.rollout.agents.call import Call
from verl_mg.rollout.agents.parsers import ReplyParser
from verl_mg.rollout.agents.sessions import OpenSession, Sessions
from verl_mg.rollout.engine import Sample, Sampling


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

    async def generate(session: OpenSession, context: tuple[int, ...], sampling: Sampling) -> Sample:
        return sample

    sessions = Sessions(renderer, ReplyParser(chat_tokenizer(KEEPING), "qwen25", None), generate, 512, ())
    session = sessions.open(requests_of(1)[0], Sampling(max_new_tokens=40))
    call = Call(({"role": "user", "content": "count"},), stop=stops)
    reply = asyncio.run(sessions.complete(session.id, session.key, call))
    assert (reply.text, reply.finish, len(reply.tokens)) == (content, "stop", kept)
    (segment,) = session.trajectory(None, "").segments
    assert segment.tokens[-kept:] == tokens[:kept] and sum(v == 0 for v in segment.policy_versions) == kept
