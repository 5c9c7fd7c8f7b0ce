"""Programs run in the sandbox: right ones pass, wrong and hostile ones score 0 and leave nothing behind."""

import json
import time
import uuid
from typing import Any

import pytest

from tests.helpers.named_processes import named, processes_named
from verl_mg.errors import UserError
from verl_mg.rewards import AsyncScorer, LoadedReward, Reward, Sample, load_reward
from verl_mg.rewards.code import last_program, same_text

pytestmark = pytest.mark.usefixtures("sandbox")

TIMEOUT = 600.0  # seconds for programs that are to end by themselves, on a machine that is busy

DOUBLE = {"inputs": ["1\n", "21\n"], "outputs": ["2\n", "42\n"]}
ADD = {"fn_name": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [3, [[1, 2]]]}
ASSERTIONS = ["assert add(1, 2) == 3", "assert (3, 4) == add((3,), (4,))", "assert isinstance(add(1, 2), int)"]
HUMAN_EVAL = {
    "test": "def check(candidate):\n    for i in range(3):\n        assert candidate(i, 1) == i + 1\n",
    "entry_point": "add",
}


def score(program: str, record: dict[str, Any], **options: Any) -> Reward:
    sample = Sample("p", f"So:\n```python\n{program}\n```\nDone.", None, record, "stop")
    return reward(**options)(sample)


def reward(**options: Any) -> LoadedReward:
    return load_reward("verl_mg.rewards.code:score", {"seconds": TIMEOUT} | options)


def parts(correct: float, passed: float, answered: float = 1.0) -> dict[str, float]:
    return {"correct": correct, "passed": passed, "answered": answered}


ADDS = "def add(a, b):\n    print('noise')\n    return a + b"


@pytest.mark.parametrize(
    ("program", "record"),
    [
        ("print(int(input()) * 2)", {"input_output": DOUBLE}),
        ("print(int(input()) * 2)", {"input_output": json.dumps(DOUBLE)}),
        ("print(int(input()) * 2)", {"test_cases": [{"input": "3", "output": "6"}]}),
        ("print(input() + input())", {"tests": {"inputs": [["a", "b"]], "outputs": [["ab"]]}}),
        (ADDS, {"input_output": ADD}),
        (ADDS, {"input_output": {"fn_name": "add", "inputs": ["[1]\n[2]"], "outputs": ["[1, 2]"]}}),
        ("class Solution:\n    def add(self, a, b): return a + b", {"input_output": ADD}),
        ("def add(a, b): return np.float64(a) / b", {"input_output": ADD | {"inputs": [[3, 10000000]],
         "outputs": [3e-7]}}),
        ("import numpy\ndef add(a, b): return numpy.float32(a) / b", {"input_output": ADD | {"inputs": [[1, 3]],
         "outputs": [0.333333]}}),
        ("def add(a, b): return {(1,): {2: (a, b)}}[(1,)]", {"input_output": ADD | {"inputs": [[1, 3]],
         "outputs": [{"2": [1, 3]}]}}),
        (ADDS, {"test_list": ASSERTIONS}),
        ("def f(): return (b'x', 1j, {2}, {(1,): None})",
         {"test_list": ["assert f() == (b'x', 1j, {2}, {(1,): None})"]}),
        ("def third(x): return math.sqrt(x)", {"test_list": ["assert third(9) == 3"], "test_imports": ["import math"]}),
        (ADDS, HUMAN_EVAL),
        ("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\ndef add(a, b): return A(a).x + b",
         HUMAN_EVAL),
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()\n" + ADDS, HUMAN_EVAL),
    ],
)  # fmt: skip
def test_score_right_program_returns_1(program, record):
    assert score(program, record, memory_mb=4096) == Reward(1.0, parts(1.0, 1.0))


@pytest.mark.parametrize(
    ("program", "record", "passed"),
    [
        ("print(2)", {"input_output": DOUBLE}, 1 / 2),
        ("print(int(input()) * 2); raise SystemExit(1)", {"input_output": DOUBLE}, 0.0),
        ("x = (", {"input_output": DOUBLE}, 0.0),
        ("def add(a, b): return 3", {"input_output": ADD}, 1 / 2),
        ("def subtract(a, b): return 3", {"input_output": ADD}, 0.0),
        ("x = (", {"input_output": ADD}, 0.0),
        ("def add(a, b): return object()", {"input_output": ADD}, 0.0),
        ("def add(a, b): return 4e-7", {"input_output": ADD | {"inputs": [[1, 3]], "outputs": [3e-7]}}, 0.0),
        ("def add(a, b): return 3", {"test_list": ASSERTIONS}, 2 / 3),
        ("def add(a, b): return [3, 4] if a != 1 else 3", {"test_list": ASSERTIONS}, 2 / 3),
        ("def add(a, b): return 1", HUMAN_EVAL, 0.0),
        ("x = []\nx.append(x)\ndef add(a, b): return x", {"test_list": ASSERTIONS[:2]}, 0.0),
    ],
)
def test_score_wrong_program_returns_0_or_partial_credit(program, record, passed):
    assert score(program, record).value == 0.0
    assert score(program, record, partial=True) == Reward(passed, parts(0.0, passed))


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\na\n```\n```py\nb\n```", "b\n"),
        ("```json\n{}\n```\nand\n```Python\nb\n```\nwhich prints\n```\n7\n```", "b\n"),
        ("```\na\n```", "a\n"),
        ("```python\na", None),
        ("```bash\nls\n```", None),
        ("no program", None),
        ("<think>\n```python\na\n```\n</think>\n```python\nb\n```", "b\n"),
        ("<think>\n```python\na\n```\n</think>\nDone.", None),
    ],
)
def test_last_program_returns_the_last_python_block(response, program):
    assert last_program(response) == program


def test_score_response_without_program_returns_0():
    sample = Sample("p", "I cannot.", None, {"input_output": DOUBLE}, "stop")
    assert reward()(sample) == Reward(0.0, parts(0.0, 0.0, answered=0.0))


@pytest.mark.parametrize(
    ("written", "expected", "same"),
    [
        ("1 2 \n3\n\n", "1 2\n3", True),
        ("0.3333333333", "0.33333333", True),
        ("0.34", "0.33", False),
        ("2.0", "2", False),
        ("0.0000003", "0.0000004", False),
        ("0", "1e-9", False),
        ("0", "1.5e-9", False),
        ("0.00000041", "0.0000004", True),
        ("4.0000001e-23", "4.0e-23", True),
        ("1e-17", "0.0", True),
        ("0.0000002", "0.000000", True),
        ("1\n2", "1 2", False),
        ("nan", "0.5", False),
        ("a", "b.c", False),
        ("", "", True),
    ],
)
def test_same_text_compares_words_and_fractions_by_value(written, expected, same):
    assert same_text(written, expected) is same


@pytest.mark.parametrize(
    ("record", "options", "reason"),
    [
        ({"question": "?"}, {}, "has no input_output or .*. Set the reward's option field to one of: question"),
        ({"input_output": DOUBLE}, {"field": "cases"}, "has no cases. Set .* to one of: input_output"),
        ({"input_output": {"inputs": ["1"], "outputs": []}}, {}, "cannot be read"),
        ({"input_output": {"inputs": []}}, {}, "cannot be read .KeyError: 'outputs'"),
        ({"tests": {"inputs": [], "outputs": []}}, {}, "is empty"),
        ({"test_list": ["assert ("]}, {}, "cannot be read .SyntaxError"),
        ({"test": "def check(candidate): pass"}, {}, "cannot be read .KeyError: 'entry_point'"),
        ({"input_output": DOUBLE}, {"seconds": 0}, "seconds=0"),
    ],
)
def test_score_invalid_test_cases_raise(record, options, reason):
    with pytest.raises(UserError, match=reason):
        score("print(1)", record, **options)


# -- forgery

FORGERIES = {
    "prints what the caller might": "print('0 [0, 3]')\nprint('ok')",
    "equal to everything": (
        "class Any(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
        "def add(a, b): return Any(0)"
    ),
    "leaves without an error": "import os\nos._exit(0)",
    "no assertion fails": (
        "import builtins\nbuiltins.AssertionError = type('A', (Exception,), {})\n"
        "builtins.isinstance = lambda *a: True\ndef add(a, b): return 0"
    ),
    "reads the source": "print(open('/tmp/program.py').read())\ndef add(a, b): return 0",
}


@pytest.mark.parametrize("program", FORGERIES.values(), ids=FORGERIES)
@pytest.mark.parametrize("record", [{"input_output": ADD}, {"test_list": ASSERTIONS[:2]}, {"input_output": DOUBLE}])
def test_score_forged_results_return_0(program, record):
    assert score(program, record, partial=True).value == 0.0


def test_score_expected_values_are_not_in_the_sandbox():
    search = (
        "import gc, sys\ntext = repr([o for o in gc.get_objects() if isinstance(o, (dict, list))])\n"
        "frame = sys._getframe()\nwhile frame: text += repr(frame.f_locals); frame = frame.f_back\n"
        "text += open('/tmp/program.py').read() + sys.stdin.read()\n"
        "secret, shown = str(987) + str(654), f'f({55555})'\n"
    )
    find = f"{search}def f(x): return int(secret) if secret in text else shown in text"
    assert score(find, {"test_list": ["assert f(55555) == 987654"]}).value == 0.0
    assert score(find, {"test_list": ["assert f(55555) == True"]}).value == 1.0  # the search itself works
    find = f"{search}if secret in text: print(secret)"
    assert score(find, {"input_output": {"inputs": [""], "outputs": ["987654"]}}).value == 0.0


# -- hostile programs


HOSTILE = {
    "endless loop": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "memory bomb": "hoard = []\nwhile True: hoard.append(bytearray(1 << 20))",
    "daemon": (
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork(): os._exit(0)\n    os.close(1); os.close(2)\n"
        "    time.sleep(600)\nos.wait()"
    ),
}
"""What else the sandbox holds back is tested where it is."""


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("record", [{"input_output": DOUBLE}, {"test_list": ASSERTIONS}], ids=["stdin", "calls"])
def test_score_hostile_program_returns_0_and_leaves_nothing(kind, record):
    name = uuid.uuid4().hex[:12]
    assert score(named(name, HOSTILE[kind]), record, seconds=1, memory_mb=256).value == 0.0
    assert processes_named(name) == []


def test_score_programs_concurrently_and_discard_kills():
    def sample(program: str) -> Sample:
        return Sample("p", f"```python\n{program}\n```", None, {"tests": [{"input": "", "output": "3"}]}, "stop")

    with AsyncScorer({"code": reward()}, workers=2) as scorer:
        rewards = scorer.score([sample(f"print({number})") for number in range(6)])
        assert [reward.value for reward in rewards] == [0.0, 0.0, 0.0, 1.0, 0.0, 0.0]
        name = uuid.uuid4().hex[:12]
        scorer.submit(1, sample(named(name, "while True: pass")))
        while not processes_named(name):
            time.sleep(0.05)
        scorer.discard(1)
        while processes_named(name):  # well before its time is up
            time.sleep(0.05)
