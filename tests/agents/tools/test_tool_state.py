"""States of tools: one for each sample, opened before its first call, closed exactly once."""

import asyncio
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agents.tools.ledgers import SAMPLE, Ledger, call, counts, ledger, tools_of
from tests.helpers import warm_start
from tests.helpers.waiting import wait_until
from verl_mg.agents.tools.load import load_tools
from verl_mg.agents.tools.tool import Tool, ToolSample
from verl_mg.agents.tools.tool_runner import ToolRunner

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
Start = Callable[..., ToolRunner]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts runners; closes them at the end."""
    runners: list[ToolRunner] = []

    def start(tools: type | list[Tool], timeout: float = 60) -> ToolRunner:
        runners.append(ToolRunner(tools if isinstance(tools, list) else tools_of(tools).tools, timeout))
        return runners[-1]

    yield start
    for runner in runners:
        runner.close()


def one_by_one(runner: ToolRunner, *calls: tuple[str, str], sample: int = 7) -> list[str]:
    """The results of calls in turns of their own."""
    runner.begin(sample, SAMPLE, ())
    return [runner.start(sample, [call(*each)]).result(60)[0] for each in calls]


def set_timeout(runner: ToolRunner, seconds: float, sample: int = 7) -> None:
    """Changes the time limit of the states that a sample has."""
    for state in runner._samples[sample].states.values():
        state._timeout = seconds


def test_class_tools_are_its_public_methods():
    tools = load_tools([f"{HERE}/ledgers.py:Ledger"])
    assert [tool.name for tool in tools] == ["note", "add", "add_slowly", "wait", "leave"]
    assert tools[1].description == "Add to the sum."
    assert tools[1].parameters["properties"] == {"n": {"type": "integer", "description": "the summand"}}


def test_class_tools_with_prefix_have_it_in_their_names():
    place = f"{HERE}/ledgers.py:Ledger"
    names = [tool.name for tool in load_tools([place, f"second={place}"])]
    assert names[5:] == [f"second_{name}" for name in names[:5]]


def test_state_of_concurrent_samples_is_separate(start):
    kind = ledger()
    runner = start(kind)
    for i in range(64):
        runner.begin(i, ToolSample(str(i), None, {}), ())
    for turn in (1, 2):
        futures = [runner.start(i, [call("add", f'{{"n": {i}}}')] * 3) for i in range(64)]
        for i, future in enumerate(futures):
            totals = [str(i * (3 * (turn - 1) + k)) for k in (1, 2, 3)]
            assert future.result(60) == totals, "in order, none lost"
    assert counts(kind.events, "opened") == [1] * 64
    assert counts(kind.events, "closed") == [0] * 64
    for i in range(64):
        runner.end(i)
    runner.close()
    assert counts(kind.events, "closed") == [1] * 64


def test_state_is_not_opened_by_a_call_of_another_tool(start):
    kind = ledger()
    (result,) = one_by_one(start(kind), ("other", "{}"))
    assert result.startswith("error: there is no tool 'other'") and kind.events == []


def test_state_that_fails_to_open_is_closed_and_opened_again(start):
    async def opens_second(self: Any, sample: ToolSample) -> None:
        if not self.number:
            raise ValueError("not\n yet")

    kind = ledger(open=opens_second)
    runner = start(kind)
    results = one_by_one(runner, ("add", '{"n": 1}'), ("add", '{"n": 2}'), ("add", '{"n": 3}'))
    assert results == ["error: add: ledgers.py:Ledger cannot be opened (ValueError: not yet)", "2", "5"]
    runner.end(7)
    runner.close()
    assert counts(kind.events, "closed") == [1, 1]


@pytest.mark.parametrize("error", [SystemExit(1), asyncio.CancelledError(), KeyboardInterrupt()])
def test_state_whose_open_ends_the_program_gives_an_error(start, error):
    def ending(self: Any, sample: ToolSample) -> None:
        raise error

    kind = ledger(open=ending)
    runner = start(kind)
    (result,) = one_by_one(runner, ("add", '{"n": 1}'))
    assert result.startswith(f"error: add: ledgers.py:Ledger cannot be opened ({type(error).__name__}")
    runner.close()
    assert counts(kind.events, "closed") == [1]


def test_state_that_opens_too_slowly_is_closed(start):
    kind = ledger(open=open_endlessly)
    runner = start(kind, timeout=0.1)
    results = one_by_one(runner, ("add", '{"n": 1}'))
    assert results == ["error: add: ledgers.py:Ledger cannot be opened (it takes longer than 0.1 s)"]
    set_timeout(runner, 60)
    runner.end(7)
    runner.close()
    assert counts(kind.events, "closed") == [1]


def test_state_with_a_plain_method_that_is_late_waits_for_it(start):
    kind = ledger()
    runner, adds = start(kind), ("add_slowly", '{"n": 1}')
    assert one_by_one(runner, ("add", '{"n": 0}')) == ["0"]
    for expected in ("2", "4"):
        set_timeout(runner, 0.1)
        assert one_by_one(runner, adds) == ["error: add_slowly took longer than 0.1 s"]
        set_timeout(runner, 60)
        waiting = runner.start(7, [call(*adds)])
        kind.may_end.set()
        assert waiting.result(60) == [expected]
        kind.may_end.clear()
    set_timeout(runner, 0.1)
    assert one_by_one(runner, adds) == ["error: add_slowly took longer than 0.1 s"]
    set_timeout(runner, 60)
    kind.may_end.set()
    runner.close()
    assert [event for _, event in kind.events] == ["made", "opened", *["begins", "ends"] * 5, "closed"]


def test_state_after_errors_of_a_method_remains(start):
    kind = ledger()
    runner = start(kind)
    results = one_by_one(runner, ("add", '{"n": 1}'), ("leave", "{}"), ("add", '{"m": 1}'), ("add", '{"n": 1}'))
    assert results[1:] == ["error: leave raised SystemExit: 1", "error: add: n: Field required", "2"]
    assert counts(kind.events, "made") == [1]


@pytest.mark.parametrize("closes", ["never", "raises", "exits"])
def test_state_whose_close_fails_ends(start, closes, caplog):
    async def close(self: Any) -> None:
        self.note("closing")
        if closes == "never":
            await asyncio.Event().wait()
        raise {"raises": ValueError("no"), "exits": SystemExit(1)}[closes]

    kind = ledger(close=close)
    runner = start(kind)
    assert one_by_one(runner, ("add", '{"n": 1}')) == ["1"]
    set_timeout(runner, 0.1 if closes == "never" else 60)
    runner.end(7)
    runner.close()
    assert counts(kind.events, "closing") == [1]
    if closes == "raises":
        assert "tools of ledgers.py:Ledger: ValueError: no" in caplog.text


async def open_endlessly(self: Ledger, sample: ToolSample) -> None:
    self.note("waits")
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("members", "events"), [({}, ["made", "opened", "waits"]), ({"open": open_endlessly}, ["made", "waits"])]
)
def test_state_that_is_cancelled_in_a_call_or_while_it_opens_is_closed_once(start, members, events):
    kind = ledger(**members)
    runner = start(kind)
    runner.begin(7, SAMPLE, ())
    results = runner.start(7, [call("wait"), call("add", '{"n": 1}')])
    wait_until(lambda: "waits" in [event for _, event in kind.events])
    results.cancel()
    runner.end(7)
    runner.close()
    assert [event for _, event in kind.events] == [*events, "closed"]


def test_state_of_a_continued_sample_repeats_its_earlier_calls_in_order(start):
    async def append(self: Ledger, n: int) -> int:
        """Append a digit."""
        self.total = 10 * self.total + n
        return self.total

    runner = start(ledger(append=append))
    runner.begin(7, SAMPLE, [call("append", f'{{"n": {n}}}') for n in (1, 2)])
    assert runner.start(7, [call("append", '{"n": 4}')]).result(60) == ["124"]


def test_documented_class_has_an_account_for_each_sample(tmp_path, start):
    page = (ROOT / "docs" / "agent_tools.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python ledger.py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "ledger.py").write_text(code)
    runner = start(load_tools([f"{tmp_path}/ledger.py:Ledger"]))
    pay = call("transfer", '{"source": "ada", "target": "bob", "amount": 30}')
    for i in (1, 2):
        runner.begin(i, ToolSample("?", None, {"names": ["ada", "bob"]}), ())
        assert runner.start(i, [pay]).result(60) == ["ada has 70"]


@pytest.mark.nightly
def test_state_of_a_program_that_fails_is_closed(tmp_path):
    code = f"""
from tests.agents.tools.ledgers import FileLedger, call, tools_of
from verl_mg.agents.tools.tool import ToolSample
from verl_mg.agents.tools.tool_runner import ToolRunner
runner = ToolRunner(tools_of(FileLedger).tools, 60)
runner.begin(1, ToolSample({str(tmp_path / "ledger")!r}, None, {{}}), ())
runner.start(1, [call("begin")]).result(60)
raise ValueError
"""
    warm = warm_start.shared()
    ended = subprocess.run([warm.python, "-c", code], cwd=ROOT, env=os.environ | warm.environment, capture_output=True)
    assert ended.returncode == 1
    assert (tmp_path / "ledger").read_text() == "begun\nclosed\n"
