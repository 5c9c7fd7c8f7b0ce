"""Weights of a model as boxes of Hugging Face tensors, the form in which checkpoints store them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from verl_mg.checkpoint.sharded_safetensors import StoredBox
from verl_mg.sharding.boxes import Box, Shard, box_shape, full_box, intersect, slices, translate_box
from verl_mg.training.runner import Runner

WEIGHTS = "weights"  # namespace of the weights in a checkpoint


def weights(runner: Runner) -> Iterator[StoredBox]:
    """Yields all trained weights of this rank, as views of the memory that the model computes with."""
    shards = runner.trained_shards()
    for name, parameter in runner.trained().items():
        yield from stored_boxes(WEIGHTS, shards[name], parameter.detach(), full_box(tuple(parameter.shape)))


def restore_weights(runner: Runner, fill: Callable[[StoredBox], None]) -> None:
    """Restores all trained weights of this rank by `fill`, for a model without an optimizer."""
    for part in weights(runner):
        fill(part)
    runner.unrestored -= runner.trained().keys()


def stored_boxes(namespace: str, shard: Shard, values: Tensor, at: Box) -> Iterator[StoredBox]:
    """Yields the values in a box `at` of a shard as boxes of the checkpoint's tensors."""
    origin = full_box(box_shape(at))
    for piece in shard.pieces:
        common = intersect(at, piece.target)
        if common is not None:
            # A stack of experts has a dimension more than the matrices of the checkpoint that it is made of.
            stacked = len(piece.target) - len(piece.source)
            box = translate_box(common[stacked:], piece.target[stacked:], piece.source)
            yield StoredBox(
                namespace, piece.tensor, box, values[slices(translate_box(common, at, origin))].view(box_shape(box))
            )
