"""Tools that are ready for use: `rollout.tools: [verl_mg.rollout.tools.builtin:calculator]`."""

import ast
import operator
from collections.abc import Callable

from verl_mg.sandbox import run_python_async

Number = int | float

SECONDS = 20  # for a program; what it has printed by then is the result
LARGEST_BITS = 4096  # of a whole number; Python writes numbers of up to 4300 digits
LONGEST_EXPRESSION = 1000  # characters

OPERATIONS: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
SIGNS: dict[type[ast.unaryop], Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


async def python(code: str) -> str:
    """Run a Python program and see what it prints.

    Args:
        code: the whole program; only what it prints comes back
    """
    outcome = await run_python_async(code, seconds=SECONDS)
    ends = {
        "timeout": f"error: stopped after {SECONDS} s",
        "memory": "error: out of memory",
        "output": "error: stopped for printing too much",
    }
    parts = (outcome.stdout.rstrip(), outcome.stderr.rstrip(), ends.get(outcome.ended))
    return "\n".join(part for part in parts if part)


def calculator(expression: str) -> str:
    """Compute an arithmetic expression of numbers, + - * / // % ** and parentheses.

    Args:
        expression: for example (17 + 25) * 3
    """
    if len(expression) > LONGEST_EXPRESSION:
        raise ValueError(f"the expression is longer than {LONGEST_EXPRESSION} characters")
    return str(_value(ast.parse(expression.strip(), mode="eval").body))


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(number)
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in SIGNS:
            return SIGNS[type(sign)](_value(operand))
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in OPERATIONS:
            return _apply(operation, _value(left), _value(right))
    raise ValueError("only numbers, + - * / // % ** and parentheses can be computed")


def _apply(operation: ast.operator, left: Number, right: Number) -> Number:
    # Before it is computed: a power of two small numbers can fill the memory.
    if isinstance(operation, ast.Pow) and _bits(left) * abs(right) > LARGEST_BITS:
        raise ValueError(f"the power is larger than {LARGEST_BITS} bits")
    return _bounded(OPERATIONS[type(operation)](left, right))


def _bounded(number: Number) -> Number:
    if isinstance(number, complex) or _bits(number) > LARGEST_BITS:
        raise ValueError(f"the result is no real number of up to {LARGEST_BITS} bits")
    return number


def _bits(number: Number) -> int:
    return number.bit_length() if isinstance(number, int) else 0
