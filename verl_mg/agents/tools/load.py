"""Tools that a configuration names: functions, MCP servers, and classes, of which each sample has its own object."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from types import FunctionType
from typing import Any

from verl_mg.agents.tools.mcp_tools import MCP, MCPTools
from verl_mg.agents.tools.tool import Outcome, Tool, ToolOwner, ToolSample, run_function
from verl_mg.errors import UserError
from verl_mg.import_function import load_function

PREFIXED = re.compile(r"([A-Za-z]\w*)=(.+)")
NOT_TOOLS = ("open", "close")


def load_tools(names: Sequence[str]) -> list[Tool]:
    """Loads functions, classes and servers, named as in `rollout.tools`; UserError for an unusable or repeated one.

    `package.module:function`, `path/to/file.py:function`, a class in the same forms, `mcp:URL` or `mcp:COMMAND ARGUMENT
    ...`; with PREFIX= in front of it, the tools are named PREFIX_name.
    """
    tools: dict[str, Tool] = {}
    origins: dict[str, str] = {}
    for name in names:
        for tool in _load(name):
            if tool.name in tools:
                raise UserError(
                    f"rollout.tools={name}: another tool is named {tool.name}, of {origins[tool.name]}. Rename one, or "
                    f"write PREFIX={name.rpartition('=')[2]} for tools with names that begin with PREFIX_."
                )
            tools[tool.name], origins[tool.name] = tool, name
    return list(tools.values())


def _load(name: str) -> list[Tool]:
    prefixed = PREFIXED.fullmatch(name)
    prefix, place = (f"{prefixed[1]}_", prefixed[2]) if prefixed else ("", name)
    if place.startswith(MCP):
        return MCPTools(place, prefix).tools
    target = load_function(place, "tool")
    if inspect.isclass(target):
        return ClassTools(place, target, prefix).tools
    tool = Tool.from_function(target)
    return [replace(tool, name=prefix + tool.name)]


class ClassTools(ToolOwner):
    """The tools of a class, by methods in the order of their definition, with an object of the class for each sample.

    The object's `open(sample)` is called before the first tool, and its `close()` once when the sample ends, also where
    `open` has raised; a class may have neither. Each may be plain or async. A plain method runs in a thread, which
    continues after a time-out: the next call, and `close`, wait for it.
    """

    def __init__(self, name: str, kind: type, prefix: str = "") -> None:
        self.name, self.per_sample, self._kind = name, True, kind
        self.tools: list[Tool] = []
        try:
            inspect.signature(kind).bind()
        except TypeError as error:
            raise UserError(f"tool '{name}': the constructor has arguments ({error}). Give each a default.") from error
        # Base classes first: their methods come first, and a subclass replaces some of them.
        members = {key: value for base in reversed(kind.__mro__) for key, value in vars(base).items()}
        for key, member in members.items():
            if isinstance(member, FunctionType) and not key.startswith("_") and key not in NOT_TOOLS:
                tool = Tool.from_function(member, self)
                self.tools.append(replace(tool, name=prefix + tool.name))
        if not self.tools:
            raise UserError(f"tool '{name}': the class has no public method. Define one for each tool.")

    @asynccontextmanager
    async def open(self, sample: ToolSample) -> AsyncIterator[Mapping[str, Callable[..., Any]]]:
        """Makes an object and opens it with `sample`; closes it at the end."""
        target, threads = self._kind(), set[asyncio.Future[Outcome]]()

        async def run(method: Callable[..., Any], /, **arguments: Any) -> Any:
            await _ended(threads)  # also of a call whose time was up, while its thread continued
            return await run_function(method, arguments, threads)

        try:
            if hasattr(target, "open"):
                await run(target.open, sample=sample)
            yield {tool.name: partial(run, getattr(target, tool.function.__name__)) for tool in self.tools}
        finally:
            try:
                await _ended(threads)
            finally:
                if hasattr(target, "close"):
                    await run_function(target.close, {})


async def _ended(threads: set[asyncio.Future[Outcome]]) -> None:
    if threads:
        threads -= (await asyncio.wait(threads))[0]
