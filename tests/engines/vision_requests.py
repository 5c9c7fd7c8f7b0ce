"""Requests with none to three images, and the comparison of engines with the hf engine, which equals `transformers`."""

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from tests.helpers.tiny_models import noise_image
from verl_mg.data.image_processor import ImageProcessor
from verl_mg.engines.engine import Request, RolloutEngine, Sampling
from verl_mg.engines.hf.engine import HFEngine
from verl_mg.images import RowImages

GREEDY = Sampling(max_new_tokens=8, temperature=0)


def requests_with_images(processor: ImageProcessor) -> list[Request]:
    first, second, third = noise_image(84, 56, 0), noise_image(56, 90, 1), noise_image(28, 28, 2)
    tokenizer, requests = AutoTokenizer.from_pretrained(processor.folder), []
    cases: list[RowImages] = [(first,), (second,), (second, third, first), ()]
    for number, images in enumerate(cases):
        parts = [{"type": "image"}] * len(images) + [{"type": "text", "text": "abc"}]
        text = processor.render([{"role": "user", "content": parts}])
        text = processor.expand(text, [image.pixels().size for image in images])
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        requests.append(Request(number, tuple(tokens), number, images=images))
    return requests


def check_images(engine: RolloutEngine, folder: Path, version: int) -> list[tuple[int, ...]]:
    """Checks greedy tokens, log-probs and continuations of an engine with a model's weights; returns the tokens."""
    processor = ImageProcessor.read(folder)
    assert processor is not None
    requests, sampling = requests_with_images(processor), dataclasses.replace(GREEDY, max_new_tokens=1)
    # SGLang's servers cannot continue a text that ends with the beginning of an image.
    begin = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("<|vision_start|>")
    excluding = dataclasses.replace(GREEDY, excluded_token_ids=(*processor.placeholder_ids, begin))
    expected = HFEngine(folder, "cpu", torch.float32, processor=processor)
    for one, other in zip(engine.generate(requests, sampling), expected.generate(requests, sampling), strict=True):
        assert one.tokens == other.tokens and one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert one.policy_versions == (version,)
    whole = expected.generate(requests, excluding)
    assert [sample.tokens for sample in engine.generate(requests, excluding)] == [s.tokens for s in whole]
    parts = [
        dataclasses.replace(s, tokens=s.tokens[:3], logprobs=s.logprobs[:3], policy_versions=(version,) * 3)
        for s in whole
    ]
    again = [dataclasses.replace(r, partial=part) for r, part in zip(requests, parts, strict=True)]
    assert [sample.tokens for sample in engine.generate(again, excluding)] == [s.tokens for s in whole]
    assert len({sample.tokens for sample in whole}) == len(requests)
    return [sample.tokens for sample in whole]
