"""Folders of runs with agents, written by hand: a trajectory has a row per segment, the first with a conversation."""

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.view.runs import GROUP, HOSTILE, SCHEMA, sample, write_status

AGENT_SCHEMA = pa.schema([*SCHEMA, ("trajectory", pa.int64()), ("conversation", pa.string())])
MAX_SEGMENTS = 1024
TRAJECTORIES = 2 * GROUP
"""In an iteration. Number n has n + 1 turns, but FORKED has those of `forked_conversation`."""
FORKED, FAILED, DAMAGED = 3, 6, 7
ERROR = "the command ended with exit code 3 <b>at once</b>"
LOG = [f"line {number}" for number in range(500)] + [HOSTILE, "Traceback: no such file"]
COMMAND = {"command": "cat > a.py <<E\nprint(1)\nE", "id": 12345678901234567890, "many": [1, {"deep": []}]}


def write_agent_run(folder: Path, iterations: int = 2) -> Path:
    (folder / "samples").mkdir(parents=True)
    (folder / "config.yaml").write_text("job: {}\n")
    write_status(folder, iterations, "finished")
    draw = random.Random(0)
    for iteration in range(1, iterations + 1):
        target = folder / "samples" / f"{iteration:06d}"
        target.mkdir()
        trajectories = [trajectory(iteration, number, draw) for number in range(TRAJECTORIES)]
        for rank in (0, 1):
            rows = [row for rows in trajectories[rank::2] for row in rows]
            pq.write_table(pa.Table.from_pylist(rows, AGENT_SCHEMA), target / f"rank-{rank}.parquet")
    return folder


def trajectory(iteration: int, number: int, draw: random.Random) -> list[dict[str, Any]]:
    """Rows of a trajectory; those of FORKED are in three segments."""
    content = conversation(number + 1)
    if number == FORKED:
        content = forked_conversation()
    if number == FAILED:
        content["error"] = ERROR
    text = "{" if number == DAMAGED else json.dumps(content)
    first = sample(iteration, number, draw)
    key = (iteration - 1) * TRAJECTORIES + number
    return [
        first
        | {"sample_id": key * MAX_SEGMENTS + segment, "trajectory": key, "group": key // GROUP}
        | {"prompt": "of the data", "response": f"segment {segment}", "conversation": text if segment == 0 else None}
        for segment in range(len(content["segments"]))
    ]


def conversation(turns: int, words: int = 3) -> dict[str, Any]:
    """A conversation in one segment; each turn but the last calls a tool."""
    text = " ".join(["word"] * words)
    listed = []
    for number in range(turns):
        messages = [said("tool", f"result {number}: {text}", tool_call_id=f"call-{number - 1}")]
        if number == 0:
            messages = [said("system", "Be brief."), said("user", f"Do it: {text}")]
        reply = said("assistant", text, reasoning_content=f"thought {number}: {text}")
        if number < turns - 1:
            reply["tool_calls"] = [called(f"call-{number}", "run", json.dumps({"number": number, "text": text}))]
        listed.append(turn(0, messages, reply, started=2.0 * number, tokens=words))
    segments = [{"tokens": 3 * words * turns, "trained": words * turns, "prefix_of": None, "prefix_length": 0}]
    return {"turns": listed, "segments": segments, "log": "", "error": ""}


def forked_conversation() -> dict[str, Any]:
    """Two calls at once, a result that comes again, a cut call without a result, another model, a fork."""
    calls = [called("call-a", "search", '{"query":"<i>x</i>"}'), called("call-b", "shell", json.dumps(COMMAND))]
    given, question = [said("system", "Use tools."), said("user", HOSTILE)], said("user", "Is it right?")
    first = said("assistant", "", reasoning_content=f"First {HOSTILE}", tool_calls=calls)
    second = said("assistant", "x" * 9000, tool_calls=[called("call-c", "shell", '{"command": "ls')])
    result = said("tool", "printed 1", tool_call_id="call-b")
    found = said("tool", f"found {HOSTILE}", tool_call_id="call-a")
    unknown = said("tool", "of no call", tool_call_id="call-z")
    turns = [
        turn(0, given, first, started=0.5, finish="tool_calls"),
        turn(0, [result, found], second, started=4.0, seconds=2.0, finish="length"),
        turn(1, [result, unknown], said("assistant", "Once more."), started=7.0),
        turn(2, [question], said("assistant", "It is."), started=9.0, model="critic", trained=False),
    ]
    segments = [
        {"tokens": 90, "trained": 40, "prefix_of": None, "prefix_length": 0},
        {"tokens": 70, "trained": 20, "prefix_of": 0, "prefix_length": 31},
        {"tokens": 25, "trained": 0, "prefix_of": None, "prefix_length": 0},
    ]
    return {"turns": turns, "segments": segments, "log": "\n".join(LOG), "error": ""}


def said(role: str, content: str, **others: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **others}


def called(identity: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def turn(segment: int, messages: list[dict[str, Any]], reply: dict[str, Any], **others: Any) -> dict[str, Any]:
    known = {"segment": segment, "messages": messages, "reply": reply, "prompt_tokens": 50, "tokens": 12}
    return known | {"model": "policy", "trained": True, "seconds": 1.0, "finish": "stop"} | others
