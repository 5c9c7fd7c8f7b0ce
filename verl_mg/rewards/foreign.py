"""Calls of reward functions with the interface of another framework, and what they return as a `Reward`."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from verl_mg.errors import UserError
from verl_mg.rewards.sample import Reward


def adapted(
    function: Callable[..., Any], arguments: Callable[[Any], dict[str, Any]], convert: Callable[[Any], Any]
) -> Callable[[Any], Any]:
    """Returns a function of a sample, or of several, that calls another one; it is async where that one is.

    Args:
        function: the function to call, sync or async.
        arguments: makes its keyword arguments of the sample or samples.
        convert: applied to its result.
    """
    if inspect.iscoroutinefunction(function):

        async def call_async(given: Any) -> Any:
            return convert(await function(**arguments(given)))

        return call_async

    async def after(result: Awaitable[Any]) -> Any:
        return convert(await result)

    def call(given: Any) -> Any:
        # A decorated async function does not look like one.
        result = function(**arguments(given))
        return after(result) if inspect.isawaitable(result) else convert(result)

    return call


def reward_of(result: Any, key: str, name: str, remedy: str) -> Reward:
    """Returns a number, or a mapping with further values, as a reward.

    The other numbers of a mapping are parts, texts are left out. `pred` is the final answer, as in verl's functions.

    Args:
        result: what the function returned.
        key: entry of a mapping with the value of the reward.
        name, remedy: name of the reward, and what to do about a mapping without the entry, for errors.
    """
    if not isinstance(result, Mapping):
        return Reward(plain_number(result))
    if key not in result:
        raise UserError(f"reward '{name}' returned a mapping without '{key}' ({', '.join(map(str, result))}). {remedy}")
    values = {str(part): plain_number(value) for part, value in result.items() if part != key}
    parts = {part: value for part, value in values.items() if isinstance(value, int | float)}
    answer = result.get("pred")
    return Reward(plain_number(result[key]), parts, answer if isinstance(answer, str) else None)


def reference(value: Any, answer: str | None) -> Any:
    """Returns a copy of the value that was read as an answer; the answer where that was read from another field.

    Args:
        value: the field that the other framework reads.
        answer: the answer, as the data's reader made it.
    """
    # Answers are texts, while functions of other frameworks get the numbers, lists and mappings of the record.
    text = json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, list | dict) else str(value)
    # A copy: functions may change it, and all samples of a prompt share the record.
    return copy.deepcopy(value) if text == answer else answer


def plain_number(value: Any) -> Any:
    """Returns a number of numpy or torch as one of Python, other values unchanged."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value
