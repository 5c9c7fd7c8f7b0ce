"""Tools are described by their functions, and return text in any case."""

import asyncio
import json
import threading
import time
from typing import Any, Literal

import pytest

from verl_mg.agents.tools.builtin import calculator, python
from verl_mg.agents.tools.load import load_tools
from verl_mg.agents.tools.tool import MAX_RESULT_LENGTH, Tool
from verl_mg.errors import UserError


def weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C", tags: list[str] | None = None) -> dict[str, Any]:
    """Tell the weather of a city.

    In degrees.

    Args:
        city: its name,
            as it is written there
        days (int): how far ahead

    Returns:
        city: no parameter
    """
    return {"city": city, "days": days, "unit": unit, "tags": tags}


async def slow(seconds: float, title: str = "") -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return title or "waited"


def sleepy(seconds: float) -> str:
    """Wait in a thread."""
    time.sleep(seconds)
    return threading.current_thread().name


ERRORS: dict[str, BaseException] = {
    "value": ValueError("two\n lines"),
    "exit": SystemExit(1),
    "interrupt": KeyboardInterrupt(),
    "timeout": TimeoutError("of its own"),
    "cancelled": asyncio.CancelledError(),
    "stop": StopIteration(),
}


def failing(how: str) -> str:
    """Fail."""
    raise ERRORS[how]


async def failing_async(how: str) -> str:
    """Fail."""
    return failing(how)


def call(function: Any, arguments: str, timeout: float = 60) -> str:
    return asyncio.run(Tool.from_function(function).call(arguments, timeout))


def test_schema_describes_signature_and_docstring():
    assert Tool.from_function(weather).schema == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tell the weather of a city.\n\nIn degrees.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "its name, as it is written there"},
                    "days": {"type": "integer", "description": "how far ahead"},
                    "unit": {"enum": ["C", "F"], "type": "string"},
                    "tags": {"anyOf": [{"items": {"type": "string"}, "type": "array"}, {"type": "null"}]},
                },
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }


def test_schema_parameter_named_title_remains():
    assert Tool.from_function(slow).parameters["properties"]["title"] == {"type": "string"}


def test_call_returns_text():
    told = json.loads(call(weather, '{"city": "Zürich", "days": "3"}'))
    assert told == {"city": "Zürich", "days": 3, "unit": "C", "tags": None}
    assert call(slow, '{"seconds": 0}') == "waited"
    assert call(sleepy, '{"seconds": 0}') == "sleepy"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("{}", "error: weather: city: Field required"),
        ('{"city": "B", "days": "many"}', "error: weather: days: Input should be a valid integer"),
        ('{"city": "B", "year": 1}', "error: weather: year: Extra inputs are not permitted"),
        ('{"city": ', "error: weather: Invalid JSON: EOF"),
        ("[]", "error: weather: Input should be"),
    ],
)
def test_call_invalid_arguments_return_an_error_line(arguments, line):
    result = call(weather, arguments)
    assert result.startswith(line)
    assert "\n" not in result


@pytest.mark.parametrize("how", ERRORS)
def test_call_exception_returns_an_error_line(how):
    for function in (failing, failing_async):
        result = call(function, json.dumps({"how": how}))
        assert result.startswith(f"error: {function.__name__} raised ")
        assert "\n" not in result and (how != "value" or result.endswith(" raised ValueError: two lines"))


@pytest.mark.parametrize("function", [slow, sleepy])
def test_call_timeout_returns_an_error_line(function):
    assert call(function, '{"seconds": 3}', timeout=0.1) == f"error: {function.__name__} took longer than 0.1 s"


def test_call_thread_that_outlives_its_loop_is_silent(monkeypatch):
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    before, may_end = set(threading.enumerate()), threading.Event()

    def patient() -> str:
        """Wait."""
        may_end.wait()
        return ""

    assert call(patient, "{}", timeout=0.1).startswith("error")
    may_end.set()
    for thread in set(threading.enumerate()) - before:
        thread.join()
    assert raised == []


def test_call_cancellation_is_raised():
    async def cancel() -> None:
        task = asyncio.create_task(Tool.from_function(slow).call('{"seconds": 600}', 600))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())


def test_call_long_result_is_cut():
    def much() -> str:
        """Say much."""
        return "x" * (MAX_RESULT_LENGTH + 1)

    assert call(much, "{}") == "x" * MAX_RESULT_LENGTH + "... (cut)"


def test_load_tools_loads_by_name(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        'from __future__ import annotations\ndef twice(n: int) -> int:\n    """Double."""\n    return 2 * n\n'
    )
    tools = load_tools([f"{file}:twice", "verl_mg.agents.tools.builtin:calculator"])
    assert [tool.name for tool in tools] == ["twice", "calculator"]
    assert asyncio.run(tools[0].call('{"n": 21}', 60)) == "42"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("def tol(): pass", "has no function 'tool'. Write one of: tol"),
        ("import missing_module", "cannot be imported"),
        ("def tool(a: int): pass", "tool 'tool': no docstring"),
        ("def tool(a):\n 'Doc.'", "parameter a has no annotation. Write a: str"),
        ("def tool(*a: int):\n 'Doc.'", "cannot be named in a call"),
        ("def tool(a: 'Missing'):\n 'Doc.'", "name 'Missing' is not defined"),
        ("class C: pass\ndef tool(a: C):\n 'Doc.'", "Use types that JSON can describe"),
        ("import functools\ntool = functools.partial(print)", "not a function"),
        ("class tool:\n def __init__(self, n): pass", "the constructor has arguments .* Give each a default"),
        ("class tool:\n async def open(self, sample): pass", "no public method"),
        ("class tool:\n def act(self): pass", "tool 'act': no docstring"),
        ("class tool:\n def act(self, n):\n  'Doc.'", "parameter n has no annotation"),
    ],
)
def test_load_tools_invalid_tool_raises(tmp_path, text, reason):
    (tmp_path / "own.py").write_text(text)
    with pytest.raises(UserError, match=reason):
        load_tools([f"{tmp_path}/own.py:tool"])


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("17+25*3", "92"),
        (" (17 + 25) * 3 ", "126"),
        ("7 // 2 + 7 % 2 - -1", "5"),
        ("1 / 4", "0.25"),
        ("2 ** 10", "1024"),
        ("2 ** -1", "0.5"),
        ("123456789 * 987654321", "121932631112635269"),
        ("1e3 + 0.5", "1000.5"),
    ],
)
def test_calculator_expression_returns_its_value(expression, value):
    assert calculator(expression) == value


LARGE = ("9 ** 9 ** 9 ** 9", "2 ** 100000", "10.0 ** 1000", "(-8) ** 0.5", "9" * 5000, "*".join(["9" * 900] * 2))
OTHER = ("", "1 +", "1 / 0", "x", "2j", "[1] * 3", "'a' * 3", "True + 1", "1 if 1 else 2", "__import__('os').getcwd()")


@pytest.mark.parametrize("expression", [*LARGE, *OTHER])
def test_calculator_large_or_other_expression_raises(expression):
    result = call(calculator, json.dumps({"expression": expression}))
    assert result.startswith("error: calculator raised ")


@pytest.mark.parametrize("expression", ["(" * 400 + "1" + ")" * 400, "-" * 900 + "1"])
def test_calculator_deep_nesting_is_computed_or_raises(expression):
    result = call(calculator, json.dumps({"expression": expression}))
    assert result == "1" or result.startswith("error: calculator raised ")


@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize(
    ("code", "words"),
    [("print(6 * 7)", ["42"]), ("print(1)\n1/0", ["1\n", "ZeroDivisionError"]), ("x = (", ["SyntaxError"])],
)
def test_python_returns_printed_text(code, words):
    result = asyncio.run(python(code))
    assert all(word in result for word in words)
    assert result == result.rstrip()
