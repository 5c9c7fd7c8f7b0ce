"""Error of the plan's predicted speeds on published figures, row by row, and the fit of its constants.

    python -m tools.calibrate_plan                  error of every row with the constants of the planner
    python -m tools.calibrate_plan --fit            fits the constants, prints them and the errors
    python -m tools.calibrate_plan --leave-out      the error of rows that a fit has not seen: without each source, and
    row

`tools/published_steps.json` has the rows, each with its source. A row is predicted as a job is planned, from its model,
GPU, layouts, samples and lengths; except that the published systems gather whole tensors in their weight sync. Its
figure is

    iteration   tokens per second and GPU of whole iterations
    training    tokens per second and GPU of pretraining
    mfu         model FLOP/s of updates relative to the GPU's peak
    sync        seconds of a weight sync of shards, between ranks of training and others of generation

Rows of sources with `fitted: false` are not in the fit: they are earlier releases of a system.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from verl_mg.layout import EngineLayout, Layout
from verl_mg.models.hf_config import read_config
from verl_mg.planner.cost import inference_seconds, train_seconds, utilization
from verl_mg.planner.efficiency import FITTED, GPUS, Efficiency
from verl_mg.planner.inputs import GIB, GIGA, PlanInputs
from verl_mg.planner.iteration_time import Seconds, iteration_seconds, moved_seconds, rollout_seconds, sync_seconds
from verl_mg.planner.memory import rollout_memory, train_memory
from verl_mg.planner.training_options import TrainingOptions, recompute
from verl_mg.reshard import RankTraffic
from verl_mg.sharding.weight_table import WeightTable, weight_table

HERE = Path(__file__).parent
ENGINE_FRACTION = {"sync": 0.6, "async": 0.8}
"""Fraction of a GPU's memory that the engines of the published recipes take, by mode."""
ENGINE_REQUESTS = 1024
"""Samples that an engine of the published recipes runs at the same time, at most: the default of vLLM on these GPUs."""
BOUNDS: dict[str, tuple[float, float]] = {
    "gemm": (0.6, 0.82),
    "half_rows": (100, 600),
    "attention": (0.6, 1.1),
    "fp8": (1.2, 1.8),
    "memory": (0.7, 0.92),
    "link": (0.4, 0.95),
    "elementwise": (1.5, 6.0),
    "layer": (2e-5, 6e-4),
    "expert_layer": (5e-5, 1.5e-3),
    "imbalance": (1.0, 2.0),
    "decode_step": (1e-3, 1.5e-2),
    "decode_sample": (2e-6, 1e-4),
    "decode_layer": (2e-5, 2e-4),
    "all_reduce_near": (6e-6, 3e-5),
    "all_reduce_far": (3e-5, 1.5e-4),
    "sync": (0.2, 0.95),
    "sync_start": (0.05, 1.5),
    "gathering": (0.05, 0.6),
    "iteration": (2.0, 25.0),
}
"""Physically possible values of each constant."""


@dataclass(frozen=True, eq=False)
class Row:
    """A published figure and what it was measured with."""

    source: str
    """Name of the source."""
    kind: str
    """Kind of figure: iteration, training, mfu or sync."""
    fitted: bool
    """Whether the constants are fitted on it."""
    values: dict[str, Any]
    """Values of the row."""

    @property
    def name(self) -> str:
        """Model, GPUs and layout in one line."""
        v = self.values
        return " ".join(
            str(part)
            for part in (
                self.source,
                v["model"],
                v["gpus"],
                v["gpu"],
                v["train"],
                v.get("rollout", ""),
                v.get("mode", ""),
                "fp8" * v.get("fp8", False),
                v.get("samples", ""),
            )
            if part
        )

    @property
    def published(self) -> float:
        """Value that the source publishes."""
        names = {"mfu": "mfu", "sync": "seconds"}
        return float(self.values[names.get(self.kind, "tokens_per_second_per_gpu")])


def read_rows(path: Path = HERE / "published_steps.json") -> list[Row]:
    """Returns all rows of a file."""
    content = json.loads(path.read_text(encoding="utf-8"))
    rows = []
    for values in content["rows"]:
        source = content["sources"][values["source"]]
        known = {"prompt": source.get("prompt", 0)} | values
        rows.append(Row(values["source"], source["kind"], source.get("fitted", True), known))
    return rows


@cache
def table(model: str) -> WeightTable:
    """Returns the weight table of a model."""
    return weight_table(read_config(HERE / "model_configs" / f"{model}.json"))


def plan_inputs(row: Row, efficiency: Efficiency) -> PlanInputs:
    """Returns the inputs of a plan for a row."""
    v = row.values
    gpu = GPUS[v["gpu"]]
    mean = v.get("mean", 0) + v["prompt"] if "mean" in v else v["longest"]
    pretraining = row.kind == "training"
    overlaps = pretraining or row.kind == "iteration"
    return PlanInputs(
        table(v["model"]),
        v["gpus"],
        node=gpu.node,
        efficiency=efficiency,
        sequence=v["longest"],
        mean_sequence=mean,
        prompt=v["prompt"],
        micro_batch=v.get("micro_batch", v["longest"]),
        tokens_per_iteration=round(v["samples"] * mean),
        minibatches=v.get("steps", 1),
        recompute=recompute(v.get("recompute", False)),
        rollout_ranks=v.get("rollout_gpus", 0),
        batches_in_flight=v.get("age", 1) if v.get("mode") == "async" else 0,
        max_running_requests=ENGINE_REQUESTS,
        prefetch=v.get("mode") == "async",
        even_routing=pretraining,
        rollout_bytes=v.get("rollout_bytes", 2),
        options=TrainingOptions(
            fp8=v.get("fp8", False),
            flex_dispatch=v.get("flex", False),
            tensor_overlap=v.get("tensor_overlap", False),
            expert_overlap=v.get("expert_overlap", False),
            exchanged="ring",
            gradient_bytes=2 if row.kind == "iteration" else 4,
            overlap_gradients=overlaps,
            overlap_weights=overlaps,
            offloaded_states=v.get("host_states", 0.0),
            host_steps=v.get("host_states", 0.0),
        ),
        **efficiency.figures(gpu),
    )


def predict(row: Row, efficiency: Efficiency) -> float:
    """Returns the figure that the plan predicts for a row."""
    if row.kind == "sync":
        return sync(row, efficiency)
    inputs = plan_inputs(row, efficiency)
    v, layout = row.values, Layout.parse(row.values["train"]).fit(len(inputs.placement_ranks))
    tokens = inputs.tokens_per_iteration
    if row.kind == "iteration":
        return tokens / iteration(row, inputs, layout).all / v["gpus"]
    seconds = train_seconds(inputs, layout)
    if row.kind == "training":
        return tokens / seconds / v["gpus"]
    return utilization(inputs, layout, seconds)


def iteration(row: Row, inputs: PlanInputs, layout: Layout) -> Seconds:
    """Predicts the seconds of the parts of an iteration, with a reference on the actor's ranks."""
    v, engine = row.values, EngineLayout.parse(row.values["rollout"])
    passes = 1 + v.get("old_logprobs", True)
    limit = ENGINE_FRACTION[v.get("mode", "sync")] * inputs.memory * GIB
    generation = rollout_seconds(inputs, engine, rollout_memory(inputs, engine, limit))
    memory = train_memory(replace(inputs, offload=not inputs.rollout_ranks), layout)
    links = min(inputs.intra_node, inputs.node * inputs.inter_node)
    sync = inputs.size.bytes / (inputs.efficiency.gathering * links * GIGA)
    return iteration_seconds(
        inputs, memory, passes * inference_seconds(inputs, layout), train_seconds(inputs, layout), generation, sync
    )


def sync(row: Row, efficiency: Efficiency) -> float:
    """Predicts the seconds of a weight sync, in which each engine's rank receives its shards from other nodes."""
    v, gpu = row.values, GPUS[row.values["gpu"]]
    inputs = PlanInputs(table(v["model"]), v["gpus"], node=gpu.node, efficiency=efficiency, **efficiency.figures(gpu))
    received = max(rollout_memory(inputs, EngineLayout.parse(v["rollout"])).weights)
    traffic = {0: RankTraffic(received=received, entered=float(received))}
    return moved_seconds(inputs, sync_seconds(traffic, inputs.intra_node, inputs.inter_node))


def error(row: Row, efficiency: Efficiency) -> float:
    """Returns predicted / published - 1."""
    return predict(row, efficiency) / row.published - 1


PULL = 0.4
"""Weight of the middle of each constant's bounds in the fit: it decides where the rows leave a constant open."""


def fit(rows: Sequence[Row], start: Efficiency = FITTED, steps: int = 60) -> Efficiency:
    """Fits the constants to rows: least squares of the logarithm of the error, where large errors count less."""
    names = list(BOUNDS)
    low, high = (np.log([BOUNDS[name][side] for name in names]) for side in (0, 1))
    first = np.clip(np.log([getattr(start, name) for name in names]), low + 1e-3, high - 1e-3)

    def residuals(values: np.ndarray) -> np.ndarray:
        efficiency = Efficiency(**dict(zip(names, map(float, np.exp(values)), strict=True)))
        logs = [np.log(predict(row, efficiency) / row.published) for row in rows]
        return np.array([*logs, *(PULL * (values - (low + high) / 2) / (high - low))])

    fit = least_squares(residuals, first, bounds=(low, high), loss="soft_l1", f_scale=0.2, max_nfev=steps)
    return Efficiency(**{name: float(f"{value:.3g}") for name, value in zip(names, np.exp(fit.x), strict=True)})


def left_out(rows: Sequence[Row]) -> tuple[dict[str, list[float]], list[float]]:
    """Returns the errors of rows that the fit has not seen."""
    sources = dict.fromkeys(row.source for row in rows)
    by_source = {}
    for source in sources:
        efficiency = fit([row for row in rows if row.source != source])
        by_source[source] = [error(row, efficiency) for row in rows if row.source == source]
    alone = [error(row, fit([other for other in rows if other is not row], FITTED, STEPS_ALONE)) for row in rows]
    return by_source, alone


STEPS_ALONE = 5
"""Steps of a fit without one row, which begins at the fit of all rows."""


def summary(errors: Sequence[float]) -> str:
    """Returns the median, the third quartile and the largest of absolute errors."""
    sizes = sorted(abs(value) for value in errors)
    median, third = statistics.median(sizes), sizes[3 * len(sizes) // 4]
    return f"median {median:.1%}, three quarters within {third:.1%}, worst {sizes[-1]:.1%}"


def show(rows: Sequence[Row], efficiency: Efficiency) -> None:
    """Prints the error of every row, and a summary of each source and of all."""
    errors = {row: error(row, efficiency) for row in rows}
    print(f"{'row':98} published predicted   error   seconds of the parts")
    for row, off in errors.items():
        predicted = row.published * (1 + off)
        print(f"{row.name:98} {row.published:9,.4g} {predicted:9,.4g} {off:+7.0%}   {_parts(row, efficiency)}".rstrip())
    for source in dict.fromkeys(row.source for row in rows):
        print(f"{source}: {summary([errors[row] for row in rows if row.source == source])}")
    for fitted, what in ((True, "in the fit"), (False, "not in the fit")):
        some = {row: off for row, off in errors.items() if row.fitted == fitted}
        worst = max(some, key=lambda row: abs(some[row]))
        print(f"{len(some)} rows {what}: {summary(list(some.values()))} ({worst.name})")


def _parts(row: Row, efficiency: Efficiency) -> str:
    """Formats the predicted seconds of an iteration, and the published ones."""
    if row.kind != "iteration":
        return ""
    inputs = plan_inputs(row, efficiency)
    seconds = iteration(row, inputs, Layout.parse(row.values["train"]).fit(len(inputs.placement_ranks)))
    parts = ("rollout", "inference", "update", "sync", "offload", "all")
    return ", ".join(f"{part} {getattr(seconds, part):.1f}" for part in parts) + f" (published {row.values['seconds']})"


def main() -> None:
    """Prints the errors of all rows, or fits the constants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="fit the constants first")
    parser.add_argument("--leave-out", action="store_true", help="also fit without each source and each row: minutes")
    options = parser.parse_args()
    rows = read_rows()
    fitted = [row for row in rows if row.fitted]
    efficiency = fit(fitted) if options.fit else FITTED
    if options.fit:
        print("\n".join(f"    {name}={value:g}," for name, value in asdict(efficiency).items()))
    show(rows, efficiency)
    if options.leave_out:
        by_source, alone = left_out(fitted)
        for source, errors in by_source.items():
            print(f"{source}, fitted on the others: {summary(errors)}")
        print(f"each row, fitted on the others: {summary(alone)}")


if __name__ == "__main__":
    main()
