"""Folders of runs as a job leaves them, written by hand: metrics, status, time lines and samples of two ranks."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.helpers.json_lines import write_lines

SCHEMA = pa.schema(
    [
        ("iteration", pa.int64()),
        ("call", pa.int32()),
        *((name, pa.int64()) for name in ("sample_id", "group", "prompt_id", "policy_version")),
        *((name, pa.string()) for name in ("prompt", "response", "answer", "source", "finish")),
        ("reward", pa.float32()),
        ("parts", pa.map_(pa.string(), pa.float32())),
        ("prompt_length", pa.int32()),
        ("truncated", pa.bool_()),
        ("tokens", pa.list_(pa.int32())),
        ("pieces", pa.list_(pa.string())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("policy_versions", pa.list_(pa.int64())),
        ("turns", pa.list_(pa.struct([("by", pa.string()), ("start", pa.int32()), ("end", pa.int32())]))),
        *((name, pa.list_(pa.float32())) for name in ("rollout_logprobs", "old_logprobs", "advantages")),
    ]
)
GROUP, PROMPTS = 4, 6
HOSTILE = "<script>window.injected = 1</script><img src=x onerror='window.injected = 2'>"
"""What the first sample of every iteration says."""


def write_run(folder: Path, iterations: int = 12, seed: int = 0, state: str = "running") -> Path:
    """A run that had that many iterations; another seed tells other numbers of the same prompts."""
    folder.mkdir(parents=True)
    draw = random.Random(seed)
    (folder / "config.yaml").write_text(f"job: {{seed: {seed}}}\nmodel: {{path: {folder.name}}}\n")
    write_status(folder, iterations, state)
    write_lines(folder / "metrics.jsonl", [{"step": step} | metrics_of(step, draw) for step in range(iterations + 1)])
    write_timelines(folder, iterations, draw)
    for iteration in range(1, iterations + 1):
        write_samples(folder, iteration, draw)
    return folder


def write_status(folder: Path, iteration: int, state: str) -> None:
    status = {"recipe": "grpo", "state": state, "iteration": iteration, "iterations": 40, "phase": "update"}
    status |= {"started": 1.0e9, "updated": 1.0e9, "ranks": 2, "tokens_per_second": 1234.5, "eta_seconds": 754.0}
    (folder / "status.json").write_text(json.dumps(status))


def metrics_of(step: int, draw: random.Random) -> dict[str, float | None]:
    if step == 0:
        return {"eval/reward": 0.05}
    gained = 1 - math.exp(-step / 12)
    reported: dict[str, float | None] = {
        "reward/mean": gained + draw.gauss(0, 0.05),
        "reward/std": 0.4 - 0.2 * gained + draw.gauss(0, 0.02),
        "response/length": 20 + 30 * gained + draw.gauss(0, 2),
        "response/truncated": max(0.0, draw.gauss(0.05, 0.02)),
        "actor/loss": draw.gauss(0, 0.02),
        "actor/entropy": 2.5 - 1.8 * gained + draw.gauss(0, 0.05),
        "actor/grad_norm": None if step == 5 else abs(draw.gauss(0.6, 0.2)),
        "actor/kl": 0.02 * gained + abs(draw.gauss(0, 0.002)),
        "rollout/staleness": 0.0,
        "time/iteration": 6.5 + draw.gauss(0, 0.4),
        "time/phase/generate": 3.1 + draw.gauss(0, 0.3),
        "time/phase/update": 2.0 + draw.gauss(0, 0.1),
        "time/phase/weight_sync": 0.4,
    }
    if step % 4 == 0:
        reported["eval/reward"] = gained
    return reported


def write_timelines(folder: Path, iterations: int, draw: random.Random, ranks: int = 2) -> None:
    (folder / "timeline").mkdir(exist_ok=True)
    for rank in range(ranks):
        lines = []
        for iteration in range(1, iterations + 1):
            begin, spans = 0.0, []
            for phase, seconds in (
                *(("generate", 3 + draw.random()), ("wait_generate", 0.2), ("forward", 0.5), ("row_dispatch", 0.05)),
                *(("update", 1.2 + 0.2 * draw.random()), ("optimizer", 0.3), ("update", 0.8), ("other", 0.1)),
                *(("weight_sync", 0.4), ("logging", 0.1)),
            ):
                spans.append([phase, round(begin, 6), round(begin + seconds, 6)])
                begin += seconds + (0.08 if phase == "row_dispatch" else 0.0)
            lines.append({"iteration": iteration, "start": 1.0e9 + 7 * iteration + 0.01 * rank, "spans": spans})
        write_lines(folder / "timeline" / f"rank-{rank}.jsonl", lines)


def write_samples(folder: Path, iteration: int, draw: random.Random) -> None:
    rows = [sample(iteration, number, draw) for number in range(PROMPTS * GROUP)]
    target = folder / "samples" / f"{iteration:06d}"
    target.mkdir(parents=True, exist_ok=True)
    for rank in (0, 1):
        own = rows[rank * len(rows) // 2 : (rank + 1) * len(rows) // 2]
        pq.write_table(pa.Table.from_pylist(own, SCHEMA), target / f"rank-{rank}.parquet", compression="zstd")


def set_column(file: Path, name: str, values: list[Any]) -> None:
    """Replaces a column of a Parquet file, by a new file as a job does."""
    table, new = pq.read_table(file), file.with_suffix(".new")
    column = pa.chunked_array([values], table.schema.field(name).type)
    pq.write_table(table.set_column(table.schema.get_field_index(name), name, column), new)
    new.replace(file)


def sample(iteration: int, number: int, draw: random.Random) -> dict[str, Any]:
    """The first one contains markup, and one of each group calls a tool."""
    prompt_id = (iteration - 1) % 2 * PROMPTS + number // GROUP
    first, second = prompt_id + 3, 2 * prompt_id + 5
    prompt = ["What", " is", f" {first}", " +", f" {second}", "?", "\n"]
    turns = [("policy", [f"{first}", " plus", f" {second}", " makes", f" {first + second + draw.choice((0, 0, 1))}"])]
    if number % GROUP == 1:
        called = ["<tool>", f"{first}", "+", f"{second}", "</tool>"]
        turns = [("policy", called), ("tool", ["\n", f"{first + second}", "\n"]), *turns]
    if number == 0:
        turns = [("policy", [HOSTILE, " and", " Ünïcode", "\t", "✓"])]
    if number % GROUP == 3:
        turns = [("policy", [" and", " so", " on"] * 30)]
    response = [piece for _, pieces in turns for piece in pieces]
    pieces, ends, spans = prompt + response, len(prompt), []
    mask = [False] * len(prompt)
    for by, own in turns:
        spans.append({"by": by, "start": ends, "end": ends + len(own)})
        mask += [by == "policy"] * len(own)
        ends += len(own)
    reward = round(draw.random(), 3)
    rollout = [-draw.expovariate(1.5) if on else 0.0 for on in mask]
    return {
        "iteration": iteration,
        "call": 0,
        "sample_id": (iteration - 1) * PROMPTS * GROUP + number,
        "group": (iteration - 1) * PROMPTS + number // GROUP,
        "prompt_id": prompt_id,
        "policy_version": iteration - 1,
        "prompt": "".join(prompt),
        "response": "".join(response),
        "answer": None if number == 0 else str(first + second),
        "source": "sums" if prompt_id % 3 else "carry",
        "finish": "length" if number % GROUP == 3 else "stop",
        "reward": reward,
        "parts": {"exact": reward, "form": 1.0},
        "prompt_length": len(prompt),
        "truncated": number % GROUP == 3,
        "tokens": [1000 + i for i in range(len(pieces))],
        "pieces": pieces,
        "loss_mask": mask,
        "policy_versions": [
            iteration - 1 - (1 if on and i % 7 == 0 and iteration > 1 else 0) for i, on in enumerate(mask)
        ],
        "turns": spans,
        "rollout_logprobs": rollout,
        "old_logprobs": [value + (draw.gauss(0, 0.02) if value else 0.0) for value in rollout],
        "advantages": [(reward - 0.5) * (1 + 0.2 * draw.random()) if on else 0.0 for on in mask],
    }
