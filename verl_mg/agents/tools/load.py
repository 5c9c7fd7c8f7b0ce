"""Loads the tools that a configuration names."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import replace

from verl_mg.agents.tools.class_tools import ClassTools
from verl_mg.agents.tools.mcp_tools import MCP, MCPTools
from verl_mg.agents.tools.tool import Tool
from verl_mg.errors import UserError
from verl_mg.import_function import load_function

PREFIXED = re.compile(r"([A-Za-z]\w*)=(.+)")


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
