"""Tools: functions that a policy may call. The result is text, also after an exception, and may have images.

A function that shows an image returns it, as an image of Pillow or a `verl_mg.images.Image`, or a list of images and of
other values, which become text.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from typing import Annotated, Any, NotRequired, get_type_hints

from pydantic import ConfigDict, Field, PydanticUserError, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic takes that of typing from Python 3.12 on

from verl_mg.errors import UserError
from verl_mg.images import RowImages, encoded

MAX_RESULT_LENGTH = 20_000  # characters; a longer result is cut, since it becomes tokens


@dataclass(frozen=True)
class ToolOutput:
    """Result of a call with images, which the policy sees in front of the text."""

    text: str  # text that the policy receives
    images: RowImages


Outcome = tuple[Any, BaseException | None]  # result of a function, or the exception that it has raised

# "  expression: the formula", "  n (int): the count"
PARAMETER = re.compile(r"(\w+)\s*(?:\([^)]*\))?:\s*(.*)")


class ToolError(Exception):
    """Failure of a tool; the policy receives the message without the name of a Python exception."""


@dataclass(frozen=True)
class ToolSample:
    """Sample for which a state of tools is opened."""

    prompt: str  # text that the policy received first
    answer: str | None  # answer of the record, unparsed; None where it has none
    record: dict[str, Any]


class ToolOwner(ABC):
    """Owner of tools that have a state: an object, or a connection to a server."""

    name: str  # name from the configuration, for messages
    per_sample: bool  # whether each sample has a separate state; otherwise all samples of an engine share one

    @abstractmethod
    def open(self, sample: ToolSample) -> AbstractAsyncContextManager[Mapping[str, Callable[..., Any]]]:
        """Opens a state, and closes it at the end of the block, in the same task; gives the tools' functions by name.

        `sample` is the one whose state it is; with a shared state, the first one that calls a tool.
        """


@dataclass(frozen=True)
class Tool:
    """A function, plain or async, with its description for the policy; `Tool.from_function` reads its signature."""

    name: str  # name by which the policy calls it
    description: str  # docstring without its arguments
    parameters: dict[str, Any]  # JSON schema of the arguments
    function: Callable[..., Any]
    arguments: TypeAdapter[dict[str, Any]]
    owner: ToolOwner | None = None  # opens the state with which the function is called; None: the function has none

    @classmethod
    def from_function(cls, function: Callable[..., Any], owner: ToolOwner | None = None) -> Tool:
        """Builds a tool from a function with annotations and a docstring, whose `Args:` describe the parameters.

        With an owner it is a method, of an object that the owner makes. UserError where an annotation or the docstring
        is missing, or a type has no JSON form.
        """
        if not inspect.isroutine(function):
            raise UserError(f"tool {function!r:.80}: not a function. Give a function, plain or async.")
        name, parameters = function.__name__, list(inspect.signature(function).parameters.values())
        description, descriptions = _read_docstring(name, inspect.getdoc(function))
        fields = _fields(function, parameters[1:] if owner else parameters, descriptions)
        try:
            arguments = TypeAdapter(_typed_dict(fields))
            schema = arguments.json_schema()
        except PydanticUserError as error:
            raise UserError(
                f"tool '{name}': {str(error).splitlines()[0]}. Use types that JSON can describe."
            ) from error
        return cls(name, description, _without_titles(schema), function, arguments, owner)

    @property
    def schema(self) -> dict[str, Any]:
        """The tool in the format of chat templates and the OpenAI API."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    async def call(self, arguments: str, timeout: float) -> str | ToolOutput:
        """Calls the function with arguments as JSON; returns its result, or one line `error: ...`.

        Only cancellation is raised. A plain function runs in a thread, which continues after `timeout` seconds.
        """
        try:
            values = self.arguments.validate_json(arguments)
            async with asyncio.timeout(timeout) as limit:
                result = await run_function(self.function, values)
            return _as_output(result)
        except ValidationError as error:
            return f"error: {self.name}: {_first_problem(error)}"
        except ToolError as error:
            return one_line(f"error: {self.name}: {error}")
        except BaseException as error:  # a tool is user code, which may raise anything, SystemExit too
            # A tool may also raise CancelledError itself, or await something that was cancelled: that is its failure.
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            if isinstance(error, TimeoutError) and limit.expired():
                return f"error: {self.name} took longer than {timeout:g} s"
            return one_line(f"error: {self.name} raised {type(error).__name__}: {error}")


async def run_function(
    function: Callable[..., Any], arguments: Mapping[str, Any], threads: set[asyncio.Future[Outcome]] | None = None
) -> Any:
    """Calls a function on the event loop if it is async, otherwise in a thread, and returns its result.

    A time-out cancels this coroutine, but not the thread, whose future is added to `threads`.
    """
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Outcome] = loop.create_future()
    if threads is not None:
        threads.add(done)

    def work() -> None:
        outcome: Outcome
        try:
            outcome = function(**arguments), None
        except BaseException as error:
            outcome = None, error
        with suppress(RuntimeError):  # the loop is closed: there is no caller any more
            loop.call_soon_threadsafe(done.set_result, outcome)

    # A daemon, which does not keep the process from ending.
    threading.Thread(target=work, name=function.__name__, daemon=True).start()
    result, error = await asyncio.shield(done)
    if error is not None:
        raise error
    return result


def one_line(text: str) -> str:
    """Returns a text as one line, cut where it is long."""
    return " ".join(text.split())[:MAX_RESULT_LENGTH]


def reason_of(error: BaseException) -> str:
    """Returns an exception, the first one of a group, as one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return one_line(f"{type(error).__name__}: {error}")


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


def _fields(
    function: Callable[..., Any], parameters: Sequence[inspect.Parameter], descriptions: Mapping[str, str]
) -> dict[str, Any]:
    """Returns the annotated type of each parameter; those with a default are optional."""
    try:
        types = get_type_hints(function, include_extras=True)
    except NameError as error:
        raise UserError(f"tool '{function.__name__}': {error}. Use annotations that can be imported.") from error
    fields: dict[str, Any] = {}
    annotated: Any = Annotated
    optional: Any = NotRequired
    for parameter in parameters:
        name = parameter.name
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
    # Removes titles, which repeat names; a property named `title` remains.
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _without_titles(value) for key, value in schema.items() if key != "title" or not isinstance(value, str)
    }


def _as_output(result: Any) -> str | ToolOutput:
    """Returns the text of a result, with its images; raises where one of them cannot be decoded."""
    values = result if isinstance(result, list | tuple) else [result]
    images = [encoded(value) for value in values]
    if not any(images):
        return _as_text(result)
    shown = tuple(image for image in images if image)
    # Decoded here, so that a corrupt image is an error of the tool, which the policy reads.
    for image in shown:
        image.pixels()
    rest = [_as_text(value) for value, image in zip(values, images, strict=True) if not image]
    return ToolOutput(_as_text("\n".join(rest)), shown)


def _as_text(result: Any) -> str:
    text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
    return text if len(text) <= MAX_RESULT_LENGTH else f"{text[:MAX_RESULT_LENGTH]}... (cut)"


def _first_problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    location = ".".join(str(part) for part in problem["loc"])
    return one_line(f"{location}: {problem['msg']}" if location else problem["msg"])
