"""MCP server with a calculator, and an agent that lets the policy use it; both by the official packages alone.

    python calculator.py        serves; the first line of the output is the URL

The agent offers the server's tools, makes the calls of the first reply, and takes the second reply as the answer. Half
of the reward is for a call of `double` with the number of the prompt, half for an answer that repeats its result.
"""

import asyncio
import json
import socket
from typing import Any

import httpx
import httpx2
import uvicorn
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.server.mcpserver import MCPServer
from openai import AsyncOpenAI


def server() -> Any:
    calculator = MCPServer("calculator", log_level="CRITICAL")

    @calculator.tool()
    def double(n: int) -> str:
        """Doubles a number."""
        return str(2 * n)

    return calculator.streamable_http_app()


async def run(session: Any, sample: Any) -> dict[str, float]:
    messages = list(session.messages)
    right = sample.record["answer"]
    called = 0.0
    # Clients for https read the certificates of the system, which takes longer than an episode.
    http = httpx.AsyncClient(verify=False)
    policy = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, http_client=http)
    connection = streamable_http_client(session.options["url"], http_client=httpx2.AsyncClient(verify=False))
    async with Client(connection) as calculator, policy:
        listed = await calculator.list_tools()
        tools: Any = [
            {
                "type": "function",
                "function": {"name": t.name, "description": t.description, "parameters": t.input_schema},
            }
            for t in listed.tools
        ]
        first = await policy.chat.completions.create(model=session.model, messages=messages, tools=tools, max_tokens=1)
        reply = first.choices[0].message
        messages.append(reply.model_dump(exclude_none=True))
        for call in reply.tool_calls or ():
            result = await calculator.call_tool(call.function.name, json.loads(call.function.arguments))
            text = result.content[0].text
            called = float(text == right)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
        if not reply.tool_calls:
            return {"reward": 0.0, "called": 0.0, "answered": 0.0}
        last = await policy.chat.completions.create(model=session.model, messages=messages, tools=tools, max_tokens=1)
        answered = float(last.choices[0].message.content == right)
    session.log(f"called {called:g}, answered {answered:g}")
    return {"reward": (called + answered) / 2, "called": called, "answered": answered}


async def serve() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(f"http://127.0.0.1:{listening.getsockname()[1]}/mcp", flush=True)
        await uvicorn.Server(uvicorn.Config(server(), log_level="critical")).serve([listening])


if __name__ == "__main__":
    asyncio.run(serve())
