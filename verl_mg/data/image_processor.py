"""The processor of a vision-language model: tokens of prompts with images, and the model's inputs for images.

What training needs for a micro-batch, whatever the model:

    processor = ImageProcessor.read(model_dir)      None for a model without images
    batch.images                                    images of each row, in the order of their placeholders in its tokens
    processor.model_inputs(batch.images)            {"pixel_values": (patches, d), "image_grid_thw": (images, 3)}: the
                                                    images of all rows, one after another; {} where there are none
    processor.image_mask(tokens)                    true on the placeholders, which features of images replace

A row's tokens already have one placeholder for each feature. Policies cannot write placeholders: engines exclude
`placeholder_ids`, so that all of them in a row belong to its images.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_mg.errors import UserError
from verl_mg.images import Image, RowImages
from verl_mg.lazy_import import lazy_import
from verl_mg.models.hf_config import read_json
from verl_mg.models.transformers_module import read_module_config

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import ProcessorMixin
else:
    torch = lazy_import("torch")

# Bytes of inputs that a processor keeps: samples of a prompt, and the passes over a batch, have the same images.
CACHED_BYTES = 1 << 30


class ImageProcessor:
    """Processor of a model directory, as transformers reads it."""

    def __init__(self, processor: ProcessorMixin, where: Path) -> None:
        self._processor: Any = processor
        self.folder = where
        defaults = processor.valid_processor_kwargs._defaults
        self._options = dict(defaults.get("images_kwargs", {})) | {"return_tensors": "pt"}
        self._cached: OrderedDict[str, dict[str, Tensor]] = OrderedDict()
        self._cached_bytes = 0
        self._replacement = cache(self._replacement_of_size)

    @classmethod
    def read(cls, model_dir: str | Path) -> ImageProcessor | None:
        """Returns the processor of a Hugging Face directory; None where its config.json describes no vision tower."""
        folder = Path(model_dir)
        try:
            config = read_json(folder / "config.json")
        except (OSError, ValueError):
            return None  # whoever reads the model reports it
        if not isinstance(config, dict) or config.get("vision_config") is None:
            return None
        from transformers import AutoProcessor

        try:
            processor = AutoProcessor.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # transformers raises many kinds for a broken folder
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(
                f"{folder}: no readable processor of images ({reason}). Add the model's preprocessor_config.json, and "
                "install torchvision where it is required."
            ) from error
        if not hasattr(processor, "image_processor"):
            raise UserError(f"{folder}: no processor of images. Add preprocessor_config.json and chat_template.jinja.")
        described = read_module_config(folder).to_dict()
        given = described.get("image_token_id", described.get("image_token_index"))
        if given is not None and given not in processor.image_token_ids:
            raise UserError(
                f"{folder / 'config.json'}: features of images replace the token {given}, but the processor writes "
                f"{', '.join(map(str, processor.image_token_ids))} for them. Use the processor of this model."
            )
        return cls(processor, folder)

    @property
    def templated(self) -> Any:
        """The part that has a chat template."""
        return self._processor

    # -- tokens

    @cached_property
    def placeholder_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that features of images, videos and sounds replace."""
        processor = self._processor
        ids = {*processor.image_token_ids, *processor.video_token_ids, *processor.audio_token_ids} - {None}
        return tuple(sorted(ids))

    def image_mask(self, tokens: Tensor) -> Tensor:
        """Returns bool of the tokens' shape: the tokens that features of images replace."""
        return torch.isin(tokens, torch.tensor(self._processor.image_token_ids, device=tokens.device))

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[dict[str, Any]] = (), **options: Any
    ) -> str:
        """Returns the text of a conversation, with one placeholder for each image."""
        described = {"tools": list(tools)} if tools else {}
        options = {"tokenize": False, "add_generation_prompt": True} | options
        return str(self._processor.apply_chat_template(list(messages), **described, **options))

    def expand(self, text: str, sizes: Sequence[tuple[int, int]]) -> str:
        """Returns a text in which each placeholder is as many placeholders as its image has features."""
        replacements = [self._replacement(size) for size in sizes]
        return str(self._processor.get_text_with_replacements([text], replacements)[0][0])

    def unexpanded(self, tokens: Sequence[int], images: RowImages) -> list[int]:
        """Returns tokens with one placeholder for each image, for engines that expand them again."""
        left, result = list(tokens), list[int]()
        for number, image in enumerate(images, start=1):
            whole = self._token_ids(self._replacement(image.size))
            starts = (i for i, token in enumerate(left) if token == whole[0] and left[i : i + len(whole)] == whole)
            start = next(starts, None)
            if start is None:
                raise ValueError(f"the {len(whole)} placeholders of image {number} are not among the tokens")
            result += [*left[:start], *self._token_ids(self._processor.image_token)]
            left = left[start + len(whole) :]
        return result + left

    def _token_ids(self, text: str) -> list[int]:
        ids: list[int] = self._processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def num_placeholders(self, text: str) -> int:
        """Returns how many placeholders of images, videos and sounds a text has that was not expanded."""
        processor = self._processor
        words = {processor.image_token, *processor.tokenizer.convert_ids_to_tokens(list(self.placeholder_ids))}
        return sum(text.count(word) for word in words)

    def _replacement_of_size(self, size: tuple[int, int]) -> str:
        # The text in place of an image depends only on its size, so that prompts are tokenized from headers.
        import PIL.Image

        inputs = self._processor.image_processor([PIL.Image.new("RGB", size)], **self._options)
        return str(self._processor.replace_image_token(inputs, 0, **self._options))

    # -- inputs of the model

    def model_inputs(self, rows: Iterable[RowImages]) -> dict[str, Tensor]:
        """Returns the model's inputs for the images of all rows, one after another, by name; {} without images."""
        images = [self._inputs(image) for row in rows for image in row]
        return {name: torch.cat([image[name] for image in images]) for name in (images[0] if images else ())}

    def num_entries(self, image: Image) -> int:
        """Returns how many entries an image has in the model's first input: patches, or tiles."""
        return len(next(iter(self._inputs(image).values())))

    def _inputs(self, image: Image) -> dict[str, Tensor]:
        if image.key in self._cached:
            self._cached.move_to_end(image.key)
            return self._cached[image.key]
        # Made here, where a row is computed: pixels are 20 to 100 times larger than the file that rows carry.
        outputs = self._processor.image_processor([image.pixels()], **self._options)
        unused = self._processor.unused_input_names
        inputs = {name: tensor for name, tensor in outputs.items() if name not in unused and torch.is_tensor(tensor)}
        self._cached[image.key] = inputs
        self._cached_bytes += _num_bytes(inputs)
        while self._cached_bytes > CACHED_BYTES and len(self._cached) > 1:
            self._cached_bytes -= _num_bytes(self._cached.popitem(last=False)[1])
        return inputs


def _num_bytes(inputs: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in inputs.values())
