"""Program that calls the functions of a response inside the sandbox. It is sent there as text and never imported.

`contest_names.py` is in front of it, with `solution`.

    stdin, one line:   {"marker": text, "program": text, "with_names": whether of a contest, "calls": [call, ...]}
    stdout, a line for each call that returned:   MARKER [number of the call, value]

A call is {"function", "arguments"}, {"expression"} or {"test"}, the last two with a "setup" that runs first. Values
are JSON; a type that JSON does not have is a list whose first item names it: ["tuple", 1, 2].
"""

import json
import numbers
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_mg.rewards.contest_names import solution


def main() -> None:
    """Reads the request, runs the program and makes the calls."""
    request = json.loads(sys.stdin.readline())
    # Output of the program itself is dropped: it would count against the limit of the output.
    report = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    space = solution(request["program"], "solution", request["with_names"])
    for number, call in enumerate(request["calls"]):
        try:
            line = json.dumps([number, encoded(result(call, space))])
        except BaseException as error:
            print(f"call {number}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        print(request["marker"], line, file=report, flush=True)
    os._exit(0)  # without waiting for threads of the program


def result(call: dict[str, Any], space: dict[str, Any]) -> Any:
    """Makes a call in a namespace and returns its value."""
    if "function" in call:
        return function(call["function"], space)(*call["arguments"])
    exec(call["setup"], space)
    if "expression" in call:
        return eval(call["expression"], space)
    exec(call["test"], space)
    return True


def function(name: str, space: dict[str, Any]) -> Any:
    """Finds a function by name, or as a method of LeetCode's class Solution."""
    return space[name] if name in space else getattr(space["Solution"](), name)


def encoded(value: Any) -> Any:
    """Encodes a value as JSON; TypeError where that is not possible."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    for name, kinds in (("list", list), ("tuple", tuple), ("set", (set, frozenset))):
        if isinstance(value, kinds):
            return [name, *map(encoded, value)]
    if isinstance(value, dict):
        return ["dict", *([encoded(key), encoded(item)] for key, item in value.items())]
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if hasattr(value, "tolist"):  # an array of numpy
        return encoded(value.tolist())
    return float(value)


main()
