"""The clock of an event loop: its time limits pass when a test wants them to, however fast the machine is."""

import asyncio


def pass_time(seconds: float) -> None:
    """Moves the clock of the running event loop, so that limits of fewer seconds are over at once."""
    loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + seconds  # type: ignore[method-assign]
