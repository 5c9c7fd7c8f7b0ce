"""Built-in tools for a configuration: `rollout.tools: [verl_mg.agents.tools.builtin:calculator]`."""

import ast
import operator
from collections.abc import Callable

from verl_mg.sandbox import run_python_async

Number = int | float

SECONDS = 20  # time limit of a program; the result is its output until then
MAX_BITS = 4096  # largest size of an integer; Python formats numbers of up to 4300 digits
MAX_EXPRESSION_LENGTH = 1000  # largest number of characters

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
    if len(expression) > MAX_EXPRESSION_LENGTH:
        raise ValueError(f"the expression is longer than {MAX_EXPRESSION_LENGTH} characters")
    return str(_value(ast.parse(expression.strip(), mode="eval").body))


def _value(node: ast.expr) -> Number:
    # The tree is walked, since `eval` would run any code that the policy writes.
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(number)
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in SIGNS:
            return SIGNS[type(sign)](_value(operand))
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in OPERATIONS:
            return _apply(operation, _value(left), _value(right))
    raise ValueError("only numbers, + - * / // % ** and parentheses can be computed")


def _apply(operation: ast.operator, left: Number, right: Number) -> Number:
    # Checked before the computation: a power of two small numbers can fill the memory.
    if isinstance(operation, ast.Pow) and _bits(left) * abs(right) > MAX_BITS:
        raise ValueError(f"the power is larger than {MAX_BITS} bits")
    return _bounded(OPERATIONS[type(operation)](left, right))


def _bounded(number: Number) -> Number:
    if isinstance(number, complex) or _bits(number) > MAX_BITS:
        raise ValueError(f"the result is not a real number of up to {MAX_BITS} bits")
    return number


def _bits(number: Number) -> int:
    return number.bit_length() if isinstance(number, int) else 0
