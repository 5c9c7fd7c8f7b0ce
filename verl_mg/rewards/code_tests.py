"""Test cases of a record, and what a program makes of them; where it runs is the caller's matter.

    {"inputs": [text, ...], "outputs": [text, ...]}                     stdin and stdout, as in APPS and TACO
    {"inputs": [[argument, ...], ...], "outputs": [...], "fn_name": f}  calls of a function, as there
    [{"input": text, "output": text}, ...]                              stdin and stdout
    ["assert f(1) == 2", ...]                                           assertions, as in MBPP
    "def check(candidate): ..."                                         a test of the record's `entry_point`: HumanEval

Each may be given as a text of JSON.
"""

from __future__ import annotations

import ast
import json
import math
import re
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_mg.errors import UserError
from verl_mg.rewards.base import Reward, Sample
from verl_mg.sandbox import Outcome

FIELDS = ("input_output", "test_cases", "tests", "test_list", "test")
CALLER = Path(__file__).with_name("caller.py")
BLOCK = re.compile(r"```([^\n`]*)\n(.*?)```", re.DOTALL)
PYTHON = ("python", "python3", "py")
TOLERANCE = 1e-6  # relative, for numbers with a fraction, where outputs are texts or JSON

Run = Callable[[str, str], Awaitable[Outcome]]
"""Runs a program with a text as its stdin."""


@dataclass(frozen=True)
class InputCase:
    """What the program reads and what it is to write."""

    stdin: str
    stdout: str


@dataclass(frozen=True)
class CallCase:
    """A call that `caller.py` makes, and what comes of it; `exact`: types count, and every digit."""

    call: dict[str, Any]
    expected: Any
    exact: bool


Case = InputCase | CallCase


def read_tests(sample: Sample, field: str | None) -> list[Case]:
    """The test cases of a record, at least one.

    Args:
        field: of the record; None: the first of `FIELDS` that it has.

    Raises:
        UserError: there are none, or they have none of the forms above.
    """
    record = sample.record
    name = field or next((name for name in FIELDS if record.get(name)), None)
    if name is None or not record.get(name):
        raise UserError(
            f"test cases: the record of the prompt {sample.prompt[:60]!r} has no {field or ' or '.join(FIELDS)}; "
            f"set the reward's option field to one of: {', '.join(record)}"
        )
    content = _from_json(record[name])
    try:
        cases = _cases(content, record)
    except (KeyError, TypeError, ValueError, SyntaxError) as error:
        raise UserError(
            f"test cases: {name} of the prompt {sample.prompt[:60]!r} cannot be read "
            f"({type(error).__name__}: {error}); write inputs and outputs, or a list of assertions"
        ) from None
    if not cases:
        raise UserError(f"test cases: {name} of the prompt {sample.prompt[:60]!r} is empty; write at least one case")
    return cases


def last_program(response: str) -> str | None:
    """The last fenced block that is marked as Python; the last one without a mark where none is."""
    blocks = [(mark.strip().lower(), body) for mark, body in BLOCK.findall(response)]
    for marks in (PYTHON, ("",)):
        if chosen := [body for mark, body in blocks if mark in marks]:
            return str(chosen[-1])
    return None


async def run_tests(response: str, cases: Sequence[Case], run: Run, partial: bool) -> Reward:
    """How many cases the program of a response passes. One that fails ends the matter, unless `partial`.

    Returns:
        1.0 or 0.0; the share that passed if `partial`. Parts: "correct" (all passed), "passed" (the share; without
        `partial` only of those before the first failure), "answered" (there is a program).
    """
    program = last_program(response)
    if program is None:
        return Reward(0.0, {"correct": 0.0, "passed": 0.0, "answered": 0.0})
    calls = [case for case in cases if isinstance(case, CallCase)]
    passed = await _passed_calls(program, calls, run) if calls else 0
    if partial or passed == len(calls):
        for case in cases:
            if isinstance(case, InputCase):
                outcome = await run(program, case.stdin)
                right = outcome.ended == "ok" and same_text(outcome.stdout, case.stdout)
                passed += right
                if not (right or partial):
                    break
    share = passed / len(cases)
    correct = float(passed == len(cases))
    return Reward(share if partial else correct, {"correct": correct, "passed": share, "answered": 1.0})


def same_text(written: str, expected: str) -> bool:
    """Equal line by line, up to space at the ends and numbers within `TOLERANCE`."""
    left, right = ([line.split() for line in text.strip().splitlines()] for text in (written, expected))
    return left == right or (
        len(left) == len(right)
        and all(len(a) == len(b) and all(map(_same_word, a, b)) for a, b in zip(left, right, strict=True))
    )


def _same_word(written: str, expected: str) -> bool:
    if written == expected:
        return True
    try:
        return "." in expected and _close(float(written), float(expected))
    except ValueError:
        return False


def _close(left: float, right: float) -> bool:
    return math.isclose(left, right, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


async def _passed_calls(program: str, cases: Sequence[CallCase], run: Run) -> int:
    """All calls in one run: how many gave what was expected. A line counts only with this run's marker."""
    marker = secrets.token_hex(16)
    order = {"marker": marker, "program": program, "calls": [case.call for case in cases]}
    outcome = await run(CALLER.read_text(encoding="utf-8"), json.dumps(order) + "\n")
    results: dict[int, Any] = {}
    for line in outcome.stdout.splitlines():
        if line.startswith(marker):
            try:
                number, value = json.loads(line.removeprefix(marker))
                results[number] = _decoded(value, exact=cases[number].exact)
            except (ValueError, TypeError, LookupError, RecursionError):
                continue
    return sum(number in results and _same(results[number], case) for number, case in enumerate(cases))


def _same(value: Any, case: CallCase) -> bool:
    try:
        if case.exact:
            return bool(value == case.expected)
        # APPS wraps some results in a list.
        wrapped = isinstance(case.expected, list) and len(case.expected) == 1 and _alike(value, case.expected[0])
        return wrapped or _alike(value, case.expected)
    except RecursionError:
        return False


def _alike(value: Any, expected: Any) -> bool:
    """Equal as JSON is, numbers with a fraction within `TOLERANCE`."""
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(_alike, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        by_text = {str(key): item for key, item in value.items()}
        return by_text.keys() == expected.keys() and all(_alike(by_text[key], expected[key]) for key in expected)
    if isinstance(value, int | float) and isinstance(expected, float):
        return value == expected or _close(value, expected)
    return bool(value == expected)


def _decoded(value: Any, exact: bool) -> Any:
    """What `caller.py` has encoded; unless `exact`, every sequence is a list."""
    if not isinstance(value, list):
        return value
    kind, *items = value
    if kind == "dict":
        return {_decoded(key, exact=True): _decoded(item, exact) for key, item in items}
    if kind == "complex":
        return complex(*items)
    if kind == "bytes":
        return bytes.fromhex(*items)
    makers: dict[str, Callable[[Any], Any]] = {"list": list, "tuple": tuple, "set": set}
    maker = makers[kind] if exact or kind == "set" else list
    return maker(_decoded(item, exact) for item in items)


# -- reading


def _from_json(content: Any) -> Any:
    if not isinstance(content, str):
        return content
    try:
        return json.loads(content)
    except ValueError:
        return content


def _cases(content: Any, record: dict[str, Any]) -> list[Case]:
    if isinstance(content, str):
        test = f"{content}\ncheck({record['entry_point']})"
        return [CallCase({"setup": "", "test": test}, True, exact=True)]
    if isinstance(content, dict):
        pairs = list(zip(content["inputs"], content["outputs"], strict=True))
        if name := content.get("fn_name"):
            return [_function_case(name, arguments, output) for arguments, output in pairs]
        return [InputCase(_text(stdin), _text(stdout)) for stdin, stdout in pairs]
    if all(isinstance(item, str) for item in content):
        setup = [record.get("test_setup_code") or "", *(record.get("test_imports") or [])]
        return [_assertion(item, "\n".join(setup).strip()) for item in content]
    return [InputCase(_text(item["input"]), _text(item["output"])) for item in content]


def _text(content: Any) -> str:
    return "\n".join(map(str, content)) if isinstance(content, list) else str(content)


def _function_case(name: str, arguments: Any, output: Any) -> CallCase:
    """Arguments and output may be texts of JSON, the arguments one a line."""
    if isinstance(arguments, str):
        arguments = [json.loads(line) for line in arguments.splitlines()]
    if not isinstance(arguments, list):
        raise TypeError(f"the arguments of a call are {arguments!r:.60}, and not a list")
    return CallCase({"function": name, "arguments": arguments}, _from_json(output), exact=False)


def _assertion(source: str, setup: str) -> CallCase:
    """`assert f(1) == 2` as the expression f(1), whose value is compared out here; any other is made in there."""
    body = ast.parse(source.strip()).body
    match body:
        case [ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]))]:
            for expression, literal in ((left, right), (right, left)):
                try:
                    expected = ast.literal_eval(literal)
                except ValueError:
                    continue
                return CallCase({"setup": setup, "expression": ast.unparse(expression)}, expected, exact=True)
    return CallCase({"setup": setup, "test": source.strip()}, True, exact=True)
