"""Images in the prefill of a vision-language model: its inputs for them, and the positions of all tokens."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor
from transformers import PreTrainedModel

from verl_mg.data.image_processor import ImageProcessor
from verl_mg.images import RowImages


@dataclass(frozen=True)
class PrefillInputs:
    """Inputs of a prefill with images, in addition to tokens and mask."""

    positions: Tensor
    """Positions of the tokens, (r, t), or (3, r, t) where the model has one for each of time, height and width."""
    next_positions: Tensor  # (r,) position of the first new token
    inputs: dict[str, Tensor] = field(default_factory=dict)  # further arguments of the model's `forward`, by name


class VisionPrefill:
    """Makes the inputs of prefills for one model."""

    def __init__(self, module: PreTrainedModel, processor: ImageProcessor) -> None:
        self._processor = processor
        self._arguments = set(inspect.signature(module.forward).parameters)
        self._positions = getattr(module.base_model, "get_rope_index", None)

    def inputs(self, ids: Tensor, attend: Tensor, positions: Tensor, images: Sequence[RowImages]) -> PrefillInputs:
        """Returns the inputs for prompts, at least one of them with images.

        `ids` (r, t) are padded on the left, `attend` (r, t) is false on padding, `positions` (r, t) are in the text.
        """
        kinds = self._processor.image_mask(ids).int()
        of_images = {name: values.to(ids.device) for name, values in self._processor.model_inputs(images).items()}
        # Models name the mask of images differently, and take only some of the processor's tensors.
        given = {"mm_token_type_ids": kinds, "token_type_ids": kinds} | of_images
        inputs = {name: values for name, values in given.items() if name in self._arguments}
        lengths = attend.sum(1)
        if self._positions is None:
            return PrefillInputs(positions, lengths, inputs)
        positions, offsets = self._positions(ids, attention_mask=attend.long(), **inputs)
        # An image can take fewer positions than tokens, so the next position is not the number of tokens.
        return PrefillInputs(positions, lengths + offsets.flatten(), inputs)
