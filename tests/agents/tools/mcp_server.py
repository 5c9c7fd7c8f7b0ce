"""An MCP server of the official package. Prints its three addresses: with sessions, without, and of the latest version.

python -m tests.agents.tools.mcp_server          HTTP
python -m tests.agents.tools.mcp_server URL      the same, with sessions at this address
python -m tests.agents.tools.mcp_server stdio
"""

import asyncio
import base64
import json
import socket
import sys
from collections import Counter
from typing import Annotated, Any
from urllib.parse import urlsplit

import uvicorn
from mcp.server.mcpserver import Context, Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import EmbeddedResource, ResourceLink, TextContent, TextResourceContents
from pydantic import Field

# Two red pixels.
PICTURE = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAIAAAABCAIAAAB7QOjdAAAAD0lEQVR4nGP8z8DAwMAAAAYIAQHLR3Z1AAAAAElFTkSuQmCC"
)
ANSWERS = {"initialize": "opened", "tools/call": "called", "tools/list": "listed"}


class Server:
    """Tools whose state belongs to a session, and counts of what clients ask for."""

    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.server = MCPServer("test", log_level="CRITICAL")
        for tool in (self.add, self.fail, self.wait, self.show, self.count):
            self.server.tool(structured_output=False if tool == self.show else None)(tool)

    def add(self, n: Annotated[int, Field(description="the summand")], ctx: Context[Any, Any]) -> str:
        """Add to the sum of the session."""
        session = dict(ctx.headers or {}).get("mcp-session-id", "none")
        self.totals[session] += n
        return str(self.totals[session])

    def fail(self, why: str) -> str:
        """Fail."""
        raise ToolError(why)

    async def wait(self, seconds: float) -> str:
        """Wait."""
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.counts["cancelled"] += 1
            raise
        return "waited"

    def show(self) -> list[Any]:
        """Show what is not text."""
        page = TextResourceContents(uri="file:///page", text="a page")
        return [
            TextContent(type="text", text="two\nlines"),
            Image(data=PICTURE, format="png"),
            EmbeddedResource(type="resource", resource=page),
            ResourceLink(type="resource_link", name="more", uri="file:///more"),
        ]

    def count(self) -> dict[str, int]:
        """Count."""
        return dict(self.counts)

    def app(self, *, sessions: bool = True, latest: bool = False) -> Any:
        """An ASGI application that counts requests; `latest` refuses earlier versions of the protocol."""
        inner = self.server.streamable_http_app(stateless_http=not sessions)

        async def counting(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "http":
                return await inner(scope, receive, send)
            message = await receive()
            try:
                method = json.loads(message["body"])["method"]
            except ValueError:
                method = ""
            if scope["method"] == "DELETE":
                method = "closed"
            self.counts[ANSWERS.get(method, method)] += 1
            if latest and method == "initialize":
                return await refuse(send)
            messages = iter([message])

            async def again() -> Any:
                return next(messages, None) or await receive()

            return await inner(scope, again, send)

        return counting


async def refuse(send: Any) -> None:
    error = {"code": -32022, "message": "unsupported", "data": {"supported": ["2026-07-28"], "requested": "?"}}
    body = json.dumps({"jsonrpc": "2.0", "id": None, "error": error}).encode()
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def serve(apps: list[Any], port: int) -> None:
    sockets = [socket.create_server(("127.0.0.1", each)) for each in (port, 0, 0)]
    print(*(f"http://127.0.0.1:{each.getsockname()[1]}/mcp" for each in sockets), flush=True)
    servers = [uvicorn.Server(uvicorn.Config(app, log_level="critical")) for app in apps]
    await asyncio.gather(*(server.serve([each]) for server, each in zip(servers, sockets, strict=True)))


if __name__ == "__main__":
    if sys.argv[1:] == ["stdio"]:
        Server().server.run()
    else:
        port = int(urlsplit(sys.argv[1]).port or 0) if sys.argv[1:] else 0
        asyncio.run(serve([Server().app(), Server().app(sessions=False), Server().app(latest=True)], port))
