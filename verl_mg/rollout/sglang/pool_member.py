"""State of a server in a pool of servers.

States of a server:

    DOWN      does not respond; `ServerMonitor` tries again, after longer and longer pauses
    BARE      responds, and does not have the weights of this job
    READY     has the weights, and generates
    DRAINING  was removed from the list: finishes its samples; after DRAIN_SECONDS others continue them
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from verl_mg.rollout.sglang.remote_engine import RemoteEngine

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds before the first attempt to reach a server again, doubled for each further one; upper limit of the pause."""


class State(Enum):
    """State of a server in a pool, see the module."""

    DOWN = "down"
    BARE = "bare"
    READY = "ready"
    DRAINING = "draining"


@dataclass
class Server:
    """A server of a pool, and the client that sends its requests."""

    number: int
    """Number of the server in the job."""
    url: str
    """Its address."""
    state: State = State.DOWN
    """State of the server, see the module."""
    client: RemoteEngine | None = None
    """Its client, once it has responded."""
    borrowed: bool = False
    """Whether another rank leads it."""
    attempt_at: float = 0.0
    """Time of `time.monotonic` of the next attempt to reach it."""
    pause: float = FIRST_PAUSE
    """Seconds until the attempt after that."""
    deadline: float = 0.0
    """Time at which others continue its samples; it is DRAINING."""

    def postpone(self, now: float) -> None:
        """Plans the next attempt to reach it, after twice the last pause."""
        self.attempt_at, self.pause = now + self.pause, min(2 * self.pause, LONGEST_PAUSE)
