"""Multi-turn generation: the requests that the engine receives, token by token, and the samples that result."""

import asyncio
import json
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.agents.tools.scripted import (
    EOS,
    PROMPT,
    SAMPLING,
    TOKENIZER,
    Scripted,
    conversations,
    encode,
    observations,
    qwen,
    turns_of,
    worded,
)
from tests.helpers.traces import needs_sglang
from verl_mg.agents.tool_calls import ToolCall
from verl_mg.agents.tools.builtin import calculator, python
from verl_mg.agents.tools.chat_format import ToolResult
from verl_mg.agents.tools.multi_turn import MultiTurnEngine
from verl_mg.agents.tools.tool import Tool
from verl_mg.agents.tools.tool_runner import UNREADABLE
from verl_mg.engines import Request, Sample, Sampling
from verl_mg.engines.hf.engine import HFEngine
from verl_mg.engines.trajectory import NOT_GENERATED
from verl_mg.models.tiny_model import make_tiny_model

pytestmark = needs_sglang

CALL = qwen("calculator", expression="6*7")


async def endless() -> str:
    """Never return."""
    await asyncio.Event().wait()
    return ""


def one(engine: Scripted, sampling: Sampling = SAMPLING, **options: Any) -> Sample:
    return conversations(engine, **options).generate([Request(7, PROMPT, 0)], sampling)[0]


def observed(text: str, **options: Any) -> tuple[int, ...]:
    """The tokens that follow a first turn in the context of the second."""
    engine = Scripted(turns_of(text, "ok"))
    assert one(engine, **options).finish == "stop"
    start = (*PROMPT, *encode(text), EOS)
    assert engine.requested[1].context[: len(start)] == start
    return engine.requested[1].context[len(start) :]


def test_collect_context_is_the_prompt_and_all_tokens_since():
    engine = Scripted(turns_of(f"I ask 42 {CALL}", CALL, "It is 42."))
    sample = one(engine)
    first = (*encode(f"I ask 42 {CALL}"), EOS, *worded("42"))
    second = (*first, *encode(CALL), EOS, *worded("42"))
    assert [request.context for request in engine.requested] == [PROMPT, PROMPT + first, PROMPT + second]
    assert sample.tokens == (*second, *encode("It is 42."), EOS)
    assert TOKENIZER.convert_tokens_to_ids("42") in worded("42"), "re-tokenising the turns would show"
    assert TOKENIZER.convert_tokens_to_ids("42") not in encode("It is 42.")
    assert sample.finish == "stop"
    assert {request.seed for request in engine.requested} == {0}


def test_collect_observations_have_no_logprob_and_no_version():
    engine = Scripted(turns_of(CALL, "ok"))
    engine.version = 5
    sample = one(engine)
    turn, seen = len(encode(CALL)) + 1, len(worded("42"))
    assert sample.policy_versions == (5,) * turn + (NOT_GENERATED,) * seen + (5,) * 3
    assert sample.generated_mask == (True,) * turn + (False,) * seen + (True,) * 3
    positions = [len(PROMPT) + t for t in range(len(sample.tokens))]
    pairs = zip(positions, sample.generated_mask, strict=True)
    assert sample.logprobs == tuple(-0.01 * position if generated else 0.0 for position, generated in pairs)


def test_collect_experts_of_a_turn_remain_unchanged():
    engine = Scripted(turns_of(CALL, CALL, "ok"))
    script = engine.script

    def newer(request: Request) -> str:
        engine.version = observations(request)
        return script(request)

    engine.script = newer
    sample = one(engine)
    turn, seen = len(encode(CALL)) + 1, len(worded("42"))
    # The token that ends a turn is fed with the next one, as are the tokens that were observed.
    fed = [0] * (len(PROMPT) + turn - 1) + [1] * (1 + seen + turn - 1) + [2] * (1 + seen + 2)
    assert sample.routed_experts is not None
    assert sample.routed_experts[:, 0].tolist() == [[i, version] for i, version in enumerate(fed)]


def test_collect_calls_of_a_turn_run_concurrently():
    meet = threading.Barrier(2)

    def wait(n: int) -> str:
        """Wait for the other."""
        meet.wait(timeout=60)
        return f"met {n}"

    assert observed(f"{qwen('wait', n=1)}\n{qwen('wait', n=2)}", tools=[wait]) == worded("met 1", "met 2")


@pytest.mark.parametrize(
    ("text", "result"),
    [
        (qwen("oracle", question="?"), "error: there is no tool 'oracle'; the tools are: calculator, endless"),
        (qwen("calculator"), "error: calculator: expression: Field required"),
        (qwen("calculator", expression="1/0"), "error: calculator raised ZeroDivisionError: division by zero"),
        (qwen("endless"), "error: endless took longer than 0.2 s"),
        ('<tool_call>\n{"name": "calculator", "arg\n</tool_call>', UNREADABLE),
        ("<tool_call>\n42\n</tool_call>", UNREADABLE),
    ],
)
def test_collect_failed_call_is_observed_as_an_error(text, result):
    limit = 0.2 if "endless" in text else 60
    assert observed(text, tools=[calculator, endless], tool_timeout_s=limit) == worded(result)


def test_collect_call_in_another_format_is_made():
    call = '<|python_tag|>{"name": "calculator", "parameters": {"expression": "6*7"}}'
    assert observed(call, tool_call_parser="llama3") == worded("42")


@pytest.mark.parametrize("opened", [False, True])
def test_collect_call_in_the_reasoning_is_not_made(opened):
    # The template of a model that always thinks opens the reasoning at the end of the prompt.
    prompt, mark = (encode("?<think>"), "") if opened else (encode("?"), "<think>")
    turns = turns_of(f"{mark}or {CALL}</think>{CALL}", f"<think>or {CALL}</think>7", "never")
    engine = conversations(Scripted(turns), reasoning="qwen3")
    engine.submit([Request(0, prompt, 0)], SAMPLING)
    (sample,) = engine.collect(60)
    text = TOKENIZER.decode(sample.tokens)
    assert text.count("<tool_response>") == 1 and "never" not in text


def test_collect_result_that_is_not_unicode_is_replaced():
    def files() -> str:
        """List files, whose names may be any bytes."""
        return os.fsdecode(b"caf\xe9")

    assert observed(qwen("files"), tools=[files]) == worded("caf?")


@pytest.mark.usefixtures("sandbox")
def test_collect_python_tool_runs_in_the_sandbox():
    assert observed(qwen("python", code="print(6 * 7)"), tools=[python]) == worded("42")


@pytest.mark.parametrize("max_turns", [1, 2, 3])
def test_collect_last_turn_makes_no_calls(max_turns):
    engine = Scripted(turns_of(CALL, CALL, CALL))
    sample = one(engine, max_turns=max_turns)
    assert (len(engine.requested), sample.tokens[-1], sample.finish) == (max_turns, EOS, "stop")


def test_collect_token_limit_includes_observations():
    turn, seen = len(encode(CALL)) + 1, len(worded("42"))
    for limit, length, finish in (
        (turn - 1, turn - 1, "length"),
        (turn + seen, turn, "length"),  # no space behind the observation
        (turn + seen + 1, turn + seen + 1, "length"),
        (turn + seen + 3, turn + seen + 3, "stop"),
    ):
        sample = one(Scripted(turns_of(CALL, "ok")), replace(SAMPLING, max_new_tokens=limit))
        assert (len(sample.tokens), sample.finish) == (length, finish), limit
        assert sample.routed_experts is not None
        assert len(sample.routed_experts) == len(PROMPT) + length - 1


def test_collect_other_samples_continue_while_tools_run():
    others_done = threading.Event()

    def patient() -> str:
        """Wait for the others."""
        others_done.wait(timeout=60)
        return "waited"

    engine = Scripted(lambda r: "ok" if r.partial or r.id % 2 else qwen("patient"), per_collect=5)
    wrapper = conversations(engine, tools=[patient])
    wrapper.submit([Request(i, PROMPT, i) for i in range(40)], SAMPLING)
    done: list[Sample] = []
    while len(done) < 20:
        done += wrapper.collect(timeout=60)
    assert sorted(sample.id for sample in done) == list(range(1, 40, 2))
    assert wrapper.num_free_slots() == 50 - 20, "the others come back"
    others_done.set()
    while len(done) < 40:
        done += wrapper.collect(timeout=60)
    assert {sample.id for sample in done} == set(range(40))
    assert {len(sample.tokens) for sample in done} == {3, len(encode(qwen("patient"))) + 1 + len(worded("waited")) + 3}
    assert wrapper.num_free_slots() == 50
    assert wrapper.collect(timeout=60) == []


def test_collect_respects_its_timeout():
    wrapper = conversations(Scripted(turns_of(qwen("endless"), "ok")), tools=[endless])
    wrapper.submit([Request(7, PROMPT, 0)], SAMPLING)
    assert wrapper.collect(timeout=0.2) == []
    wrapper.abort()
    assert [sample.finish for sample in wrapper.collect(timeout=60)] == ["abort"]


def test_abort_during_a_tool_call_can_be_resumed():
    release, made = threading.Event(), []

    def patient() -> str:
        """Wait."""
        made.append(1)
        release.wait(timeout=60)
        return "42"

    script = turns_of(CALL, qwen("patient"), "ok", "never")
    engine = Scripted(script)
    wrapper = conversations(engine, tools=[calculator, patient])
    wrapper.submit([Request(7, PROMPT, 3)], SAMPLING)
    while not made:
        assert wrapper.collect(timeout=0.01) == []
    wrapper.abort()
    (cut,) = wrapper.collect(timeout=60)
    assert cut.finish == "abort"
    assert cut.tokens[-1] == EOS and cut.generated_mask[-1]
    assert wrapper.num_free_slots() == 50
    release.set()
    engine.version = 1
    (sample,) = wrapper.generate([Request(7, PROMPT, 3, cut)], SAMPLING)
    assert len(made) == 2, "the call is made again"
    expected = Scripted(script)
    whole = one(expected, tools=[calculator, patient])
    assert sample.tokens == whole.tokens
    assert [request.context for request in engine.requested] == [request.context for request in expected.requested]
    assert sample.policy_versions[-1] == 1
    assert sample.finish == "stop"


def test_abort_during_generation_can_be_resumed():
    engine = Scripted(turns_of(CALL, CALL, "unreached"))
    engine.held = {7}
    wrapper = conversations(engine, max_turns=2)
    wrapper.submit([Request(7, PROMPT, 0)], SAMPLING)
    assert wrapper.collect(timeout=0.05) == []
    wrapper.abort()
    (cut,) = wrapper.collect(timeout=60)
    assert (cut.tokens, cut.finish) == (encode(CALL)[:3], "abort")
    # The engine ends the turn, then writes the second, which is the last.
    engine.held = set()
    engine.script = lambda request: CALL[len("<tool_call>") :] if not observations(request) else CALL
    engine.requested.clear()
    text = "<tool_call>"
    begun = replace(cut, tokens=encode(text), logprobs=(0.0,) * 11, policy_versions=(0,) * 11)
    (sample,) = wrapper.generate([Request(7, PROMPT, 0, begun)], SAMPLING)
    assert len(engine.requested) == 2
    assert sample.tokens == (*encode(CALL), EOS, *worded("42"), *encode(CALL), EOS)
    # Cut behind its observation, it has written one turn of two.
    engine.requested.clear()
    seen = len(encode(CALL)) + 1 + len(worded("42"))
    columns = {name: getattr(sample, name)[:seen] for name in ("tokens", "logprobs", "policy_versions")}
    begun = replace(sample, **columns)
    assert wrapper.generate([Request(7, PROMPT, 0, begun)], SAMPLING)[0].tokens == sample.tokens
    assert len(engine.requested) == 1


def test_abort_at_the_end_of_a_turn_makes_no_calls():
    made = []

    def note() -> str:
        """Note that it was called."""
        made.append(1)
        return ""

    engine = Scripted(turns_of(qwen("note")))
    wrapper = conversations(engine, tools=[note])
    wrapper.submit([Request(7, PROMPT, 0)], SAMPLING)
    engine.abort = lambda: None  # type: ignore[method-assign]  # too late to cut anything
    wrapper.abort()
    (sample,) = wrapper.collect(timeout=60)
    assert (sample.finish, made) == ("abort", [])
    assert sample.tokens == (*encode(qwen("note")), EOS)


def test_abort_affects_only_requests_in_flight():
    engine = Scripted(turns_of(CALL, "ok"))
    wrapper = conversations(engine)
    wrapper.abort()
    assert wrapper.collect(timeout=0) == []
    assert wrapper.generate([Request(7, PROMPT, 0)], SAMPLING)[0].finish == "stop"


def test_abort_from_another_thread_ends_collect():
    wrapper = conversations(Scripted(turns_of(qwen("endless"), "ok")), tools=[endless])
    wrapper.submit([Request(7, PROMPT, 0)], SAMPLING)
    threading.Timer(0.3, wrapper.abort).start()
    assert [sample.finish for sample in wrapper.collect(timeout=600)] == ["abort"]


class EveryTurnCalls:
    """In place of a `ToolCallFormat`, for models that write nothing sensible."""

    def calls(self, tokens: Sequence[int], before: Sequence[int]) -> list[ToolCall]:
        return [ToolCall("c1", "add", json.dumps({"numbers": list(tokens)}))]

    def result(self, name: str, output: str) -> ToolResult:
        return ToolResult(name, output)

    def observation(self, last: int, results: Sequence[ToolResult]) -> tuple[int, ...]:
        return (last, int(results[0].text) % 50 + 6, 5)


def add(numbers: list[int]) -> str:
    """Add numbers."""
    return str(sum(numbers))


def test_collect_with_hf_engine_logprobs_equal_the_whole_row(tmp_path):
    engine = HFEngine(make_tiny_model(tmp_path, "qwen3", init_std=0.3), "cpu", torch.float32, max_running_requests=8)
    speech: Any = EveryTurnCalls()
    wrapper = MultiTurnEngine(engine, speech, [Tool.from_function(add)], max_turns=3, tool_timeout=60)
    sampling = Sampling(max_new_tokens=40, temperature=0.8, stop_token_ids=tuple(range(6, 16)))
    requests = [Request(i, (3, 20 + i // 4, 4), i) for i in range(24)]
    samples = wrapper.generate(requests, sampling)
    assert max(sum(not w for w in sample.generated_mask) for sample in samples) == 6
    for request, sample in zip(requests, samples, strict=True):
        row = torch.tensor([request.prompt + sample.tokens])
        scores = (engine.module(row).logits[0, len(request.prompt) - 1 : -1] / 0.8).log_softmax(-1)
        expected = scores.gather(1, torch.tensor(sample.tokens)[:, None]).squeeze(1)
        expected = torch.where(torch.tensor(sample.generated_mask), expected, torch.zeros(()))
        torch.testing.assert_close(torch.tensor(sample.logprobs), expected, atol=1e-5, rtol=1e-5)
