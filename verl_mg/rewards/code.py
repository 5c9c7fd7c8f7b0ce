"""Reward for a program that passes the test cases of its record, run in the sandbox of this machine.

The record contains the test cases in one of these forms:

    {"inputs": [text, ...], "outputs": [text, ...]}                     stdin and stdout, as in APPS and TACO
    {"inputs": [[argument, ...], ...], "outputs": [...], "fn_name": f}  calls of a function, as there
    [{"input": text, "output": text}, ...]                              stdin and stdout
    ["assert f(1) == 2", ...]                                           assertions, as in MBPP
    "def check(candidate): ..."                                         a test of the record's `entry_point`: HumanEval

Each may be given as a string that contains JSON. Programs of the first two forms may use what contests define, see
`contest_names`. Records of LiveCodeBench and of open-r1/codeforces are read as they
are published, see `contest_tests`.
"""

from __future__ import annotations

import ast
import base64
import binascii
import functools
import json
import math
import pickletools
import re
import secrets
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from verl_mg.errors import UserError
from verl_mg.rewards.answer_part import answer_part
from verl_mg.rewards.reward import Reward, Sample
from verl_mg.sandbox import Outcome, run_python_async

FIELDS = ("input_output", "test_cases", "tests", "test_list", "test")
CONTEST_NAMES = Path(__file__).with_name("contest_names.py")
HARNESS = Path(__file__).with_name("function_call_harness.py")
CHECKER_HARNESS = Path(__file__).with_name("output_checker.py")
CHECKED_FILES = ("input.txt", "correct_output.txt", "solution_output.txt")  # files that a checker gets
BLOCK = re.compile(r"```([^\n`]*)\n(.*?)```", re.DOTALL)
PYTHON = ("python", "python3", "py")
# Relative and absolute, for numbers with a fraction, where outputs are text or JSON; absolute at most half of the last
# digit of the expected one, so that 3e-7 is not 4e-7.
TOLERANCE = 1e-6
OUTPUT_BYTES = 1 << 20  # largest output of a program

Run = Callable[..., Awaitable[Outcome]]  # runs a program, given its source and, by name, its stdin
MAX_BYTES = 1 << 30  # largest size of the private test cases of a problem, decompressed
CHECKER = "generated_checker"  # field with a program that compares outputs, of problems with several right ones
_TEXTS = {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE"}
_WITHOUT_EFFECT = {"PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT", "STOP"}


@dataclass(frozen=True)
class InputCase:
    """A test case of a program that reads stdin and writes stdout."""

    stdin: str
    stdout: str
    checker: str | None = None  # program that decides whether an output is right; None: it must be the expected one
    with_names: bool = False  # whether the program may use what contests define


@dataclass(frozen=True)
class CallCase:
    """A test case of a function, called by `function_call_harness.py`."""

    call: dict[str, Any]  # the call, in the harness's format
    expected: Any
    exact: bool  # whether types and every digit must be equal


Case = InputCase | CallCase


async def score(
    sample: Sample, field: str | None = None, seconds: float = 10.0, memory_mb: int = 1024, partial: bool = False
) -> Reward:
    """Returns 1.0 where the last fenced Python block of the response passes all test cases, else 0.0.

    The expected output is compared outside of the sandbox, where the program cannot reach it; so are results of
    functions and both sides of `assert f(x) == literal`. Only more general tests are within its reach (HumanEval's
    `check`, `assert isinstance(f(x), list)`): they run in its own process, and a program that searches that process
    for the marker of the run could report that it passes them.

    The cases of a sample run one after another, so a rank runs as many programs at the same time as it has workers.
    Parts are as in `run_tests`.

    Args:
        sample: the sample, with its test cases in the record; UserError without any.
        field: field of the record with the test cases; None for the first of `FIELDS` that it has.
        seconds: time limit of each run, the start of the interpreter included. There is one run for each stdin case,
            and one for all calls together.
        memory_mb: memory limit of each run.
        partial: whether the reward is the share of the cases that pass.
    """
    run = functools.partial(run_python_async, seconds=seconds, memory_mb=memory_mb, output_bytes=OUTPUT_BYTES)
    return await run_tests(sample.response, read_tests(sample, field), run, partial)


def read_tests(sample: Sample, field: str | None) -> list[Case]:
    """Reads the test cases of a record, at least one; UserError where there are none, or of no supported form.

    Args:
        sample: the sample whose record contains them.
        field: field of the record; None for the first of `FIELDS` that it has.
    """
    record = sample.record
    name = field or next((name for name in FIELDS if record.get(name)), None)
    try:
        content = _from_json(record[name]) if name and record.get(name) else contest_tests(record)
        if content is None:
            raise UserError(
                f"test cases: the record of the prompt {sample.prompt[:60]!r} has no {field or ' or '.join(FIELDS)}. "
                f"Set the reward's option field to one of: {', '.join(record)}."
            )
        cases = _cases(content, record)
    except (KeyError, TypeError, ValueError, SyntaxError) as error:
        raise UserError(
            f"test cases: {name or 'those'} of the prompt {sample.prompt[:60]!r} cannot be read "
            f"({type(error).__name__}: {error}). Write inputs and outputs, or a list of assertions."
        ) from None
    if not cases:
        raise UserError(f"test cases: {name} of the prompt {sample.prompt[:60]!r} is empty. Write at least one case.")
    return cases


def last_program(response: str) -> str | None:
    """Returns the last fenced block after the reasoning marked as Python; without any, the last one without a mark."""
    blocks = [(mark.strip().lower(), body) for mark, body in BLOCK.findall(answer_part(response))]
    for marks in (PYTHON, ("",)):
        if chosen := [body for mark, body in blocks if mark in marks]:
            return str(chosen[-1])
    return None


async def run_tests(response: str, cases: Sequence[Case], run: Run, partial: bool) -> Reward:
    """Runs the program of a response on test cases, until one fails or, if `partial`, to the end.

    Returns 1.0 or 0.0, or the share that passed if `partial`. Parts: "correct" (all passed), "passed" (the share;
    without `partial` only of the cases before the first failure), "answered" (the response has a program).

    Args:
        response: the response, whose last fenced Python block is the program.
        cases: the test cases.
        run: runs a program with a stdin.
        partial: whether the reward is the share of the cases that pass.
    """
    program = last_program(response)
    if program is None:
        return Reward(0.0, {"correct": 0.0, "passed": 0.0, "answered": 0.0})
    calls = [case for case in cases if isinstance(case, CallCase)]
    passed = await _passed_calls(program, calls, run) if calls else 0
    if partial or passed == len(calls):
        for case in cases:
            if isinstance(case, InputCase):
                outcome = await run(_with_names(program) if case.with_names else program, stdin=case.stdin)
                success = outcome.ended == "ok" and await _is_right(outcome.stdout, case, run)
                passed += success
                if not (success or partial):
                    break
    share = passed / len(cases)
    correct = float(passed == len(cases))
    return Reward(share if partial else correct, {"correct": correct, "passed": share, "answered": 1.0})


def _with_names(program: str) -> str:
    return f"{CONTEST_NAMES.read_text(encoding='utf-8')}\n\nsolution({program!r}, '__main__', True)\n"


async def _is_right(output: str, case: InputCase, run: Run) -> bool:
    if case.checker is None or same_text(output, case.stdout):
        return same_text(output, case.stdout)
    files = dict(zip(CHECKED_FILES, (case.stdin, case.stdout, output), strict=True))
    request = json.dumps({"checker": case.checker, "files": files})
    checked = await run(CHECKER_HARNESS.read_text(encoding="utf-8"), stdin=request)
    try:
        return checked.ended == "ok" and float(checked.stdout.split()[-1]) >= 1
    except (ValueError, IndexError):
        return False


def same_text(output: str, expected: str) -> bool:
    """Returns whether texts are equal line by line, except for surrounding space and numbers within `TOLERANCE`.

    Args:
        output, expected: output of the program and of the test case.
    """
    left, right = ([line.split() for line in text.strip().splitlines()] for text in (output, expected))
    return left == right or (
        len(left) == len(right)
        and all(len(a) == len(b) and all(map(_same_word, a, b)) for a, b in zip(left, right, strict=True))
    )


def _same_word(output: str, expected: str) -> bool:
    if output == expected:
        return True
    try:
        return "." in expected and _close(float(output), expected)
    except ValueError:
        return False


def _close(value: float, expected: str) -> bool:
    digits = Decimal(expected).as_tuple().exponent
    last = 0.0 if isinstance(digits, str) else 0.5 * 10.0 ** min(digits, 0)
    return math.isclose(value, float(expected), rel_tol=TOLERANCE, abs_tol=min(TOLERANCE, last))


async def _passed_calls(program: str, cases: Sequence[CallCase], run: Run) -> int:
    """Makes all calls in one run and counts the expected results. A line counts only with this run's marker."""
    # Unknown to the program, which could otherwise print lines that look like results of the harness.
    marker = secrets.token_hex(16)
    with_names = any("function" in case.call for case in cases)
    request = {"marker": marker, "program": program, "with_names": with_names, "calls": [case.call for case in cases]}
    source = CONTEST_NAMES.read_text(encoding="utf-8") + HARNESS.read_text(encoding="utf-8")
    outcome = await run(source, stdin=json.dumps(request) + "\n")
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
        wrapped = isinstance(case.expected, list) and len(case.expected) == 1 and _json_equal(value, case.expected[0])
        return wrapped or _json_equal(value, case.expected)
    except RecursionError:
        return False


def _json_equal(value: Any, expected: Any) -> bool:
    """Compares values as JSON, numbers with a fraction within `TOLERANCE`."""
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(_json_equal, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        by_text = {str(key): item for key, item in value.items()}
        return by_text.keys() == expected.keys() and all(_json_equal(by_text[key], expected[key]) for key in expected)
    if isinstance(value, int | float) and isinstance(expected, float):
        return value == expected or _close(value, repr(expected))
    return bool(value == expected)


def _decoded(value: Any, exact: bool) -> Any:
    """Decodes a value of the harness; unless `exact`, every sequence becomes a list."""
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


def _from_json(content: Any) -> Any:
    with suppress(ValueError):  # a text that is no JSON stays one
        return json.loads(content) if isinstance(content, str) else content
    return content


def _cases(content: Any, record: dict[str, Any]) -> list[Case]:
    if isinstance(content, str):
        test = f"{content}\ncheck({record['entry_point']})"
        return [CallCase({"setup": "", "test": test}, True, exact=True)]
    if isinstance(content, dict):
        pairs = list(zip(content["inputs"], content["outputs"], strict=True))
        if name := content.get("fn_name"):
            return [_function_case(name, arguments, output) for arguments, output in pairs]
        return [InputCase(_text(stdin), _text(stdout), with_names=True) for stdin, stdout in pairs]
    if all(isinstance(item, str) for item in content):
        setup = [record.get("test_setup_code") or "", *(record.get("test_imports") or [])]
        return [_assertion(item, "\n".join(setup).strip()) for item in content]
    checker = record.get(CHECKER) or None
    return [InputCase(_text(item["input"]), _text(item["output"]), checker) for item in content]


def _text(content: Any) -> str:
    return "\n".join(map(str, content)) if isinstance(content, list) else str(content)


def _function_case(name: str, arguments: Any, output: Any) -> CallCase:
    """Arguments and output may be strings of JSON, the arguments one per line."""
    if isinstance(arguments, str):
        arguments = [json.loads(line) for line in arguments.splitlines()]
    if not isinstance(arguments, list):
        raise TypeError(f"the arguments of a call are {arguments!r:.60} instead of a list")
    return CallCase({"function": name, "arguments": arguments}, _from_json(output), exact=False)


def _assertion(source: str, setup: str) -> CallCase:
    """Turns `assert f(1) == 2` into the expression f(1), compared outside of the sandbox; others run inside."""
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


def contest_tests(record: Mapping[str, Any]) -> Any:
    """Returns the test cases of a record in a form of `verl_mg.rewards.code`, None where it is of no such set."""
    if record.get("public_test_cases"):
        return _livecodebench(record)
    cases = record.get("official_tests") or ("input_format" in record and record.get("examples"))
    return [{"input": case["input"], "output": case["output"]} for case in cases] if cases else None


def _livecodebench(record: Mapping[str, Any]) -> Any:
    cases = json.loads(record["public_test_cases"]) + _private(record.get("private_test_cases") or "[]")
    tests = {name: [case[name.removesuffix("s")] for case in cases] for name in ("inputs", "outputs")}
    if all(case["testtype"] == "stdin" for case in cases):
        return tests
    metadata = record.get("metadata") or "{}"
    name = (json.loads(metadata) if isinstance(metadata, str) else metadata).get("func_name")
    if not name:
        raise ValueError("metadata has no func_name")
    return {"fn_name": name} | tests


def _private(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return json.loads(pickled_text(_decompressed(text)))


def _decompressed(text: str) -> bytes:
    # Not `zlib.decompress`, which has no limit: a few KiB of a record can become all of a host's memory.
    stream = zlib.decompressobj()
    try:
        data = stream.decompress(base64.b64decode(text, validate=True), MAX_BYTES)
    except (binascii.Error, zlib.error) as error:
        raise ValueError(f"private_test_cases are neither JSON nor compressed ({error})") from None
    if stream.unconsumed_tail:
        raise ValueError(f"private_test_cases are larger than {MAX_BYTES} bytes")
    return data


def pickled_text(data: bytes) -> str:
    """Returns the text that a pickle consists of, without executing it; ValueError for anything but one text."""
    # A pickle is never loaded, since it can run anything: its instructions are listed.
    texts: list[str] = []
    for instruction, argument, _ in pickletools.genops(data):
        if instruction.name in _TEXTS:
            texts.append(str(argument))
        elif instruction.name not in _WITHOUT_EFFECT:
            raise ValueError(f"private_test_cases are a pickle of more than a text ({instruction.name})")
    if len(texts) != 1:
        raise ValueError(f"private_test_cases are a pickle of {len(texts)} texts")
    return texts[0]
