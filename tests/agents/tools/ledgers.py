"""A class with tools whose objects write down what happens to them."""

import asyncio
import threading
from pathlib import Path
from typing import Any

from verl_mg.agents.tool_calls import ToolCall
from verl_mg.agents.tools.load import ClassTools
from verl_mg.agents.tools.tool import ToolSample

SAMPLE = ToolSample("6*7?", "42", {"user": "ada"})


class Ledger:
    """A sum for each sample."""

    events: list[tuple[int, str]]
    """Of all objects: the object's number and what happened; each test has a subclass with its own."""

    may_end: threading.Event
    """Of all objects: lets `add_slowly` end."""

    def __init__(self) -> None:
        self.total, self.sample = 0, SAMPLE
        self.number = len({number for number, _ in self.events})
        self.note("made")

    def note(self, event: str) -> None:
        """Write down an event."""
        self.events.append((self.number, event))

    async def open(self, sample: ToolSample) -> None:
        self.sample = sample
        await asyncio.sleep(0)
        self.note("opened")

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.note("closed")

    async def add(self, n: int) -> int:
        """Add to the sum.

        Args:
            n: the summand
        """
        before = self.total
        await asyncio.sleep(0.001)  # another call of the same object would be lost
        self.total = before + n
        return self.total

    def add_slowly(self, n: int) -> int:
        """Add in a thread, which waits until it may end."""
        self.note("begins")
        self.may_end.wait()
        self.note("ends")
        self.total += n
        return self.total

    async def wait(self) -> None:
        """Never return."""
        self.note("waits")
        await asyncio.Event().wait()

    async def leave(self) -> None:
        """End the program."""
        raise SystemExit(1)


def ledger(**members: Any) -> type[Ledger]:
    """A class with events of its own, and members in place of those of `Ledger`."""
    return type("MyLedger", (Ledger,), {"events": [], "may_end": threading.Event(), **members})


def tools_of(kind: type) -> ClassTools:
    return ClassTools("ledgers.py:Ledger", kind)


def call(name: str, arguments: str = "{}") -> ToolCall:
    return ToolCall("c1", name, arguments)


def counts(events: list[tuple[int, str]], event: str) -> list[int]:
    """How often it happened to each object."""
    made = {number for number, _ in events}
    return [sum(each == (number, event) for each in events) for number in sorted(made)]


class FileLedger:
    """Writes its end to a file, for programs that fail."""

    def __init__(self) -> None:
        self.file: Path | None = None

    async def open(self, sample: ToolSample) -> None:
        self.file = Path(sample.prompt)

    async def close(self) -> None:
        assert self.file is not None
        self.file.write_text(self.file.read_text() + "closed\n")

    def begin(self) -> None:
        """Begin the file."""
        assert self.file is not None
        self.file.write_text("begun\n")
