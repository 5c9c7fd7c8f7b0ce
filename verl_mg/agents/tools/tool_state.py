"""State of tools: opened before the first call of a sample, closed when the sample ends.

not opened --- first call ---> open --- close ---> closed          task `_live` holds the state while it is open:
    ^                           |                                  owner.open --> _end.wait() --> end of the block
    |     failed to open,       |
    +---- or connection lost ---+     the next call opens it again, and repeats the calls that were made in it
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from verl_mg.agents.tools.chat_format import ToolCall
from verl_mg.agents.tools.tool import Tool, ToolError, ToolOutput, ToolOwner, ToolSample, one_line

log = logging.getLogger(__name__)

Functions = Mapping[str, Callable[..., Any]]


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
                opened.set_exception(ToolError(_reason(error)))
            elif not isinstance(error, asyncio.CancelledError):
                log.warning("tools of %s: %s", self._owner.name, _reason(error))


def _reason(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return one_line(f"{type(error).__name__}: {error}")
