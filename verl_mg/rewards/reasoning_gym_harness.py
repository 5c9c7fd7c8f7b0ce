"""Program in the sandbox that scores answers to prompts of reasoning-gym.

The scoring functions of some tasks evaluate the answer as Python. So each runs in a separate process, which is
killed when its time is up.

stdin: `{"seconds": 10, "answers": [[task, entry, answer], ...]}`, with tuples as `{"()": [...]}`. stdout: the line
"ready", then for each answer the line of its score, or "failed".
"""

import json
import os
import select
import signal
import sys
from typing import Any

import reasoning_gym  # type: ignore[import-not-found, import-untyped, unused-ignore]


def main() -> None:
    """Scores the answers of stdin."""
    request = json.load(sys.stdin, object_hook=_restored)
    print("ready", flush=True)
    for task, entry, answer in request["answers"]:
        print(_scored(task, entry, answer, request["seconds"]), flush=True)


def _restored(value: dict[str, Any]) -> Any:
    return tuple(value["()"]) if value.keys() == {"()"} else value


def _scored(task: str, entry: dict[str, Any], answer: str, seconds: float) -> str:
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            score = float(reasoning_gym.get_score_answer_fn(task)(answer, entry))
            os.write(sending, repr(score).encode())
        finally:  # parsers raise anything for text that is no answer
            os._exit(0)
    os.close(sending)
    text = os.read(receiving, 40) if select.select([receiving], [], [], seconds)[0] else b""
    os.close(receiving)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    try:
        return repr(float(text))
    except ValueError:
        return "failed"


if __name__ == "__main__":
    main()
