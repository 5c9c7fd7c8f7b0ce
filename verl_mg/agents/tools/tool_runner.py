"""Tool calls of the samples of one engine, on an event loop in a separate thread, and the states that tools have.

engine's thread                         thread "tools"
begin        entry in _samples
start -----> run_coroutine_threadsafe   _call_all: up to MAX_CONCURRENT_CALLS at a time, each with its time limit
Future <------------------------------- results
end -------> call_soon_threadsafe       _close_states: a task per state; only `close` waits for it
close -----> _close_all, then the loop stops and the thread ends

A state is opened before the first call of a sample, and closed when the sample ends:

not opened --- first call ---> open --- close ---> closed          task `_live` holds the state while it is open:
    ^                           |                                  owner.open --> _end.wait() --> end of the block
    |     failed to open,       |
    +---- or connection lost ---+     the next call opens it again, and repeats the calls that were made in it
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from verl_mg.agents.tool_calls import MALFORMED, ToolCall
from verl_mg.agents.tools.tool import Tool, ToolError, ToolOutput, ToolOwner, ToolSample, one_line, reason_of

log = logging.getLogger(__name__)

MAX_CONCURRENT_CALLS = 32  # calls of all samples that run at the same time; each may start a process

Functions = Mapping[str, Callable[..., Any]]
UNREADABLE = "error: the tool call cannot be read; write it in the format that was described"


class ToolState:
    """The state that the tools of one owner have for a sample, or for all samples of an engine; for one event loop.

    With a state for each sample, calls run one after another, in the order in which the policy wrote them. `earlier`
    are calls that the sample made before it was aborted; they are repeated first. `timeout` is in seconds, for each
    call, and to open and to close the state.

    A task lives as long as the state: connections have to be opened and closed in the same task.
    """

    def __init__(self, owner: ToolOwner, sample: ToolSample, earlier: Sequence[tuple[Tool, ToolCall]], timeout: float):
        self._owner, self._sample, self._timeout = owner, sample, timeout
        self._made = list(earlier)
        self._order, self._end = asyncio.Lock(), asyncio.Event()
        # The last one has the state; those before it failed, and may still be ending.
        self._lives: list[asyncio.Task[None]] = []
        self._functions: Functions = {}

    async def call(self, tool: Tool, call: ToolCall) -> str | ToolOutput:
        """Calls a tool with the state; returns its result, or one line `error: ...`."""
        # A shared state is only opened under the lock: its calls are independent and may overlap.
        async with self._order:
            try:
                await self._open()
            except ToolError as error:
                return one_line(f"error: {tool.name}: {self._owner.name} cannot be opened ({error})")
            if self._owner.per_sample:
                self._made.append((tool, call))
                return await self._run(tool, call)
        return await self._run(tool, call)

    async def close(self) -> None:
        """Closes the state, after the call that is ending."""
        # Never released, so that no call begins afterwards.
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timeout):
                await self._order.acquire()
        self._end.set()
        for _ in range(2):  # it interrupts what takes too long: a call or `open`, then `close`
            if self._lives:
                await asyncio.wait(self._lives, timeout=self._timeout)
            for life in self._lives:
                life.cancel()

    async def _run(self, tool: Tool, call: ToolCall) -> str | ToolOutput:
        function = self._functions[tool.name]
        return await replace(tool, function=function).call(call.arguments, self._timeout)

    async def _open(self) -> None:
        """Opens the state if it is not open; ToolError where that fails or takes too long."""
        if self._lives and not self._lives[-1].done():
            return
        opened: asyncio.Future[Functions] = asyncio.get_running_loop().create_future()
        life = asyncio.create_task(self._live(opened))
        self._lives = [*(life for life in self._lives if not life.done()), life]
        try:
            async with asyncio.timeout(self._timeout):
                self._functions = await opened
        except TimeoutError as error:
            raise ToolError(f"it takes longer than {self._timeout:g} s") from error
        finally:
            if opened.cancelled():
                life.cancel()
        if self._owner.per_sample:
            for tool, call in self._made:
                await self._run(tool, call)

    async def _live(self, opened: asyncio.Future[Functions]) -> None:
        try:
            async with self._owner.open(self._sample) as functions:
                if not opened.done():
                    opened.set_result(functions)
                await self._end.wait()
        except BaseException as error:  # a tool is user code, which may raise anything
            if not opened.done():
                opened.set_exception(ToolError(reason_of(error)))
            elif not isinstance(error, asyncio.CancelledError):
                log.warning("tools of %s: %s", self._owner.name, reason_of(error))


@dataclass
class _SampleTools:
    """States of the tools of one sample, while it is generated."""

    sample: ToolSample
    earlier: Sequence[ToolCall]
    states: dict[ToolOwner, ToolState] = field(default_factory=dict)


class ToolRunner:
    """Runs calls, and keeps the states of tools between the calls of a sample. Samples are named by their ids.

    `begin` before the first calls of a sample, `start` for the calls of a turn, `end` after the last one, also where
    calls were cancelled. `timeout` is in seconds, for each call from its start, and to open and to close a state.
    """

    def __init__(self, tools: Sequence[Tool], timeout: float) -> None:
        self._tools, self._timeout = {tool.name: tool for tool in tools}, timeout
        self.has_states = any(tool.owner is not None and tool.owner.per_sample for tool in tools)
        self._samples: dict[int, _SampleTools] = {}
        self._shared: dict[ToolOwner, ToolState] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._call_slots = asyncio.Semaphore(MAX_CONCURRENT_CALLS)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tools", daemon=True)
        self._thread.start()
        # A job that fails does not close its engines, but states may be processes and connections.
        if any(tool.owner is not None for tool in tools):
            atexit.register(self.close)

    def begin(self, sample_id: int, sample: ToolSample, earlier: Sequence[ToolCall]) -> None:
        """Prepares the calls of a sample, which made `earlier` ones before it was aborted; does nothing if prepared."""
        self._samples.setdefault(sample_id, _SampleTools(sample, earlier))

    def has_begun(self, sample_id: int) -> bool:
        """Returns whether `begin` was called for a sample that has not ended."""
        return sample_id in self._samples

    def start(self, sample_id: int, calls: Sequence[ToolCall]) -> Future[list[str | ToolOutput]]:
        """Starts the calls of a turn; returns their results, in their order."""
        return asyncio.run_coroutine_threadsafe(self._call_all(self._samples[sample_id], calls), self._loop)

    def end(self, sample_id: int) -> None:
        """Closes the states of a sample; does not wait."""
        tools = self._samples.pop(sample_id, None)
        if tools is not None:
            self._loop.call_soon_threadsafe(self._close_states, tools.states)

    def close(self) -> None:
        """Closes all states, and ends the event loop."""
        if self._thread.is_alive():
            for sample_id in list(self._samples):
                self.end(sample_id)
            asyncio.run_coroutine_threadsafe(self._close_all(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
        atexit.unregister(self.close)

    # -- on the event loop

    async def _call_all(self, tools: _SampleTools, calls: Sequence[ToolCall]) -> list[str | ToolOutput]:
        return list(await asyncio.gather(*(self._call(tools, call) for call in calls)))

    async def _call(self, tools: _SampleTools, call: ToolCall) -> str | ToolOutput:
        if call is MALFORMED:
            return UNREADABLE
        if call.name not in self._tools:
            return one_line(f"error: there is no tool {call.name!r:.80}; the tools are: {', '.join(self._tools)}")
        tool = self._tools[call.name]
        async with self._call_slots:
            if tool.owner is None:
                return await tool.call(call.arguments, self._timeout)
            return await self._state(tool.owner, tools).call(tool, call)

    def _state(self, owner: ToolOwner, tools: _SampleTools) -> ToolState:
        states = tools.states if owner.per_sample else self._shared
        if owner not in states:
            known = [(self._tools[call.name], call) for call in tools.earlier if call.name in self._tools]
            earlier = [(tool, call) for tool, call in known if tool.owner is owner]
            states[owner] = ToolState(owner, tools.sample, earlier, self._timeout)
        return states[owner]

    def _close_states(self, states: dict[ToolOwner, ToolState]) -> None:
        for state in states.values():
            closing = asyncio.create_task(state.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _close_all(self) -> None:
        self._close_states(self._shared)
        if self._closing:
            await asyncio.wait(self._closing)
        # Calls that were not cancelled by their samples, and states that could not be closed in time.
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        if rest:
            await asyncio.wait(rest, timeout=self._timeout)
