"""Tools: Python functions that a policy may call. The result is always text, also after an exception."""

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

MAX_RESULT_LENGTH = 20_000
"""Characters; a longer result is cut, since it becomes tokens."""

# "  expression: the formula", "  n (int): the count"
PARAMETER = re.compile(r"(\w+)\s*(?:\([^)]*\))?:\s*(.*)")


@dataclass(frozen=True)
class Tool:
    """A function, plain or async, with its description for the policy; `Tool.from_function` reads its signature."""

    name: str
    """Name of the function."""
    description: str
    """Docstring without its arguments."""
    parameters: dict[str, Any]
    """JSON schema of the arguments."""
    function: Callable[..., Any]
    """The function itself."""
    arguments: TypeAdapter[dict[str, Any]]
    """Validates arguments."""

    @classmethod
    def from_function(cls, function: Callable[..., Any]) -> Tool:
        """Builds a tool from a function with annotations and a docstring, whose `Args:` describe the parameters.

        Raises:
            UserError: not a function, no docstring, or a parameter without annotation or of a type without JSON form.
        """
        if not inspect.isroutine(function):
            raise UserError(f"tool {function!r:.80}: not a function. Give a function, plain or async.")
        name = function.__name__
        description, descriptions = _read_docstring(name, inspect.getdoc(function))
        fields = _fields(function, descriptions)
        try:
            arguments = TypeAdapter(_typed_dict(fields))
            schema = arguments.json_schema()
        except PydanticUserError as error:
            raise UserError(
                f"tool '{name}': {str(error).splitlines()[0]}. Use types that JSON can describe."
            ) from error
        return cls(name, description, _without_titles(schema), function, arguments)

    @property
    def schema(self) -> dict[str, Any]:
        """The tool in the format of chat templates and the OpenAI API."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    async def call(self, arguments: str, timeout: float) -> str:
        """Calls the function; only cancellation is raised.

        Args:
            arguments: arguments as JSON.
            timeout: seconds. A plain function runs in a thread, which continues after the timeout.

        Returns:
            The result as text, or one line `error: ...`.
        """
        try:
            values = self.arguments.validate_json(arguments)
            async with asyncio.timeout(timeout) as limit:
                result = await self._run(values)
            return _as_text(result)
        except ValidationError as error:
            return f"error: {self.name}: {_first_problem(error)}"
        except BaseException as error:  # a tool is user code, which may raise anything, SystemExit too
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
    """Calls the tool with a given name.

    Args:
        tools: tools by name.
        name: name of the tool.
        arguments: arguments as JSON.
        timeout: seconds.

    Returns:
        The result as text, or one line `error: ...`, also for an unknown name.
    """
    if name not in tools:
        return _one_line(f"error: there is no tool {name!r:.80}; the tools are: {', '.join(tools)}")
    return await tools[name].call(arguments, timeout)


def load_tools(names: Sequence[str]) -> list[Tool]:
    """Loads tools by `package.module:function` or `path/to/file.py:function`.

    Raises:
        UserError: a function does not exist or is not a tool, or two have the same name.
    """
    tools: dict[str, Tool] = {}
    for name in names:
        tool = Tool.from_function(load_function(name, "tool"))
        if tool.name in tools:
            raise UserError(f"tool '{name}': another tool is named {tool.name}. Rename the function.")
        tools[tool.name] = tool
    return list(tools.values())


def _read_docstring(name: str, text: str | None) -> tuple[str, dict[str, str]]:
    """Returns the text before `Args:`, and the description of each parameter."""
    if not text:
        raise UserError(f"tool '{name}': no docstring. Describe the tool in one.")
    description, _, rest = text.partition("\nArgs:\n")
    descriptions: dict[str, str] = {}
    parameter = ""
    for line in rest.splitlines():
        if line and not line.startswith(" "):  # the next section
            break
        if match := PARAMETER.match(line.strip()):
            parameter, descriptions[match[1]] = match[1], match[2]
        elif parameter and line.strip():
            descriptions[parameter] += f" {line.strip()}"
    return description.strip(), descriptions


def _fields(function: Callable[..., Any], descriptions: Mapping[str, str]) -> dict[str, Any]:
    """Returns the annotated type of each parameter; those with a default are optional."""
    try:
        types = get_type_hints(function, include_extras=True)
    except NameError as error:
        raise UserError(f"tool '{function.__name__}': {error}. Use annotations that can be imported.") from error
    fields: dict[str, Any] = {}
    annotated: Any = Annotated
    optional: Any = NotRequired
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise UserError(f"tool '{function.__name__}': {parameter} cannot be named in a call. Name every one.")
        if name not in types:
            raise UserError(f"tool '{function.__name__}': parameter {name} has no annotation. Write {name}: str.")
        fields[name] = annotated[types[name], Field(description=descriptions.get(name))]
        if parameter.default is not parameter.empty:
            fields[name] = optional[fields[name]]
    return fields


def _typed_dict(fields: dict[str, Any]) -> Any:
    # A pydantic model does not fit: its attributes could have the names of parameters.
    build: Any = TypedDict
    kind = build("Arguments", fields)
    kind.__pydantic_config__ = ConfigDict(extra="forbid")
    return kind


def _without_titles(schema: Any) -> Any:
    """Removes titles, which repeat names; a property named `title` remains."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _without_titles(value) for key, value in schema.items() if key != "title" or not isinstance(value, str)
    }


async def _in_thread(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Calls a function in a daemon thread, which does not keep the process from ending, and returns the result."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def set_result(outcome: tuple[Any, BaseException | None]) -> None:
        if not done.done():
            done.set_result(outcome)

    def work() -> None:
        outcome: tuple[Any, BaseException | None]
        try:
            outcome = function(**arguments), None
        except BaseException as error:
            outcome = None, error
        with suppress(RuntimeError):  # the loop is closed: there is no caller any more
            loop.call_soon_threadsafe(set_result, outcome)

    threading.Thread(target=work, name=function.__name__, daemon=True).start()
    result, error = await done
    if error is not None:
        raise error
    return result


def _as_text(result: Any) -> str:
    text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
    return text if len(text) <= MAX_RESULT_LENGTH else f"{text[:MAX_RESULT_LENGTH]}... (cut)"


def _first_problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    location = ".".join(str(part) for part in problem["loc"])
    return _one_line(f"{location}: {problem['msg']}" if location else problem["msg"])


def _one_line(text: str) -> str:
    return " ".join(text.split())[:MAX_RESULT_LENGTH]
