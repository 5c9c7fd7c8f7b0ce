"""Ports of the engines on a machine: a separate block for each engine of each job."""

from __future__ import annotations

import socket
from contextlib import ExitStack, suppress

from verl_mg.errors import UserError

# Ports of all blocks: below those that Linux gives to connections, and below those that SGLang chooses by itself.
PORTS = range(12000, 20000)
# Ports of a block: SGLang derives 14 consecutive ones from a single number, and more with data-parallel attention.
BLOCK_SIZE = 32


class PortBlock:
    """Consecutive free ports that are in no other block on this machine, whichever job it belongs to.

    Blocks have fixed positions. The first port of a block, such as 12000, is bound as long as the block is in use; the
    others, 12001 to 12031, are for the engine. UserError where no block is free.
    """

    def __init__(self) -> None:
        # Only one process can bind the first port. A search for free ports would not be enough: SGLang's processes bind
        # theirs seconds later, when another engine may have found the same ones.
        for first in PORTS[::BLOCK_SIZE]:
            self.ports = range(first + 1, first + BLOCK_SIZE)
            self._first = socket.socket()
            with suppress(OSError), ExitStack() as others:
                self._first.bind(("", first))
                for port in self.ports:
                    others.enter_context(socket.socket()).bind(("", port))
                return
            self._first.close()
        raise UserError(
            f"engine: no {BLOCK_SIZE} consecutive ports of {PORTS.start} to {PORTS.stop - 1} are free on this machine. "
            "End engines of other jobs, or use another machine."
        )

    @property
    def descriptor(self) -> int:
        """Returns the open file that reserves the block; a process that inherits it reserves the block too."""
        return self._first.fileno()

    def close(self) -> None:
        """Releases the ports of the block."""
        self._first.close()
