"""Layers of pipeline stages that make the slowest stage as fast as possible."""

from __future__ import annotations

from dataclasses import replace

from verl_mg.layout import Layout
from verl_mg.planner.cost import update_parts
from verl_mg.planner.inputs import PlanInputs

BISECTIONS = 20  # halvings of the interval in which the seconds of the slowest stage are searched
LEAST_GAIN = 0.01  # fraction of the slowest stage's seconds that chosen layers must save


def balanced(inputs: PlanInputs, layout: Layout) -> Layout | None:
    """Returns a layout with layers of its stages by predicted seconds; None where these save next to nothing."""
    # Stages are filled from the last one, which has the output layer, so that the first one, with the activations of
    # the most micro-batches, has what is left.
    if layout.pp == 1 or layout.vpp > 1 or inputs.options.fsdp:
        return None
    # Bisection over the seconds of the slowest stage: whether stages of at most so many seconds exist is found in one
    # pass over the layers.
    layers, head = update_parts(inputs, layout)
    stages = [[layers[layer] for layer in layout.layers(len(layers), stage)] for stage in range(layout.pp)]
    # By identity: two stages may be equal lists, and only the last one has the output layer.
    given = max(sum(stage) + head * (stage is stages[-1]) for stage in stages)
    least, most = max(layers), given
    best: list[int] | None = None
    for _ in range(BISECTIONS):
        middle = (least + most) / 2
        if counts := _filled(layers, head, layout.pp, middle):
            best, most = counts, middle
        else:
            least = middle
    if best is None or most > (1 - LEAST_GAIN) * given:
        return None
    return replace(layout, pipeline_layers=tuple(best))


def _filled(layers: list[float], head: float, stages: int, limit: float) -> list[int] | None:
    """Returns numbers of layers of stages of at most `limit` seconds, each at least 1; None where there are none."""
    counts, left = [], list(layers)
    for stage in reversed(range(stages)):  # `len(left) > stage` leaves a layer for each earlier stage
        seconds, count = head if stage == stages - 1 else 0.0, 0
        while len(left) > stage and seconds + left[-1] <= limit:
            seconds, count = seconds + left.pop(), count + 1
        if not count:
            return None
        counts.append(count)
    return None if left else counts[::-1]
