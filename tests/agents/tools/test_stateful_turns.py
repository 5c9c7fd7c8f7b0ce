"""Samples of several turns whose tools have a state: when it begins and ends, also over aborts."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.agents.tools.ledgers import Ledger, counts, ledger, tools_of
from tests.agents.tools.scripted import (
    PROMPT,
    SAMPLING,
    Scripted,
    conversations,
    encode,
    observations,
    qwen,
    turns_of,
    worded,
)
from tests.helpers.traces import needs_sglang
from verl_mg.agents.tools.multi_turn import MultiTurnEngine
from verl_mg.data.prompts import Prompt
from verl_mg.engines import Request, Sample

pytestmark = needs_sglang

ADD_1, ADD_2, ADD_4 = (qwen("add", n=n) for n in (1, 2, 4))


def engine_with(kind: type[Ledger], script: Callable[[Request], str]) -> tuple[Scripted, MultiTurnEngine]:
    engine = Scripted(script)
    return engine, conversations(engine, tools_of(kind).tools, max_turns=4)


def saw(request: Request, result: str) -> bool:
    return request.context[-len(worded(result)) :] == worded(result)


def test_state_lasts_from_the_first_call_to_the_end_of_the_sample():
    kind = ledger()
    engine, wrapper = engine_with(kind, lambda r: "ok" if r.id % 2 else turns_of(ADD_1, ADD_2, ADD_4, "ok")(r))
    wrapper.generate([Request(i, PROMPT, 0) for i in range(8)], SAMPLING)
    wrapper.close()
    for i in range(0, 8, 2):
        later = [request for request in engine.requested if request.id == i and request.partial]
        assert all(saw(request, total) for request, total in zip(later, ("1", "3", "7"), strict=True))
    assert counts(kind.events, "opened") == counts(kind.events, "closed") == [1] * 4, "others call nothing"


def test_state_is_opened_with_the_record():
    def user(self: Ledger) -> str:
        """Tell the user."""
        return f"{self.sample.prompt} {self.sample.answer} {self.sample.record['user']}"

    kind = ledger(user=user)
    engine, wrapper = engine_with(kind, turns_of(qwen("user"), "ok"))
    prompt = Prompt(0, PROMPT, "6*7?", "42", {"user": "ada"})
    wrapper.generate([Request(7, PROMPT, 0, origin=prompt)], SAMPLING)
    assert saw(engine.requested[1], "6*7? 42 ada")
    wrapper.close()


@pytest.mark.parametrize("limit", [3, len(encode(ADD_1)) + 2, 1000])
def test_state_is_closed_however_the_sample_ends(limit):
    kind = ledger()
    _, wrapper = engine_with(kind, turns_of(ADD_1, *[ADD_2] * 3))
    wrapper.generate([Request(7, PROMPT, 0)], replace(SAMPLING, max_new_tokens=limit))
    wrapper.close()
    made = [1] if limit > 3 else []
    assert counts(kind.events, "opened") == counts(kind.events, "closed") == made


@pytest.mark.parametrize("by_id", [False, True])
def test_state_of_a_resumed_sample_repeats_its_earlier_calls(by_id):
    kind = ledger()
    script = turns_of(f"{ADD_1}\n{qwen('oracle')}\n{qwen('add')}", ADD_2, qwen("wait"), "never")
    engine, wrapper = engine_with(kind, script)
    cut = aborted_while(wrapper, kind, "waits", by_id)
    assert observations(Request(7, PROMPT, 0, cut)) == 2
    engine.script = turns_of("", "", ADD_4, "ok")
    turn = len(encode(qwen("wait"))) + 1
    begun = replace(cut, **{name: getattr(cut, name)[:-turn] for name in ("tokens", "logprobs", "policy_versions")})
    wrapper.generate([Request(7, PROMPT, 0, begun)], SAMPLING)
    assert saw(engine.requested[-1], "7")
    wrapper.close()
    assert [event for _, event in kind.events] == ["made", "opened", "waits", "closed", "made", "opened", "closed"]


def test_state_of_a_sample_aborted_during_its_first_call_repeats_nothing():
    kind = ledger()
    engine, wrapper = engine_with(kind, turns_of(f"{ADD_1}\n{qwen('wait')}", "ok"))
    cut = aborted_while(wrapper, kind, "waits")

    async def returns(self: Ledger) -> str:
        """Return."""
        return "waited"

    kind.wait = returns  # type: ignore[method-assign, assignment]
    wrapper.generate([Request(7, PROMPT, 0, cut)], SAMPLING)
    assert engine.requested[-1].context[-len(worded("1", "waited")) :] == worded("1", "waited"), "added once"
    wrapper.close()
    assert counts(kind.events, "closed") == [1, 1]


def test_state_at_the_end_of_a_job_is_closed():
    kind = ledger()
    _, wrapper = engine_with(kind, turns_of(qwen("wait"), "ok"))
    wrapper.submit([Request(i, PROMPT, 0) for i in range(3)], SAMPLING)
    while sum(event == "waits" for _, event in kind.events) < 3:
        assert wrapper.collect(timeout=0.01) == []
    wrapper.close()
    assert counts(kind.events, "closed") == [1] * 3


def aborted_while(wrapper: MultiTurnEngine, kind: type[Ledger], event: str, by_id: bool = False) -> Sample:
    wrapper.submit([Request(7, PROMPT, 0)], SAMPLING)
    while event not in [each for _, each in kind.events]:
        assert wrapper.collect(timeout=0.01) == []
    if by_id:
        wrapper.abort_samples([7])
    else:
        wrapper.abort()
    (cut,) = wrapper.collect(timeout=60)
    assert cut.finish == "abort"
    return cut
