"""Images of packed rows for vision-language modules of `transformers`.

The vision tower sees each image of a micro-batch once, however many of its rows have it: the samples of a prompt share
its features. These are merged into the embeddings of all tokens before the tokens are divided among context-parallel
ranks. Ranks of a step may have rows with and without images; each of them runs the vision tower, as its parameters are
gathered by all: a rank without images runs it on a small one, whose features no row takes.

    rows with images  (A) (A B) ()     distinct  A B     tower: A B  ->  numbers 0 0 1: features A A B of all rows
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from verl_mg.batch import Batch
from verl_mg.data.image_processor import ImageProcessor
from verl_mg.device import copy_to
from verl_mg.images import Image, distinct_images
from verl_mg.training.microbatch import TokenOrder, TokenShard

BLANK_SIDE = 32  # side in pixels of the image of a rank that has none


@dataclass(frozen=True)
class PackedImages:
    """Images of the rows of a micro-batch and the tokens around them, before a division among ranks."""

    input_ids: Tensor  # (1, T) int64, all packed tokens
    position_ids: Tensor  # (1, T) int64, or (3, 1, T) where time, height and width have separate positions (mRoPE)
    options: Mapping[str, Tensor]  # further arguments of the module's `forward`
    # Inputs of the vision tower: the distinct images of the rows, or a blank one where they have none.
    inputs: Mapping[str, Tensor]
    entries: Sequence[int]  # entries of each distinct image along the first axis of the first input
    numbers: Sequence[int]  # the images of all rows one after another, as numbers of distinct images
    local: slice  # this rank's tokens


class ImagePacker:
    """Packs the images of micro-batches for one module."""

    def __init__(self, module: Any, processor: ImageProcessor) -> None:
        self._body, self._processor = module.base_model, processor

    @cached_property
    def marks_images(self) -> bool:
        """Whether images are marked in an argument of `forward`: their tokens attend to each other (Gemma 3)."""
        return marks_images(self._body)

    @cached_property
    def _blank(self) -> Image:
        import PIL.Image

        file = io.BytesIO()
        PIL.Image.new("RGB", (BLANK_SIDE, BLANK_SIDE)).save(file, "PNG")
        return Image(file.getvalue())

    def of_images(self, tokens: Tensor) -> Tensor:
        """Returns which tokens have the place of an image's features."""
        return self._processor.image_mask(tokens)

    def pack(self, rows: Batch, order: TokenOrder, shard: TokenShard, device: torch.device) -> PackedImages:
        """Returns the images of a micro-batch with all its tokens, which are divided among ranks after the merge."""
        tokens = torch.zeros(order.total, dtype=torch.int64)
        tokens[order.places] = rows["tokens"]
        images = rows.images or [()] * len(rows)
        marks = self.of_images(tokens)
        distinct = distinct_images(images)
        numbers = {key: number for number, key in enumerate(distinct)}
        of_rows = [[numbers[image.key] for image in row] for row in images]
        shown = tuple(distinct.values()) or (self._blank,)
        inputs = self._processor.model_inputs([shown])
        size = order.total // shard.cp
        return PackedImages(
            copy_to(device, tokens[None]),
            copy_to(device, self._positions(tokens, marks, order, inputs.get("image_grid_thw"), of_rows)),
            {"token_type_ids": copy_to(device, marks.int()[None])} if self.marks_images else {},
            {name: copy_to(device, tensor) for name, tensor in inputs.items()},
            [self._processor.num_entries(image) for image in shown],
            [number for row in of_rows for number in row],
            slice(shard.cp_index * size, (shard.cp_index + 1) * size),
        )

    def _positions(
        self, tokens: Tensor, marks: Tensor, order: TokenOrder, grids: Tensor | None, images: Sequence[Sequence[int]]
    ) -> Tensor:
        """Returns the positions of all tokens, from 0 in each row; `images` are numbers of distinct images."""
        lengths = order.lengths.tolist()
        if not hasattr(self._body, "get_rope_index"):
            return torch.cat([torch.arange(length) for length in lengths])[None]
        known: dict[tuple[bytes, tuple[int, ...]], Tensor] = {}  # samples of a prompt differ after its images
        rows, parts = iter(images), []
        for of_row, of_images in zip(tokens.split(lengths), marks.split(lengths), strict=True):
            numbers = tuple(next(rows, ()))
            if not numbers or grids is None:
                parts.append(torch.arange(len(of_row)).expand(3, 1, -1))
                continue
            end = int(of_images.nonzero()[-1]) + 1
            key = (of_row[:end].numpy().tobytes(), numbers)
            if key not in known:
                given = {"input_ids": of_row[None, :end], "mm_token_type_ids": of_images[None, :end].int()}
                known[key] = self._body.get_rope_index(**given, image_grid_thw=grids[list(numbers)])[0].cpu()
            text = known[key].max() + 1 + torch.arange(len(of_row) - end)
            parts.append(torch.cat([known[key], text.expand(3, 1, -1)], dim=-1))
        return torch.cat(parts, dim=-1)


def marks_images(body: nn.Module) -> bool:
    """Returns whether a module's `forward` has an argument for the tokens of images, which attend to each other."""
    return "token_type_ids" in signature(type(body).forward).parameters


def takes_features(body: nn.Module) -> bool:
    """Returns whether a module's `forward` takes features of images that were computed before, see `embed_and_run`."""
    return "mm_encoder_outputs" in signature(type(body).forward).parameters


def embed_and_run(body: Any, images: PackedImages, **options: Any) -> Tensor:
    """Runs the body of a vision-language module: (1, T / cp, h), the last hidden states of this rank's tokens."""
    features = body.get_image_features(**images.inputs, return_dict=True)
    features.pooler_output = _of_rows(features.pooler_output, images)
    if "deepstack_features" in features:  # added to hidden states of layers (DeepStack, arXiv:2406.04334)
        features.deepstack_features = [_of_rows(level, images) for level in features.deepstack_features]
    options |= {"input_ids": images.input_ids, "position_ids": images.position_ids, **images.options}
    hook = body.language_model.register_forward_pre_hook(_divider(images), with_kwargs=True)
    try:
        hidden: Tensor = body(mm_encoder_outputs={"image": features}, **options).last_hidden_state
    finally:
        hook.remove()
    return hidden


def _of_rows(features: Tensor | Sequence[Tensor], images: PackedImages) -> Tensor | tuple[Tensor]:
    """Returns features of the images of all rows, in the form that the module's `forward` takes."""
    if isinstance(features, Tensor):
        parts = features.split([entries * len(features) // sum(images.entries) for entries in images.entries])
        # The empty part makes a rank without images keep the tower in the graph: its gradients are zeros.
        return torch.cat([features[:0], *(parts[number] for number in images.numbers)])
    return (torch.cat([features[0][:0], *(features[number] for number in images.numbers)]),)


def _divider(images: PackedImages) -> Any:
    """Returns a hook that leaves a language model this rank's part of its inputs."""
    # Here, and not before the body runs: it merges features into the embeddings of all tokens.
    local, total = images.local, images.input_ids.shape[1]

    def divide(_: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        if local == slice(0, total):
            return positional, named
        divided = dict(named)
        divided["inputs_embeds"] = named["inputs_embeds"][:, local]
        divided["position_ids"] = named["position_ids"][..., local]
        of_images = named.get("visual_pos_masks")
        if of_images is not None:
            # Features of the images' tokens on earlier ranks are in front of this rank's.
            before = int(of_images[0, : local.start].sum())
            features = slice(before, before + int(of_images[0, local].sum()))
            divided["visual_pos_masks"] = of_images[:, local]
            divided["deepstack_visual_embeds"] = [part[features] for part in named["deepstack_visual_embeds"]]
        return positional, divided

    return divide
