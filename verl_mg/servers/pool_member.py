"""State of a server in a pool of servers.

States of a server:

    assign --> DOWN --reach--> BARE --confirm--> READY --lost--> DOWN
                 |               |                 |
                 +---------------+-----------------+--removed from the list--> DRAINING --no sample left--> forgotten

    DOWN      does not respond; `ServerMonitor` tries again, after longer and longer pauses
    BARE      responds, and does not have the weights of this job
    READY     has the weights, and generates
    DRAINING  was removed from the list: finishes its samples; after DRAIN_SECONDS others continue them

A borrowed server is READY from the start, and is forgotten when it is lost or this rank has a server again.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass
from enum import Enum

from verl_mg.servers.remote_engine import RemoteEngine

LOST_SECONDS = 600.0  # longest time without any server: loading a large model takes minutes
# Seconds before the first attempt to reach a server again, doubled for each further one; upper limit of the pause.
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0


class State(Enum):
    """State of a server in a pool, see the module."""

    DOWN = "down"
    BARE = "bare"
    READY = "ready"
    DRAINING = "draining"


@dataclass
class Server:
    """A server of a pool, and the client that sends its requests."""

    number: int  # number of the server in the job
    url: str
    state: State = State.DOWN
    client: RemoteEngine | None = None  # its client, once it has responded
    borrowed: bool = False  # whether another rank leads it
    attempt_at: float = 0.0  # time of `time.monotonic` of the next attempt to reach it
    pause: float = FIRST_PAUSE  # seconds until the attempt after that
    deadline: float = 0.0  # time at which others continue its samples; it is DRAINING

    def has(self, number: int) -> bool:
        """Returns whether a number is that of this server, or of the second one of a pair."""
        return 0 <= number - self.number < (len(self.client.parts) if self.client else 1)

    def weight(self, prompt: tuple[int, ...]) -> int:
        """Returns the server's weight for a prompt, a hash of both: only a lost server's prompts go to others."""
        key = self.url.encode()[-hashlib.blake2b.MAX_KEY_SIZE :]  # the end of a long address, with its port
        return int.from_bytes(hashlib.blake2b(array("q", prompt).tobytes(), digest_size=8, key=key).digest())

    def postpone(self, now: float) -> None:
        """Plans the next attempt to reach it, after twice the last pause."""
        self.attempt_at, self.pause = now + self.pause, min(2 * self.pause, LONGEST_PAUSE)
