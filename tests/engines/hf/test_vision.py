"""HFEngine with images compared with `generate` of `transformers`."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from tests.helpers.tiny_models import noise_image, vision_model
from verl_mg.data.image_processor import ImageProcessor
from verl_mg.engines.engine import Request, Sampling
from verl_mg.engines.hf.engine import HFEngine
from verl_mg.images import RowImages

PICTURES = [noise_image(56 + 28 * i, 28 * (1 + i % 3), i) for i in range(4)]
PROMPTS: list[tuple[str, RowImages]] = [
    ("a", (PICTURES[0],)),
    ("a", (PICTURES[1],)),
    ("bcd", (PICTURES[2], PICTURES[3], PICTURES[0])),
    ("bcd", ()),
]
TOKENS = 12


def tokens_of(processor: ImageProcessor, text: str, images: RowImages) -> tuple[Any, tuple[int, ...]]:
    """What the processor of `transformers` makes of a prompt, and its token ids."""
    parts = [{"type": "image"}] * len(images) + [{"type": "text", "text": text}]
    oracle = AutoProcessor.from_pretrained(processor.folder)
    rendered = oracle.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
    pixels = [[image.pixels() for image in images]] if images else None
    inputs = oracle(text=[rendered], images=pixels, return_tensors="pt")
    return inputs, tuple(inputs["input_ids"][0].tolist())


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "gemma3"])
def test_greedy_tokens_with_images_equal_generate_whatever_the_batch(family):
    folder = vision_model(family)
    processor = ImageProcessor.read(folder)
    assert processor is not None
    engine = HFEngine(folder, "cpu", torch.float32, processor=processor)
    module = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    excluded = processor.placeholder_ids
    sampling = Sampling(max_new_tokens=TOKENS, temperature=0, excluded_token_ids=excluded)
    requests, expected, logprobs = [], [], []
    for number, (text, images) in enumerate([*PROMPTS, PROMPTS[1]]):
        inputs, tokens = tokens_of(processor, text, images)
        requests.append(Request(number, tokens, number, images=images))
        options = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": None, "suppress_tokens": [*excluded]}
        output = module.generate(**inputs, **options, return_dict_in_generate=True, output_logits=True)
        expected.append(output.sequences[0, len(tokens) :].tolist())
        full = torch.stack(output.logits)[:, 0].log_softmax(-1)
        logprobs.append(full[torch.arange(TOKENS), torch.tensor(expected[-1])].tolist())
    samples = engine.generate(requests, sampling)
    assert [list(sample.tokens) for sample in samples] == expected
    for sample, values in zip(samples, logprobs, strict=True):
        assert sample.logprobs == pytest.approx(values, abs=1e-4)
    assert len({round(values[0], 5) for values in logprobs}) == len(PROMPTS)  # the images show
    # Continued behind its first tokens, after all others have left the batch.
    for request, sample in zip(requests, samples, strict=True):
        part = replace(sample, tokens=sample.tokens[:5], logprobs=sample.logprobs[:5], policy_versions=(0,) * 5)
        (again,) = engine.generate([replace(request, partial=part)], sampling)
        assert again.tokens == sample.tokens
        assert again.logprobs == pytest.approx(sample.logprobs, abs=1e-5)
