"""Test cases as LiveCodeBench and open-r1/codeforces publish them, and pickles that are more than a text."""

import asyncio
import base64
import json
import os
import pickle
import zlib

import pytest

from verl_mg.errors import UserError
from verl_mg.rewards import Sample
from verl_mg.rewards.code import contest_tests, pickled_text, read_tests, score
from verl_mg.rewards.contest_names import names_without_definition

DOUBLE = "```python\nprint(2 * int(input()))\n```"


def compressed(cases: list[dict[str, str]], protocol: int | None = None) -> str:
    """As the set has them: json, pickle, zlib, base64."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases), protocol))).decode()


def case(given: str, expected: str, kind: str = "stdin") -> dict[str, str]:
    return {"input": given, "output": expected, "testtype": kind}


def passed(response: str, record: dict, **options: object) -> float:
    return asyncio.run(score(Sample("p", response, None, record, "stop"), **options)).parts["passed"]


@pytest.mark.parametrize("protocol", range(6))
def test_private_tests_are_read_from_every_protocol(protocol):
    record = {
        "public_test_cases": json.dumps([case("1", "2")]),
        "private_test_cases": compressed([case("3 π", "6")], protocol),
    }
    assert contest_tests(record) == {"inputs": ["1", "3 π"], "outputs": ["2", "6"]}


def test_pickles_of_anything_else_are_refused_and_not_executed(tmp_path):
    class Harmful:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    for content in (Harmful(), ["a"], {"a": "b"}, 7, ("a", "b")):
        with pytest.raises(ValueError, match="a pickle of"):
            pickled_text(pickle.dumps(content))
    assert not (tmp_path / "made").exists()
    for text in (
        "not base64!",
        base64.b64encode(b"not zlib").decode(),
        base64.b64encode(zlib.compress(b"\xff")).decode(),
    ):
        with pytest.raises(UserError, match="cannot be read"):
            read_tests(Sample("p", "", None, {"public_test_cases": "[]", "private_test_cases": text}, "stop"), None)


def test_livecodebench_programs_and_functions_are_scored(sandbox):
    stdin = {
        "public_test_cases": json.dumps([case("1\n", "2\n")]),
        "private_test_cases": compressed([case("4\n", "8")]),
    }
    assert passed(DOUBLE, stdin) == 1.0
    assert passed("```python\nprint(2)\n```", stdin, partial=True) == 0.5
    functional = {
        "public_test_cases": json.dumps([case("[1, 2]\n3", "[4, 5]", "functional")]),
        "private_test_cases": json.dumps([case("[0]\n1", "[1]", "functional")]),
        "metadata": json.dumps({"func_name": "shifted"}),
    }
    method = (
        "from typing import List\nclass Solution:\n    def shifted(self, values: List[int], by: int) -> List[int]:\n"
        "        return [value + by for value in values]"
    )
    assert passed(f"```python\n{method}\n```", functional) == 1.0


def test_codeforces_outputs_are_compared_by_the_checker_of_the_problem(sandbox):
    checker = (
        "import sys\n"
        "total = int(open(sys.argv[1]).read())\n"
        "given = open(sys.argv[3]).read().split()\n"
        "print(int(len(given) == 2 and sum(map(int, given)) == total))\n"
    )
    record = {"input_format": "n", "examples": [], "official_tests": [{"input": "5\n", "output": "2 3\n"}]}
    other = "```python\nn = int(input())\nprint(1, n - 1)\n```"
    assert passed(other, record) == 0.0
    assert passed(other, record | {"generated_checker": checker}) == 1.0
    assert passed("```python\nprint(1, 1)\n```", record | {"generated_checker": checker}) == 0.0
    assert passed(other, record | {"generated_checker": "raise ValueError"}) == 0.0


USES = """
from __future__ import annotations
@cache
def fib(n: Optional[int]) -> List[int]:
    return [] if n is None else [inf, gcd(n, 6), Counter("aab")["a"], bisect_left([1, 3], 2), heapq.nlargest(1, [n])[0]]
class Solution:
    def uses(self, n: int) -> List[int]:
        values = deque(accumulate(fib(n)[1:])) if pow(2, 3, 5) == 3 else sys.maxsize
        more = [math.floor(sqrt(n)), collections.defaultdict(int)[0], time.time() > 0, datetime.date.max.day]
        return list(values) + more
"""
EXPECTED = [3, 5, 6, 15, 3, 0, True, 31]


def test_names_of_contests_are_defined_for_functions_and_programs(sandbox):
    functional = {
        "public_test_cases": json.dumps([case("9", json.dumps(EXPECTED), "functional")]),
        "metadata": json.dumps({"func_name": "uses"}),
    }
    assert passed(f"```python\n{USES}\n```", functional) == 1.0
    program = USES + "\nif __name__ == '__main__':\n    print(*Solution().uses(int(stdin.readline())))"
    stdin = {"public_test_cases": json.dumps([case("9\n", " ".join(map(str, EXPECTED)))])}
    assert passed(f"```python\n{program}\n```", stdin) == 1.0
    # Recursion is as deep for a program that imports all its names.
    deep = "import sys\ndef depth(n): return n and 1 + depth(n - 1)\nprint(depth(int(sys.stdin.readline())))"
    assert passed(f"```python\n{deep}\n```", {"public_test_cases": json.dumps([case("3000\n", "3000")])}) == 1.0
    # Records that bring their own imports, and programs of Codeforces, run as they are.
    assert passed("```python\ndef f(x: List[int]): return 1\n```", {"test_list": ["assert f(1) == 1"]}) == 0.0
    assert passed("```python\nprint(gcd(4, 6))\n```", {"tests": [{"input": "", "output": "2"}]}) == 0.0


def test_names_without_definition_are_those_that_a_program_does_not_define():
    source = "import os.path as p, sys\ndef f(a, *b): return a + c\nfor d in [e for e in b]: print(d, p, sys)\n"
    assert names_without_definition(source) == {"c"}
    assert names_without_definition("class A(B): x: C = [y := 1, y]") == {"B", "C"}
