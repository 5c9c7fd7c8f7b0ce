"""Tools: Python functions that a policy may call. Whatever happens in one, what comes back is text."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, NotRequired, get_type_hints

from pydantic import ConfigDict, Field, PydanticUserError, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic takes that of typing from Python 3.12 on

from verl_mg.errors import UserError
from verl_mg.import_function import load_function

LONGEST_RESULT = 20_000
"""Characters; more is cut, since it has to become tokens."""

# "  expression: what to compute", "  n (int): how many"
PARAMETER = re.compile(r"(\w+)\s*(?:\([^)]*\))?:\s*(.*)")


@dataclass(frozen=True)
class Tool:
    """A function, plain or async, and how a policy is told of it: `Tool.of(function)` reads its signature.

    parameters: the JSON schema of its arguments, as an object.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    function: Callable[..., Any]
    arguments: TypeAdapter[dict[str, Any]]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Tool:
        """Every parameter has an annotation; the docstring says what the tool is for, its `Args:` what they mean.

        Raises:
            UserError: no function, no docstring, or a parameter without annotation or of a type that JSON lacks.
        """
        if not inspect.isroutine(function):
            raise UserError(f"tool {function!r:.80}: a tool is a function, plain or async")
        name = function.__name__
        description, meanings = _read_docstring(name, inspect.getdoc(function))
        fields = _fields(function, meanings)
        try:
            arguments = TypeAdapter(_typed_dict(fields))
            schema = arguments.json_schema()
        except PydanticUserError as error:
            raise UserError(f"tool '{name}': {str(error).splitlines()[0]}; use types that JSON can describe") from error
        return cls(name, description, _without_titles(schema), function, arguments)

    @property
    def schema(self) -> dict[str, Any]:
        """As chat templates and OpenAI's interface know it."""
        told = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": told}

    async def call(self, arguments: str, timeout: float) -> str:
        """The result for arguments in JSON, or one line `error: ...`; nothing but cancellation is raised.

        timeout: in seconds. A plain function runs in a thread, which goes on when its time is up.
        """
        try:
            given = self.arguments.validate_json(arguments)
            async with asyncio.timeout(timeout) as limit:
                result = await self._run(given)
            return _as_text(result)
        except ValidationError as error:
            return f"error: {self.name}: {_first_problem(error)}"
        except BaseException as error:  # a tool is the user's code: it raises what it likes, SystemExit too
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            if isinstance(error, TimeoutError) and limit.expired():
                return f"error: {self.name} took longer than {timeout:g} s"
            return _one_line(f"error: {self.name} raised {type(error).__name__}: {error}")

    async def _run(self, arguments: dict[str, Any]) -> Any:
        if inspect.iscoroutinefunction(self.function):
            return await self.function(**arguments)
        return await _in_thread(self.function, arguments)


async def call_tool(tools: Mapping[str, Tool], name: str, arguments: str, timeout: float) -> str:
    """`Tool.call` of the one of that name; an error line where there is none."""
    if name not in tools:
        return _one_line(f"error: there is no tool {name!r:.80}; there are: {', '.join(tools)}")
    return await tools[name].call(arguments, timeout)


def load_tools(names: Sequence[str]) -> list[Tool]:
    """Tools by `package.module:function` or `path/to/file.py:function`.

    Raises:
        UserError: no such function, one that is no tool (see `Tool.of`), or two of one name.
    """
    tools: dict[str, Tool] = {}
    for name in names:
        tool = Tool.of(load_function(name, "tool"))
        if tool.name in tools:
            raise UserError(f"tool '{name}': there is a tool {tool.name} already; rename the function")
        tools[tool.name] = tool
    return list(tools.values())


def _read_docstring(name: str, text: str | None) -> tuple[str, dict[str, str]]:
    """What stands before `Args:`, and the meaning of each parameter below it."""
    if not text:
        raise UserError(f"tool '{name}': it has no docstring; say in it what the tool is for")
    description, _, rest = text.partition("\nArgs:\n")
    meanings: dict[str, str] = {}
    parameter = ""
    for line in rest.splitlines():
        if line and not line.startswith(" "):  # the next section
            break
        if found := PARAMETER.match(line.strip()):
            parameter, meanings[found[1]] = found[1], found[2]
        elif parameter and line.strip():
            meanings[parameter] += f" {line.strip()}"
    return description.strip(), meanings


def _fields(function: Callable[..., Any], meanings: Mapping[str, str]) -> dict[str, Any]:
    """Parameter -> its type with its meaning; those with a default may be left out."""
    try:
        types = get_type_hints(function, include_extras=True)
    except NameError as error:
        raise UserError(f"tool '{function.__name__}': {error}; its annotations have to be importable") from error
    fields: dict[str, Any] = {}
    annotated: Any = Annotated
    optional: Any = NotRequired
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise UserError(f"tool '{function.__name__}': {parameter} cannot be named in a call; write it out")
        if name not in types:
            raise UserError(f"tool '{function.__name__}': parameter {name} has no annotation; write {name}: str")
        fields[name] = annotated[types[name], Field(description=meanings.get(name))]
        if parameter.default is not parameter.empty:
            fields[name] = optional[fields[name]]
    return fields


def _typed_dict(fields: dict[str, Any]) -> Any:
    # A model would not do: it has attributes of its own, which parameters may be called like.
    build: Any = TypedDict
    kind = build("Arguments", fields)
    kind.__pydantic_config__ = ConfigDict(extra="forbid")
    return kind


def _without_titles(schema: Any) -> Any:
    """Titles repeat names; a property that is called `title` stays."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _without_titles(value) for key, value in schema.items() if key != "title" or not isinstance(value, str)
    }


async def _in_thread(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Its result. The thread is a daemon: one that never ends does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def settle(outcome: tuple[Any, BaseException | None]) -> None:
        if not ended.done():
            ended.set_result(outcome)

    def work() -> None:
        outcome: tuple[Any, BaseException | None]
        try:
            outcome = function(**arguments), None
        except BaseException as error:
            outcome = None, error
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=work, name=function.__name__, daemon=True).start()
    result, error = await ended
    if error is not None:
        raise error
    return result


def _as_text(result: Any) -> str:
    text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
    return text if len(text) <= LONGEST_RESULT else f"{text[:LONGEST_RESULT]}... (cut)"


def _first_problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    where = ".".join(str(part) for part in problem["loc"])
    return _one_line(f"{where}: {problem['msg']}" if where else problem["msg"])


def _one_line(text: str) -> str:
    return " ".join(text.split())[:LONGEST_RESULT]
