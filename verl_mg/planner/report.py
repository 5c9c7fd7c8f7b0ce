"""Report of `verl-mg plan`: the same numbers as tables and as JSON."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from rich.console import Console, Group
from rich.table import Column, Table

from verl_mg.layout import EnginePlacement, format_ranks
from verl_mg.layout.suggest import format_layout
from verl_mg.planner.activations import micro_batches
from verl_mg.planner.cost import bubble_share, stage_seconds, utilization
from verl_mg.planner.efficiency import CALIBRATION
from verl_mg.planner.inputs import GIB, AuxiliaryRole, PlanInputs
from verl_mg.planner.iteration_time import gathered_bytes, samples_at_once
from verl_mg.planner.memory import form_of_rows, micro_batch_bytes
from verl_mg.planner.memory_phases import phases, problem
from verl_mg.planner.search import Pair, RolloutSide, TrainSide
from verl_mg.planner.training_options import Recompute, TrainingOptions

Numbers = dict[str, Any]  # JSON object: texts, numbers, lists, and dictionaries of them

PARTS = ("rollout", "inference", "update", "sync", "offload", "overhead")
PLAIN_WIDTH = 180  # characters per line where the output is not a terminal
MOST_STAGES = 8  # different numbers of pipeline stages that are printed one by one


def pair_numbers(inputs: PlanInputs, pair: Pair) -> Numbers:
    """Returns the numbers of two given layouts; under `gib` GiB of a rank, the worst and the mean of all ranks."""
    return _frame(inputs, [pair]) | {
        "problem": problem(inputs, pair.train.memory, pair.rollout.memory),
        "train": _train(inputs, pair.train),
        "auxiliary_roles": [
            {"role": role.name, **_computing(role, role.ranks, role.parts)} for role in inputs.auxiliary_roles
        ],
        "phases": _phases(inputs, pair),
        "seconds": {name: round(getattr(pair.parts, name), 3) for name in (*PARTS, "all")},
        "rate": _rate(inputs, pair),
        "utilization": round(utilization(inputs, pair.train.layout, pair.train.update_seconds), 3),
        "rollout": _rollout(inputs, pair.rollout, pair.sync.stride),
        "sync": _sync(inputs, pair),
    }


def search_numbers(inputs: PlanInputs, pairs: Sequence[Pair]) -> Numbers:
    """Returns the numbers of the layouts that a search returned, best first."""
    return _frame(inputs, pairs) | {
        "score": "predicted seconds of an iteration",
        "layouts": [
            {
                "train": format_layout(pair.train.layout),
                "pipeline_layers": list(pair.train.layout.pipeline_layers),
                "recompute": _recomputed(pair.train.recompute),
                "rollout": format_layout(pair.rollout.layout),
                "stride": pair.sync.stride,
                "train_gib": _gib(max(pair.train.memory.totals)),
                "kv_tokens": pair.rollout.memory.tokens_per_engine,
                "bubble_share": round(bubble_share(inputs, pair.train.layout), 3),
                **{f"{name}_seconds": round(getattr(pair.parts, name), 3) for name in PARTS},
                "seconds": round(pair.seconds, 3),
                "rate": _rate(inputs, pair),
            }
            for pair in pairs
        ],
    }


def _frame(inputs: PlanInputs, pairs: Sequence[Pair]) -> Numbers:
    nodes = max((-(-pair.rollout.layout.ranks // inputs.node) for pair in pairs), default=1)
    spans = [
        f"an engine has {nodes} nodes, of which the job starts a part each; sums over ranks of several nodes take the "
        "latency and the speed between nodes"
    ]
    return {
        "model": inputs.weights.config.architecture,
        "parameters": inputs.size.elements,
        "ranks": inputs.ranks,
        "node": inputs.node,
        "peak": inputs.peak,
        "assumptions": [*assumptions(inputs), *(spans if nodes > 1 else [])],
    }


def _train(inputs: PlanInputs, side: TrainSide) -> Numbers:
    parts = {**side.memory.parts, "total": side.memory.totals}
    return {
        **_computing(side, inputs.placement_ranks, parts),
        "dp": side.layout.dp,
        "edp": side.layout.edp,
        "micro_batches": micro_batches(inputs, side.layout),
        "bubble_share": round(bubble_share(inputs, side.layout), 3),
        **({"stages": _stages(inputs, side)} if side.layout.pp > 1 else {}),
        **({"collectives": _collectives(inputs, side)} if inputs.options.fsdp else {}),
    }


def _stages(inputs: PlanInputs, side: TrainSide) -> list[Numbers]:
    # Seconds of one micro-batch of an update.
    layout, layers = side.layout, inputs.weights.config.layers
    by_stage = zip(side.memory.totals, stage_seconds(inputs, layout), strict=True)
    return [
        {"layers": len(layout.stage(layers, stage).layers), "gib": _gib(size), "seconds": round(seconds, 3)}
        for stage, (size, seconds) in enumerate(by_stage)
    ]


def _collectives(inputs: PlanInputs, side: TrainSide) -> dict[str, float]:
    """Returns GiB of the collectives of an optimizer step on a rank, of whole tensors."""
    sizes = vars(micro_batch_bytes(inputs, side.layout))
    return {name: _gib(micro_batches(inputs, side.layout) * size) for name, size in sizes.items()}


def _recomputed(modules: Recompute) -> str:
    return ("whole layers" if modules else "nothing") if isinstance(modules, bool) else ",".join(modules)


def _rate(inputs: PlanInputs, pair: Pair) -> float:
    return round(inputs.tokens_per_iteration / pair.seconds / inputs.ranks, 1)


def _computing(side: TrainSide | AuxiliaryRole, ranks: tuple[int, ...], parts: Mapping[str, Sequence[int]]) -> Numbers:
    """Returns the numbers that the actor and auxiliary roles have."""
    return {
        "layout": format_layout(side.layout),
        "ranks": format_ranks(ranks),
        "inference_seconds": round(side.inference_seconds, 3),
        "update_seconds": round(side.update_seconds, 3),
        "gib": {name: _spread(sizes) for name, sizes in parts.items()},
    }


def _phases(inputs: PlanInputs, pair: Pair) -> dict[str, float]:
    """Returns GiB of the fullest rank of each phase, without the KV cache, which has what is left."""
    sizes = phases(inputs, pair.train.memory, pair.rollout.memory)
    return {phase: _gib(size) for phase, size in sizes.items()}


def _rollout(inputs: PlanInputs, side: RolloutSide, stride: int) -> Numbers:
    memory, layout = side.memory, side.layout
    return {
        "layout": format_layout(layout),
        "stride": stride,
        "engines": EnginePlacement(layout, inputs.engine_ranks, stride).engines,
        "kv_bytes_per_token": max(memory.per_token),
        "kv_tokens": memory.tokens_per_engine,
        "samples_at_once": samples_at_once(inputs, layout, memory),
        "seconds": round(side.seconds, 3),
        "gib": {
            "weights": _spread(memory.weights),
            "available for the KV cache": _spread(memory.cache_bytes, worst=min),
        },
    }


def _sync(inputs: PlanInputs, pair: Pair) -> Numbers:
    sync, gathered = pair.sync, gathered_bytes(inputs, pair.train.memory)
    return {
        "seconds": round(sync.seconds, 3),
        "share_between_nodes": round(sync.share_between_nodes, 3),
        "gib": {
            "received by a rank": _spread(sync.received),
            "lower bound of received": _spread(sync.lower_bound),
            "received if full tensors were gathered": _spread(gathered),
            "entering a node": _spread(sync.entered),
        },
    }


def _spread(sizes: Sequence[float], worst: Callable[[Sequence[float]], float] = max) -> dict[str, float]:
    return {"worst": _gib(worst(sizes)), "mean": _gib(fmean(sizes))}


def _gib(size: float) -> float:
    return round(size / GIB, 3)


def show(numbers: Numbers, as_json: bool) -> None:
    """Prints the numbers of a report or of a search, as JSON or as tables."""
    if as_json:
        print(json.dumps(numbers, indent=2))
        return
    console = Console(highlight=False)
    if not console.is_terminal:  # rich would wrap at 80 columns
        console.width = PLAIN_WIDTH
    ranks, size = numbers["ranks"], numbers["parameters"] / 1e9
    head = f"{numbers['model']}, {size:.1f}B parameters, {ranks} ranks on {-(-ranks // numbers['node'])} nodes"
    tables = [_ranking(numbers)] if "layouts" in numbers else [_sizes(numbers), _facts(numbers)]
    bullets = Table.grid(padding=(0, 1))
    for line in numbers["assumptions"]:
        bullets.add_row("-", line)
    console.print(Group(head, *tables, "Assumptions", bullets))


def _sizes(numbers: Numbers) -> Table:
    table = Table("", "", *(Column(heading, justify="right") for heading in ("GiB, worst", "mean")))
    for name, side in _sides(numbers):
        for row, (what, sizes) in enumerate(side["gib"].items()):
            table.add_row("" if row else name, what, f"{sizes['worst']:,.3f}", f"{sizes['mean']:,.3f}")
        table.add_section()
    return table


def _sides(numbers: Numbers) -> Iterator[tuple[str, Numbers]]:
    train, rollout = numbers["train"], numbers["rollout"]
    yield f"train {train['layout']}", train
    for role in numbers["auxiliary_roles"]:
        yield f"{role['role']} {role['layout']}", role
    yield f"rollout {rollout['layout']}", rollout
    yield "sync", numbers["sync"]


def _facts(numbers: Numbers) -> Table:
    table = Table("", "", show_header=False)
    for row in _facts_of(numbers):
        table.add_row(*row)
    return table


def _of_stages(values: Sequence[float]) -> str:
    """Returns a number of each stage, equal neighbours as `30 x 3`; of many different ones the smallest and largest."""
    runs = [(text, len(list(equal))) for text, equal in itertools.groupby(map(_text, values))]
    if len(runs) > MOST_STAGES:
        return f"{_text(min(values))} to {_text(max(values))}"
    return ", ".join(f"{count} x {text}" if count > 1 else text for text, count in runs)


def _facts_of(numbers: Numbers) -> Iterator[tuple[str, str]]:
    train, rollout = numbers["train"], numbers["rollout"]
    yield "data parallelism, and of experts", f"dp{train['dp']}, edp{train['edp']}"
    yield "micro-batches, pipeline bubble", f"{train['micro_batches']}, {train['bubble_share']:.1%} of a step"
    if "stages" in train:
        units = {"layers": "", "gib": " GiB", "seconds": " s for a micro-batch"}
        by_stage = (_of_stages([stage[key] for stage in train["stages"]]) + unit for key, unit in units.items())
        yield "layers, memory and seconds of the pipeline stages", "; ".join(by_stage)
    if "collectives" in train:
        sums = ", ".join(f"{what} {size:,.3f}" for what, size in train["collectives"].items())
        yield "GiB of collectives in an optimizer step", sums
    yield "engines, stride of their ranks", f"{rollout['engines']}, {rollout['stride']}"
    yield (
        "KV cache of an engine",
        f"{rollout['kv_tokens']:,} tokens of {rollout['kv_bytes_per_token']:,} bytes per rank, "
        f"{rollout['samples_at_once']:,} samples at the same time",
    )
    if numbers["auxiliary_roles"]:
        by_role = {"actor": train["ranks"]} | {role["role"]: role["ranks"] for role in numbers["auxiliary_roles"]}
        yield "ranks", ", ".join(f"{role} {ranks}" for role, ranks in by_role.items())
    seconds = numbers["seconds"].items()
    yield "predicted seconds", ", ".join(f"{what} {value:,.3f}" for what, value in seconds if value)
    speed = f"{numbers['rate']:,}, {numbers['utilization']:.1%} of {numbers['peak']:,.0f} TFLOP/s"
    yield "tokens per second and rank, utilization of updates", speed
    sync = numbers["sync"]
    share = f"{sync['share_between_nodes']:.1%} of what ranks receive comes from other nodes"
    yield "weight sync", f"{sync['seconds']:,.3f} s, {share}"
    phases = ", ".join(f"{phase} {size:,.1f}" for phase, size in numbers["phases"].items())
    yield "GiB of a rank by phase, without the KV cache", phases
    yield "memory", numbers["problem"] or "fits"


def _ranking(numbers: Numbers) -> Table:
    has_chosen = any(row["pipeline_layers"] for row in numbers["layouts"])
    columns = {
        "train": "train",
        **({"pipeline_layers": "layers of stages"} if has_chosen else {}),
        "recompute": "recomputed",
        "rollout": "rollout",
        "stride": "stride",
        "train_gib": "GiB in training",
        "kv_tokens": "KV tokens",
        "bubble_share": "bubble",
        **{f"{part}_seconds": f"{part} s" for part in PARTS if part != "overhead"},
        "seconds": "all s",
        "rate": "tokens/s/rank",
    }
    table = Table(title=f"Best first by {numbers['score']}", title_justify="left")
    for key, heading in columns.items():
        # rich wraps text in columns that do not fit: layouts stay in one line.
        is_text = isinstance(numbers["layouts"][0][key], str | list)
        widest = max(len(_text(layout[key])) for layout in numbers["layouts"]) if is_text else None
        table.add_column(heading, justify="left" if is_text else "right", min_width=widest)
    for layout in numbers["layouts"]:
        table.add_row(*(_text(layout[key]) for key in columns))
    return table


def _text(value: str | float | list[int]) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"


def assumptions(inputs: PlanInputs) -> list[str]:
    """Returns the assumptions of a plan, one line each."""
    residency = ", ".join(_residency(inputs))
    steps = f"{inputs.epochs} x {inputs.minibatches} optimizer steps"
    mean = f", {inputs.lengths.mean:g} in the mean" if inputs.mean_sequence else ""
    parallelism = "tokens whole on tensor-parallel ranks" if inputs.options.fsdp else "sequence parallelism"
    return [
        _states(inputs.options),
        f"activations: a micro-batch has {inputs.longest_micro_batch} tokens, {_recomputation(inputs.recompute)}; "
        f"flash attention, {parallelism}, experts evenly loaded, logits in chunks",
        f"an iteration has {inputs.tokens_per_iteration} tokens in samples of {inputs.sequence}{mean}, and {steps}; "
        "every role runs inference once over each token, roles on disjoint ranks compute at the same time; "
        "the KV cache is bf16",
        f"a device has {inputs.memory:g} GiB, of which {inputs.reserve:g} are kept free; {residency}",
        f"a rank moves {inputs.intra_node:g} GB/s within its node of {inputs.node}, {inputs.inter_node:g} GB/s "
        f"between nodes and {inputs.host:g} GB/s to its host",
        f"a device reaches {inputs.flops:g} TFLOP/s and reads {inputs.memory_bandwidth:g} GB/s of its memory",
        *_encodings(inputs),
        f"seconds are predicted by a model {CALIBRATION}; no run of this project was compared with it"
        + ", and no figure is of the backend fsdp" * bool(inputs.options.fsdp),
        *_rows(inputs),
        *inputs.notes,
    ]


def _rows(inputs: PlanInputs) -> Iterator[str]:
    if inputs.options.fsdp and (form := form_of_rows(inputs)).reason:
        yield (
            f"rows are computed each by itself, one call of the module for a row, since packed: {form.reason}; each "
            "call gathers the layers again, which is not counted"
        )


def _states(options: TrainingOptions) -> str:
    if options.fsdp is None:
        return (
            f"weights are bf16; gradients take {options.gradient_bytes} bytes and states of the optimizer "
            f"{options.state_bytes}, the latter sharded by the distributed optimizer over dp*cp, for experts over edp"
        )
    where = "in host memory" if options.fsdp.cpu_offload else "on the device"
    gathers = "for each pass" if options.fsdp.reshard_after_forward else "once for both passes"
    return (
        f"backend fsdp: float32 weights, gradients and moments take 16 bytes, {where}, sharded over dp*cp ranks in "
        f"{options.fsdp.replicas} copies; layers are gathered in bf16 {gathers}, each while another one computes"
    )


def _encodings(inputs: PlanInputs) -> Iterator[str]:
    if inputs.wire != "cast":
        yield (
            f"engines have weights in {inputs.wire}, whose values and scales the sync and the memory count; matrix "
            "products of engines are as fast as in bf16"
        )
    if inputs.delta:
        yield (
            "the sync is that of all values, as in the first update; later ones send what has changed, 0.03 of the "
            "bytes where that is 2 % of the elements (docs/benchmarks.md)"
        )


def _residency(inputs: PlanInputs) -> Iterator[str]:
    if inputs.rollout_ranks:
        yield f"the last {inputs.rollout_ranks} ranks have only engines"
        return
    roles = {"the actor": inputs.offload} | {role.name: role.offload for role in inputs.auxiliary_roles}
    places = {True: "on the host while other roles compute and engines are awake", False: "always on the device"}
    for offload, place in places.items():
        if names := [name for name in roles if roles[name] is offload]:
            yield f"{place}: {' and '.join(names)}"
    yield "engines release it while training computes" if inputs.sleep else "engines never release it"
    if inputs.memory_fraction:
        yield f"engines take {inputs.memory_fraction:g} of the memory that is free when they start"


def _recomputation(modules: Recompute) -> str:
    if isinstance(modules, bool):
        return "a layer keeps its input and recomputes the rest" if modules else "a layer keeps all activations"
    return f"a layer recomputes {', '.join(modules)} and keeps the rest"
