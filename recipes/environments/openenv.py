"""Plays an episode of an environment that a server of OpenEnv (openenv 0.10, openenv-core 0.3) has.

    environment --observation--> policy --reply--> action --> environment ... until it is done

Each sample has a WebSocket session and so a separate environment: by the server's HTTP routes every request would meet
a new one. Samples wait where the server has reached its `max_concurrent_envs`. The data are prompts that explain the
task, with arguments of `reset` in further fields.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import httpx

from verl_mg.agents.agent import AgentError, Result, Session, read_options
from verl_mg.errors import UserError
from verl_mg.recipes.environments.policy_client import Message, PolicyClient, policy_of
from verl_mg.rewards.reward import Sample

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

WAIT_SECONDS = 0.5  # pause before a server that has no free session is tried again
FULL, INVALID, FAILED = "CAPACITY_REACHED", "VALIDATION_ERROR", "EXECUTION_ERROR"  # codes of OpenEnv's errors
SCHEMA_SECONDS = 30.0
ACT = "act"


@dataclass(frozen=True)
class OpenEnvOptions:
    """Options of an episode in an environment."""

    url: str
    """Address of the server, http or https."""
    actions: Literal["text", "tool", "mcp"] = "text"
    """Conversion of replies to actions. "text": the text is `action_field` of the action. "tool": the action's
    schema is offered as a tool `act`. "mcp": the environment's tools are offered."""
    action_field: str = ""
    """Field of the action; "" for its only text field, or `message`."""
    observation_field: str = ""
    """Field of the observation that the policy reads; "" for its only text field, or all of it as JSON."""
    reset: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `reset`."""
    reset_fields: Sequence[str] = ()
    """Fields of the record that are further arguments of `reset`, such as seed."""
    reward: Literal["sum", "last"] = "sum"
    """Whether the reward is the sum of the steps' rewards or the last one."""
    max_turns: int = 32
    """Replies after which an episode ends."""
    max_tokens: int | None = None
    """Largest number of tokens of a reply; null for no limit but that of the sample."""


async def run(session: Session, sample: Sample) -> Result:
    """Plays an episode; see `OpenEnvOptions`. The reward has the parts "turns" and "done"."""
    options = read_options(OpenEnvOptions, session.options)
    if missing := [name for name in options.reset_fields if name not in sample.record]:
        raise UserError(
            f"record of {sample.prompt[:60]!r}: it has no `{missing[0]}`. Add it, or correct "
            "rollout.agent_options.reset_fields."
        )
    arguments = {**options.reset, **{name: sample.record[name] for name in options.reset_fields}}
    async with _environment(options.url) as environment, policy_of(session, options.max_tokens) as policy:
        actions = await _actions(options, environment)
        step = await environment.exchange("reset", arguments)
        # The observation continues the prompt, which explains the task.
        policy.add_observation(_text(step["observation"], options))
        rewards, turns = [step.get("reward")], 0
        while not step["done"] and turns < options.max_turns and (reply := await policy.reply(actions.tools)):
            turns += 1
            results = [result async for result in actions.perform(reply, policy)]
            rewards += [result.get("reward") for result in results]
            if not results:
                break  # it has called no tool
            step = results[-1]
    numbers = [float(reward) for reward in rewards if reward is not None]
    total = math.fsum(numbers) if options.reward == "sum" else (numbers or [0.0])[-1]
    return {"reward": total, "turns": turns, "done": float(step["done"])}


class _Environment:
    """An environment, which is one session of the server."""

    def __init__(self, url: str, connection: ClientConnection) -> None:
        self.url, self._connection = url, connection

    async def exchange(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Sends a message and returns the data of the reply; for an invalid action only its `error`, for the policy."""
        from websockets.exceptions import ConnectionClosed

        try:
            with contextlib.suppress(ConnectionClosed):  # a server says why before it closes
                await self._connection.send(json.dumps({"type": kind, "data": data} if data else {"type": kind}))
            reply = json.loads(await self._connection.recv())
        except (ConnectionClosed, OSError) as error:
            raise AgentError(f"{self.url}: {type(error).__name__}: {error}") from error
        content: dict[str, Any] = reply["data"]
        if reply["type"] != "error":
            return content
        if content.get("code") == FULL:
            raise _FullError
        if content.get("code") == FAILED and kind == "state":
            return {}  # some environments have no state before `reset`
        if content.get("code") == INVALID and kind == "step":
            return {"error": json.dumps(content.get("errors", content.get("message")), default=str)}
        raise AgentError(f"{self.url}: {kind} failed: {content.get('code')}: {content.get('message')}")


class _FullError(Exception):
    """The server has no free session."""


@asynccontextmanager
async def _environment(url: str) -> AsyncIterator[_Environment]:
    """Opens a session; tries again every WAIT_SECONDS while the server has no free one."""
    try:
        from websockets.asyncio.client import connect
        from websockets.exceptions import WebSocketException
    except ImportError:
        raise UserError(
            "rollout.agent: the client of OpenEnv needs websockets. Install it: pip install 'verl-mg[openenv]'."
        ) from None
    if not url.startswith(("http://", "https://")):
        raise UserError(f"rollout.agent_options.url: {url!r} is no HTTP address. Write http://HOST:PORT.")
    address = url.rstrip("/").replace("http", "ws", 1) + "/ws"
    while True:
        try:
            # websockets would refuse observations of more than 1 MiB.
            connection = await connect(address, max_size=None, proxy=None)
        except (WebSocketException, OSError) as error:
            raise AgentError(f"{url}: {type(error).__name__}: {error}") from error
        async with connection:
            # A server without a free session accepts the connection, and refuses its first message.
            environment = _Environment(url, connection)
            if await _is_open(environment):
                yield environment
                return
        await asyncio.sleep(WAIT_SECONDS)


async def _is_open(environment: _Environment) -> bool:
    try:
        await environment.exchange("state", {})
    except _FullError:
        return False
    return True


class _TextActions:
    """Actions whose field `name` is the text of a reply."""

    def __init__(self, name: str, environment: _Environment, options: OpenEnvOptions) -> None:
        self.tools: tuple[Message, ...] = ()
        self._name, self._environment, self._options = name, environment, options

    async def perform(self, reply: Message, policy: PolicyClient) -> AsyncIterator[dict[str, Any]]:
        step = await self._environment.exchange("step", {self._name: reply.get("content") or ""})
        if "error" in step:
            raise AgentError(f"{self._environment.url}: the action {self._name} is invalid: {step['error']}")
        policy.add_observation(_text(step["observation"], self._options))
        yield step


class _ToolActions:
    """Performs the tool calls of a reply, as actions or as calls of the environment's tools."""

    def __init__(self, tools: Sequence[Message], environment: _Environment, options: OpenEnvOptions) -> None:
        self.tools, self._environment, self._options = tuple(tools), environment, options

    async def perform(self, reply: Message, policy: PolicyClient) -> AsyncIterator[dict[str, Any]]:
        for call in reply.get("tool_calls", ()):
            name = call["function"]["name"]
            try:
                action: Any = json.loads(call["function"]["arguments"])
            except ValueError as error:
                action = error
            step: dict[str, Any]
            if not isinstance(action, dict) or name not in {tool["function"]["name"] for tool in self.tools}:
                step = {"error": f"{name}: no such tool, or its arguments are no JSON object: {action}"}
            else:
                called = {"type": "call_tool", "tool_name": name, "arguments": action}
                step = await self._environment.exchange("step", called if self._options.actions == "mcp" else action)
            if "error" in step:  # the policy may correct it in the next turn
                policy.add_result(call, f"error: {step['error']}")
                yield {"done": False}
            else:
                policy.add_result(call, _text(step["observation"], self._options))
                yield step
                if step["done"]:
                    return


async def _actions(options: OpenEnvOptions, environment: _Environment) -> _TextActions | _ToolActions:
    if options.actions == "mcp":
        listed = (await environment.exchange("step", {"type": "list_tools"}))["observation"]["tools"]
        tools = [_tool(tool["name"], tool.get("description", ""), tool["input_schema"]) for tool in listed]
        return _ToolActions(tools, environment, options)
    if options.actions == "text" and options.action_field:
        return _TextActions(options.action_field, environment, options)
    # A client for https reads the certificates of the system, which takes longer than many a reply.
    secure = options.url.startswith("https")
    async with httpx.AsyncClient(trust_env=False, timeout=SCHEMA_SECONDS, verify=secure) as client:
        response = await client.get(options.url.rstrip("/") + "/schema")
    if response.is_error:
        raise AgentError(f"{options.url}/schema: status {response.status_code}: {response.text[:200]}")
    schema = response.json()["action"]
    properties = {name: value for name, value in schema.get("properties", {}).items() if name != "metadata"}
    if options.actions == "tool":
        parameters = {**schema, "properties": properties}
        return _ToolActions([_tool(ACT, "Acts in the environment.", parameters)], environment, options)
    texts = [name for name, value in properties.items() if value.get("type") == "string"]
    return _TextActions(texts[0] if len(texts) == 1 else "message", environment, options)


def _tool(name: str, description: str, parameters: Mapping[str, Any]) -> Message:
    function = {"name": name, "description": description, "parameters": dict(parameters)}
    return {"type": "function", "function": function}


def _text(observation: Mapping[str, Any], options: OpenEnvOptions) -> str:
    """Returns an observation as text for the policy: one field, the only text among its fields, or all as JSON."""
    content = {name: value for name, value in observation.items() if name != "metadata"}
    if options.observation_field:
        if options.observation_field not in content:
            raise UserError(
                f"rollout.agent_options.observation_field: an observation has no {options.observation_field}. "
                f"Use {', '.join(content)}."
            )
        value = content[options.observation_field]
    elif options.actions == "mcp" and "tool_name" in content:
        return _text_of_result(content)
    else:
        texts = [value for value in content.values() if isinstance(value, str)]
        value = texts[0] if len(texts) == 1 else content
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _text_of_result(called: Mapping[str, Any]) -> str:
    if called.get("error"):
        return f"error: {called['error']['message']}"
    result = called.get("result")
    if isinstance(result, dict) and isinstance(result.get("content"), list):
        return "\n".join(str(part.get("text", part)) for part in result["content"])
    return json.dumps(result, ensure_ascii=False)
