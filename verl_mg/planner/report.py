"""What `verl-mg plan` shows: plain numbers, the same for the tables and for JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table

from verl_mg.layout import EnginePlacement, format_ranks
from verl_mg.layout.suggest import format_layout
from verl_mg.planner.cost import bubble_share, samples_at_once
from verl_mg.planner.inputs import GIB, AuxiliaryRole, PlanInputs
from verl_mg.planner.iteration_time import gathered_bytes
from verl_mg.planner.memory import micro_batches
from verl_mg.planner.memory_phases import awake, problem, syncing, training
from verl_mg.planner.search import Pair, RolloutSide, TrainSide

Numbers = dict[str, Any]
"""What JSON can say: texts, numbers, lists, and dictionaries of them."""

PARTS = ("rollout", "judging", "update", "sync", "offload")
OVER_NODES = "engines span nodes here; a job starts none that do, so far"
PLAIN_WIDTH = 130
"""Characters of a line where the output is no terminal."""


def pair_numbers(setting: PlanInputs, pair: Pair) -> Numbers:
    """Everything about two given layouts; `gib` are GiB of a rank, the worst and the mean of all."""
    return _frame(setting, [pair]) | {
        "problem": problem(setting, pair.train.memory, pair.rollout.memory),
        "train": _train(setting, pair.train),
        "beside": [_beside(role) for role in setting.beside],
        "phases": _phases(setting, pair),
        "seconds": {name: round(getattr(pair.parts, name), 3) for name in (*PARTS, "all")},
        "rollout": _rollout(setting, pair.rollout, pair.sync.stride),
        "sync": _sync(setting, pair),
    }


def search_numbers(setting: PlanInputs, pairs: Sequence[Pair]) -> Numbers:
    """The layouts that a search found, best first."""
    return _frame(setting, pairs) | {
        "score": "predicted seconds of an iteration",
        "found": [
            {
                "train": format_layout(pair.train.layout),
                "rollout": format_layout(pair.rollout.layout),
                "stride": pair.sync.stride,
                "train_gib": _gib(max(pair.train.memory.totals)),
                "kv_tokens": pair.rollout.memory.tokens_per_engine,
                "bubble_share": round(bubble_share(setting, pair.train.layout), 3),
                **{f"{name}_seconds": round(getattr(pair.parts, name), 3) for name in PARTS},
                "seconds": round(pair.seconds, 3),
            }
            for pair in pairs
        ],
    }


def _frame(setting: PlanInputs, pairs: Sequence[Pair]) -> Numbers:
    spans = any(pair.rollout.layout.ranks > setting.node for pair in pairs)
    return {
        "model": setting.weights.config.architecture,
        "parameters": setting.elements,
        "ranks": setting.ranks,
        "node": setting.node,
        "assumptions": [*setting.assumptions(), *([OVER_NODES] if spans else [])],
    }


def _train(setting: PlanInputs, side: TrainSide) -> Numbers:
    parts = {name: _spread(sizes) for name, sizes in side.memory.parts.items()}
    return {
        "layout": format_layout(side.layout),
        "dp": side.layout.dp,
        "edp": side.layout.edp,
        "micro_batches": micro_batches(setting, side.layout),
        "bubble_share": round(bubble_share(setting, side.layout), 3),
        "ranks": format_ranks(setting.standing),
        "judging_seconds": round(side.judging, 3),
        "seconds": round(side.seconds, 3),
        "gib": parts | {"all": _spread(side.memory.totals)},
    }


def _beside(role: AuxiliaryRole) -> Numbers:
    parts = {name: _spread(sizes) for name, sizes in role.parts.items()}
    return {
        "role": role.name,
        "layout": format_layout(role.layout),
        "ranks": format_ranks(role.ranks),
        "judging_seconds": round(role.judging, 3),
        "seconds": round(role.seconds, 3),
        "gib": parts,
    }


def _phases(setting: PlanInputs, pair: Pair) -> dict[str, float]:
    """GiB of the fullest rank of each phase, without the key-value cache."""
    weights, train = max(pair.rollout.memory.weights), pair.train.memory
    sizes = {"training": sum(training(setting, train).values())}
    sizes["generation"] = sum(awake(setting, train).values()) + weights
    if not setting.rollout_ranks:
        sizes["weight sync"] = sum(syncing(setting, train).values()) + weights
    return {phase: _gib(size) for phase, size in sizes.items()}


def _rollout(setting: PlanInputs, side: RolloutSide, stride: int) -> Numbers:
    memory, layout = side.memory, side.layout
    return {
        "layout": format_layout(layout),
        "stride": stride,
        "engines": EnginePlacement(layout, setting.engine_ranks, stride).engines,
        "kv_bytes_per_token": max(memory.per_token),
        "kv_tokens": memory.tokens_per_engine,
        "samples_at_once": samples_at_once(setting, layout, memory),
        "seconds": round(side.seconds, 3),
        "gib": {
            "weights": _spread(memory.weights),
            "room for the KV cache": {"worst": _gib(min(memory.room)), "mean": _gib(_mean(memory.room))},
        },
    }


def _sync(setting: PlanInputs, pair: Pair) -> Numbers:
    sync, gathered = pair.sync, gathered_bytes(setting, pair.train.memory)
    return {
        "seconds": round(sync.seconds, 3),
        "gib": {
            "received by a rank": _spread(sync.received),
            "the lower bound of that": _spread(sync.lower_bound),
            "received if full tensors were gathered": _spread(gathered),
            "entering a node from others": _spread(sync.entered),
        },
    }


def _spread(sizes: Sequence[float]) -> dict[str, float]:
    return {"worst": _gib(max(sizes)), "mean": _gib(_mean(sizes))}


def _mean(sizes: Sequence[float]) -> float:
    return sum(sizes) / len(sizes)


def _gib(size: float) -> float:
    return round(size / GIB, 3)


def show(numbers: Numbers) -> None:
    """Print the tables of a report or of a search."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    console.print(render(numbers))


def render(numbers: Numbers) -> RenderableType:
    """The same numbers, for a terminal."""
    ranks, size = numbers["ranks"], numbers["parameters"] / 1e9
    head = f"{numbers['model']}, {size:.1f}B parameters, {ranks} ranks on {-(-ranks // numbers['node'])} nodes"
    tables = [_ranking(numbers)] if "found" in numbers else [_sizes(numbers), _facts(numbers)]
    return Group(head, *tables, "Assumptions", _bullets(numbers["assumptions"]))


def _bullets(lines: Sequence[str]) -> Table:
    grid = Table.grid(padding=(0, 1))
    for line in lines:
        grid.add_row("-", line)
    return grid


def _sizes(numbers: Numbers) -> Table:
    table = Table("", "")
    for heading in ("GiB, worst", "mean"):
        table.add_column(heading, justify="right")
    for name, side in _sides(numbers):
        for row, (what, sizes) in enumerate(side["gib"].items()):
            table.add_row("" if row else name, what, f"{sizes['worst']:,.3f}", f"{sizes['mean']:,.3f}")
        table.add_section()
    return table


def _sides(numbers: Numbers) -> Iterator[tuple[str, Numbers]]:
    train, rollout = numbers["train"], numbers["rollout"]
    yield f"train {train['layout']}", train
    for role in numbers["beside"]:
        yield f"{role['role']} {role['layout']}", role
    yield f"rollout {rollout['layout']}", rollout
    yield "sync", numbers["sync"]


def _facts(numbers: Numbers) -> Table:
    table = Table("", "", show_header=False)
    for name, value in _facts_of(numbers):
        table.add_row(name, value)
    return table


def _facts_of(numbers: Numbers) -> Iterator[tuple[str, str]]:
    train, rollout = numbers["train"], numbers["rollout"]
    yield "data parallel, of experts", f"dp{train['dp']}, edp{train['edp']}"
    yield "micro-batches, pipeline bubble", f"{train['micro_batches']}, {train['bubble_share']:.1%} of a step"
    yield "engines, stride of their ranks", f"{rollout['engines']}, {rollout['stride']}"
    yield (
        "KV cache of an engine",
        f"{rollout['kv_tokens']:,} tokens of {rollout['kv_bytes_per_token']:,} bytes a rank, "
        f"{rollout['samples_at_once']:,} samples at once",
    )
    if numbers["beside"]:
        standing = {"actor": train["ranks"]} | {role["role"]: role["ranks"] for role in numbers["beside"]}
        yield "ranks", ", ".join(f"{role} {ranks}" for role, ranks in standing.items())
    seconds = numbers["seconds"].items()
    yield "predicted seconds", ", ".join(f"{what} {value:,.3f}" for what, value in seconds if value)
    phases = ", ".join(f"{phase} {size:,.1f}" for phase, size in numbers["phases"].items())
    yield "GiB of a rank, without the KV cache", phases
    yield "memory", numbers["problem"] or "fits"


def _ranking(numbers: Numbers) -> Table:
    columns = {
        "train": "train",
        "rollout": "rollout",
        "stride": "stride",
        "train_gib": "GiB in training",
        "kv_tokens": "KV tokens",
        "bubble_share": "bubble",
        "rollout_seconds": "rollout s",
        "judging_seconds": "judging s",
        "update_seconds": "update s",
        "sync_seconds": "sync s",
        "offload_seconds": "offload s",
        "seconds": "all s",
    }
    table = Table(title=f"Best first by {numbers['score']}", title_justify="left")
    for key, heading in columns.items():
        table.add_column(heading, justify="left" if key in ("train", "rollout") else "right")
    for found in numbers["found"]:
        table.add_row(*(_text(found[key]) for key in columns))
    return table


def _text(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"
