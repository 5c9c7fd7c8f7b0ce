"""Tool calls of the samples of one engine, on an event loop in a separate thread.

engine's thread                         thread "tools"
begin        entry in _samples
start -----> run_coroutine_threadsafe   _call_all: up to MAX_CONCURRENT_CALLS at a time, each with its time limit
Future <------------------------------- results
end -------> call_soon_threadsafe       _close_states: a task per state; only `close` waits for it
close -----> _close_all, then the loop stops and the thread ends
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from verl_mg.agents.tools.chat_format import MALFORMED, ToolCall
from verl_mg.agents.tools.tool import Tool, ToolOutput, ToolOwner, ToolSample, one_line
from verl_mg.agents.tools.tool_state import ToolState

MAX_CONCURRENT_CALLS = 32  # calls of all samples that run at the same time; each may start a process

UNREADABLE = "error: the tool call cannot be read; write it in the format that was described"


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
