"""A process that judges mathematics: a line of JSON in, a line of JSON out, until its stdin ends."""

import json
import os
import resource
import signal
import sys

from verl_mg.rewards.math import is_equivalent

MEMORY = 4 << 30  # bytes; a formula may ask for more than there is


def main() -> None:
    """Answer [response, answer] with [value, parts, final answer]."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a job that is interrupted closes the pipe
    # What libraries print must not stand among the answers.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        print(json.dumps("ready"), file=answers, flush=True)
        for line in sys.stdin:
            try:
                reward = is_equivalent(*json.loads(line))
                print(json.dumps([reward.value, reward.parts, reward.answer]), file=answers, flush=True)
            except MemoryError:
                return
