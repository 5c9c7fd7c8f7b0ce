"""What of a trained network outlives a process: weights and the optimizer's moments, as boxes of the model's tensors.

Megatron's distributed optimizer deals the flat memory of all parameters to the data-parallel ranks; a rank's share of a
parameter is a run of its elements, and a run is a few boxes. So each rank writes what it holds, nothing is gathered,
and under any other layout each rank reads what it needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from verl_mg.checkpoint.sharded_safetensors import StoredBox
from verl_mg.megatron.cpu_offload_adam import CpuOffloadAdamW
from verl_mg.megatron.model_runner import ModelRunner
from verl_mg.megatron.storages import inner_optimizers
from verl_mg.sharding.boxes import (
    Box,
    Piece,
    Shard,
    box_shape,
    contiguous_boxes,
    full_box,
    intersect,
    numel,
    slices,
    translate_box,
)

WEIGHTS = "weights"
MOMENTS = ("exp_avg", "exp_avg_sq")
OUTPUT = "output_layer.weight"


def weights(runner: ModelRunner) -> Iterator[StoredBox]:
    """All trained weights on this rank, in the memory that the model computes with."""
    for name, parameter in _trained(runner).items():
        yield from _parts(WEIGHTS, _shards(runner)[name], parameter.detach(), full_box(tuple(parameter.shape)))


def optimizer_state(runner: ModelRunner, optimizer: Any, to_write: bool = False) -> Iterator[StoredBox]:
    """This rank's share of weights, in the optimizer's precision, and of moments, once there are any.

    to_write: of what ranks have alike only what this one writes, so that all together write each box once.
    """
    shards = _shards(runner)
    for name, parameter in _trained(runner).items():
        shard = _written(runner, name, parameter, shards[name]) if to_write else shards[name]
        for namespace, values, start in _share(optimizer, parameter):
            for box in contiguous_boxes(tuple(parameter.shape), start, start + len(values)):
                run, values = values[: numel(box)], values[numel(box) :]
                yield from _parts(namespace, shard, run.view(box_shape(box)), box)


def make_moments(optimizer: Any, steps: float) -> None:
    """Have moments, all zero, as they are there after the first step; `steps`: how many were taken."""
    for inner in inner_optimizers(optimizer):
        place = torch.device("cpu") if isinstance(inner, CpuOffloadAdamW) else None
        counts_by_weight = isinstance(inner, torch.optim.Adam)  # others count in their groups
        for group in inner.param_groups:
            if not counts_by_weight:
                group["step"] = int(steps)
            for weight in group["params"]:
                zeros = {name: torch.zeros_like(weight, device=place) for name in MOMENTS}
                inner.state[weight] = zeros | ({"step": torch.tensor(steps)} if counts_by_weight else {})


def steps_taken(optimizer: Any) -> float | None:
    """How many steps the moments are made of; None before the first."""
    for inner in inner_optimizers(optimizer):
        for group in inner.param_groups:
            for weight in group["params"]:
                if weight in inner.state:
                    return float(inner.state[weight].get("step", group.get("step", 0)))
    return None


def _trained(runner: ModelRunner) -> Mapping[str, Tensor]:
    if runner.lora:
        return runner.lora.parameters
    return {name: weight for name, weight in runner.parameters().items() if weight.requires_grad}


def _shards(runner: ModelRunner) -> Mapping[str, Shard]:
    return runner.lora.shards if runner.lora else runner.shard_map().shards(torch.distributed.get_rank())


def _written(runner: ModelRunner, name: str, parameter: Tensor, shard: Shard) -> Shard:
    """The pieces that are this rank's to write, or those of ranks that share its optimizer.

    A piece that is a whole tensor stands on all tensor-parallel ranks, a tied output layer on another stage too.
    """
    at = runner.groups.coordinates
    first = (at.tp if getattr(parameter, "allreduce", True) else at.etp) == 0
    copy = runner.table.tied and name.endswith(OUTPUT)
    shapes = runner.lora.shapes if runner.lora else {t: s.shape for t, s in runner.table.huggingface().items()}

    def ours(piece: Piece) -> bool:
        return not copy and (first or piece.source != full_box(shapes[piece.tensor]))

    return Shard(shard.shape, tuple(piece for piece in shard.pieces if ours(piece)))


def _share(optimizer: Any, parameter: Tensor) -> Iterator[tuple[str, Tensor, int]]:
    """(plane, flat values, where in the flattened parameter they begin) of what this rank's optimizer has of it."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if parameter in part.model_param_gbuf_map:
            start = part._get_model_param_range_map(parameter)["param"].start
            group, position = part.model_param_group_index_map[parameter]
            main = part.optimizer.param_groups[group]["params"][position]
            yield WEIGHTS, main.detach(), start
            state = part.optimizer.state.get(main, {})
            yield from ((name, state[name], start) for name in MOMENTS if name in state)


def _parts(namespace: str, shard: Shard, values: Tensor, at: Box) -> Iterator[StoredBox]:
    """What `values`, which stand at the box `at` of a shard, hold of its pieces."""
    origin = full_box(box_shape(at))
    for piece in shard.pieces:
        common = intersect(at, piece.target)
        if common is not None:
            stacked = len(piece.target) - len(piece.source)
            box = translate_box(common[stacked:], piece.target[stacked:], piece.source)
            yield StoredBox(
                namespace, piece.tensor, box, values[slices(translate_box(common, at, origin))].view(box_shape(box))
            )
