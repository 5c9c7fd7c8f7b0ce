"""Tools of servers of the Model Context Protocol, through its official package.

    server                              connection of
    started as a command (stdio)        each sample, to its own process
    HTTP, with a session                each sample: the session has a state
    HTTP, without sessions              all samples of an engine: each request is answered independently

Up to version 2025-11-25 of the protocol a server may give each connection a session; since 2026-07-28 there are none.

Specification: https://modelcontextprotocol.io/specification
"""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import shlex
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from verl_mg.agents.tools.tool import Tool, ToolError, ToolOwner, ToolSample, reason_of
from verl_mg.errors import UserError
from verl_mg.images import Image

if TYPE_CHECKING:
    from httpx2 import Response
    from mcp import Client
    from mcp.types import CallToolResult, ContentBlock
    from mcp.types import Tool as ListedTool

MCP = "mcp:"  # beginning of the names of servers in the configuration
CONNECT_SECONDS = 30  # limit of the first connection to a server, which lists its tools
LAST_WITH_SESSIONS = "2025-11-25"  # last version of the protocol with sessions; versions are dates


class MCPTools(ToolOwner):
    """Tools of one MCP server, in its order; UserError where it does not answer or has no tools."""

    def __init__(self, name: str, prefix: str = "") -> None:
        self.name, self._place = name, name.removeprefix(MCP).strip()
        self._is_http = self._place.startswith(("http://", "https://"))
        # Certificates are read once, not for each connection.
        self._ssl = ssl.create_default_context() if self._place.startswith("https://") else False
        self._mode, self.per_sample = "legacy", True
        self._has_sessions = not self._is_http
        _check_package(name)
        names = {prefix + tool.name: tool for tool in self._listed()}
        self._listed_names = {name: tool.name for name, tool in names.items()}
        self.tools = [self._tool(name, tool) for name, tool in names.items()]

    @asynccontextmanager
    async def open(self, sample: ToolSample) -> AsyncIterator[Mapping[str, Callable[..., Any]]]:
        """Connects to the server, and disconnects at the end of the block; `sample` is not used."""
        async with self._connected() as client:
            yield {name: partial(_call, client, listed) for name, listed in self._listed_names.items()}

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[Client]:
        from mcp import Client, StdioServerParameters

        if not self._is_http:
            command, *arguments = shlex.split(self._place)
            # The package would pass on only a few of the environment variables.
            started = StdioServerParameters(command=command, args=arguments, env=dict(os.environ))
            async with Client(started, mode=self._mode) as client:
                yield client
            return
        from httpx2 import AsyncClient
        from mcp.client.streamable_http import streamable_http_client

        # Calls have their own limit of time.
        http = AsyncClient(timeout=None, verify=self._ssl, event_hooks={"response": [self._note_session]})
        async with http, Client(streamable_http_client(self._place, http_client=http), mode=self._mode) as client:
            yield client

    async def _note_session(self, response: Response) -> None:
        self._has_sessions |= "mcp-session-id" in response.headers

    def _tool(self, name: str, tool: ListedTool) -> Tool:
        arguments: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, Any])  # the server validates them
        return Tool(name, (tool.description or tool.title or "").strip(), tool.input_schema, _call, arguments, self)

    def _listed(self) -> list[ListedTool]:
        try:
            tools = asyncio.run(self._list_in_some_version())
        except Exception as error:  # of the package, of HTTP, or of the command
            raise UserError(
                f"rollout.tools={self.name}: no MCP server answers ({reason_of(error)}). Start it, or correct the "
                f"{'address' if self._is_http else 'command'}."
            ) from error
        if not tools:
            raise UserError(f"rollout.tools={self.name}: the server has no tools. Leave it out.")
        return tools

    async def _list_in_some_version(self) -> list[ListedTool]:
        from mcp import MCPError

        # First a version with sessions, which a newer server may refuse.
        async with asyncio.timeout(CONNECT_SECONDS):
            try:
                return await self._list()
            except* MCPError:
                self._mode = "auto"
            return await self._list()

    async def _list(self) -> list[ListedTool]:
        tools: list[ListedTool] = []
        async with self._connected() as client:
            cursor: str | None = None
            while True:
                page = await client.list_tools(cursor=cursor)
                tools += page.tools
                cursor = page.next_cursor
                if not cursor:
                    break
            # Later connections use the version that was found, without another attempt.
            self._mode = client.protocol_version if client.protocol_version > LAST_WITH_SESSIONS else "legacy"
            self.per_sample = self._has_sessions
        return tools


async def _call(client: Client, name: str, /, **arguments: Any) -> str | list[str | Image]:
    result = await client.call_tool(name, arguments)
    text = _text(result)
    if result.is_error:
        raise ToolError(text)
    images = [Image(base64.b64decode(block.data)) for block in result.content if block.type == "image"]
    return [*images, *([text] if text else [])] if images else text


def _text(result: CallToolResult) -> str:
    parts = [_text_of(block) for block in result.content if block.type != "image"]
    if not parts and result.structured_content is not None:
        return TypeAdapter(Any).dump_json(result.structured_content).decode()
    return "\n".join(parts)


def _text_of(block: ContentBlock) -> str:
    match block.type:
        case "text":
            return block.text
        case "resource":
            return getattr(block.resource, "text", f"({block.resource.mime_type or 'data'} of {block.resource.uri})")
        case "resource_link":
            return f"({block.name}: {block.uri})"
    return f"({block.mime_type})"


def _check_package(name: str) -> None:
    try:
        import mcp
        from mcp import Client  # noqa: F401, of version 2
    except ImportError as error:
        raise UserError(
            f"rollout.tools={name}: the package mcp cannot be imported ({error}). Install it with "
            "pip install 'mcp>=2.3'."
        ) from error
    # It logs each failed connection, of which there is an error.
    logging.getLogger(mcp.__name__).setLevel(logging.CRITICAL)
