"""Images of packed rows for vision-language modules of `transformers`.

Features of images are merged into the embeddings of all tokens before these are divided among context-parallel ranks.
Ranks of a step may have rows with and without images; each of them runs the vision tower, as its parameters are
gathered by all: a rank without images runs it on a small one, whose features count zero times.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from verl_mg.batch import Batch
from verl_mg.data.image_processor import ImageProcessor
from verl_mg.device import copy_to
from verl_mg.images import Image
from verl_mg.training.token_order import TokenOrder, TokenShard

BLANK_SIDE = 32
"""Side in pixels of the image of a rank that has none."""


@dataclass(frozen=True)
class PackedImages:
    """Images of the rows of a micro-batch and the tokens around them, before a division among ranks."""

    input_ids: Tensor
    """(1, T) int64, all packed tokens."""
    position_ids: Tensor
    """(1, T) int64, or (3, 1, T) where time, height and width have positions of their own (mRoPE)."""
    inputs: Mapping[str, Tensor]
    """Further arguments of the module's `forward`."""
    blank: Mapping[str, Tensor]
    """Inputs of the vision tower alone where the rows have no images; empty where they have."""
    local: slice
    """This rank's tokens."""


class ImagePacker:
    """Packs the images of micro-batches for one module."""

    def __init__(self, module: Any, processor: ImageProcessor) -> None:
        """Stores what decides about the inputs.

        Args:
            module: the vision-language module.
            processor: the processor of its directory.
        """
        self._body, self._processor = module.base_model, processor

    @cached_property
    def marks_images(self) -> bool:
        """Whether images are marked in an argument of `forward`: their tokens attend to each other (Gemma 3)."""
        return marks_images(self._body)

    @cached_property
    def _blank(self) -> dict[str, Tensor]:
        import PIL.Image

        file = io.BytesIO()
        PIL.Image.new("RGB", (BLANK_SIDE, BLANK_SIDE)).save(file, "PNG")
        return self._processor.model_inputs([(Image(file.getvalue()),)])

    def pack(self, rows: Batch, order: TokenOrder, shard: TokenShard, device: torch.device) -> PackedImages:
        """Returns the images of a micro-batch.

        Args:
            rows: the rows.
            order: order of their tokens.
            shard: this rank's part of the tokens.
            device: device of the module.
        """
        tokens = torch.zeros(order.total, dtype=torch.int64)
        tokens[order.places] = rows["tokens"]
        images = rows.images or [()] * len(rows)
        marks = self._processor.image_mask(tokens)
        inputs = dict(self._processor.model_inputs(images))
        positions = self._positions(tokens, marks, order, inputs.get("image_grid_thw"), [len(i) for i in images])
        blank = {} if inputs else self._blank
        if self.marks_images:
            inputs["token_type_ids"] = marks.int()[None]
        size = order.total // shard.cp
        return PackedImages(
            copy_to(device, tokens[None]),
            copy_to(device, positions),
            {name: copy_to(device, tensor) for name, tensor in inputs.items()},
            {name: copy_to(device, tensor) for name, tensor in blank.items()},
            slice(shard.cp_index * size, (shard.cp_index + 1) * size),
        )

    def _positions(
        self, tokens: Tensor, marks: Tensor, order: TokenOrder, grids: Tensor | None, counts: list[int]
    ) -> Tensor:
        """Returns the positions of all tokens, which begin with 0 in each row.

        Args:
            tokens: (T,) int64, all tokens.
            marks: (T,) bool, those of images.
            order: order of the tokens.
            grids: (images, 3) int64, patches of each image along time, height and width.
            counts: images of each row.
        """
        lengths = order.lengths.tolist()
        if not hasattr(self._body, "get_rope_index"):
            return torch.cat([torch.arange(length) for length in lengths])[None]
        images = iter([] if grids is None else grids.split(counts))
        parts = []
        for of_row, of_images in zip(tokens.split(lengths), marks.split(lengths), strict=True):
            if not of_images.any():
                next(images, None)
                parts.append(torch.arange(len(of_row)).expand(3, 1, -1))
                continue
            row = {"input_ids": of_row[None], "mm_token_type_ids": of_images.int()[None]}
            parts.append(self._body.get_rope_index(**row, image_grid_thw=next(images))[0].cpu())
        return torch.cat(parts, dim=-1)


def marks_images(body: nn.Module) -> bool:
    """Returns whether a module's `forward` has an argument for the tokens of images, which attend to each other."""
    return "token_type_ids" in signature(type(body).forward).parameters


def embed_and_run(body: Any, images: PackedImages, **options: Any) -> Tensor:
    """Runs the body of a vision-language module.

    Args:
        body: the module without its output layer.
        images: tokens and images.
        options: further arguments of its `forward`.

    Returns:
        (1, T / cp, h), the last hidden states of this rank's tokens.
    """
    nothing = 0 * _sum(body.get_image_features(**images.blank, return_dict=True)) if images.blank else None
    options |= {"input_ids": images.input_ids, "position_ids": images.position_ids, **images.inputs}
    hook = body.language_model.register_forward_pre_hook(_divider(images, nothing), with_kwargs=True)
    try:
        hidden: Tensor = body(**options).last_hidden_state
    finally:
        hook.remove()
    return hidden


def _divider(images: PackedImages, nothing: Tensor | None) -> Any:
    """Returns a hook that leaves a language model this rank's part of its inputs.

    Args:
        images: tokens and images.
        nothing: 0, by way of a vision tower without images; its gathers are where those of other ranks are.
    """
    local, total = images.local, images.input_ids.shape[1]

    def divide(_: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        divided = dict(named)
        if nothing is not None:
            divided["inputs_embeds"] = named["inputs_embeds"] + nothing.to(named["inputs_embeds"].dtype)
        if local == slice(0, total):
            return positional, divided
        divided["inputs_embeds"] = divided["inputs_embeds"][:, local]
        divided["position_ids"] = named["position_ids"][..., local]
        of_images = named.get("visual_pos_masks")
        if of_images is not None:  # features that are added to hidden states (DeepStack, arXiv:2406.04334)
            before = int(of_images[0, : local.start].sum())
            features = slice(before, before + int(of_images[0, local].sum()))
            divided["visual_pos_masks"] = of_images[:, local]
            divided["deepstack_visual_embeds"] = [part[features] for part in named["deepstack_visual_embeds"]]
        return positional, divided

    return divide


def _sum(outputs: Any) -> Tensor:
    """Returns the sum of all numbers in the outputs of a vision tower, nested in any way."""
    if isinstance(outputs, Tensor):
        return outputs.float().sum()
    values = outputs.values() if isinstance(outputs, Mapping) else outputs
    return torch.stack([_sum(value) for value in values if value is not None]).sum()
