"""SGLang's own vision towers with images from requests, against the hf engine, which equals `transformers`."""

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from tests.tiny_models import noise_image, vision_model
from tests.traces import needs_sglang
from verl_mg.data.image_processor import ImageProcessor
from verl_mg.images import RowImages
from verl_mg.layout import EngineLayout
from verl_mg.rollout.engine import Request, Sampling
from verl_mg.rollout.hf.engine import HFEngine
from verl_mg.rollout.process_engine import EngineSettings
from verl_mg.rollout.sglang import SGLangEngine

pytestmark = needs_sglang
# The first weight sync of a job brings the weights; here SGLang reads them from the directory.
SETTINGS = EngineSettings(
    layout=EngineLayout(),
    dtype=torch.float32,
    max_running=16,
    max_positions=256,
    extra={"load_format": "auto", "weight_version": "0"},
)
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


@pytest.mark.parametrize("family", ["qwen3_vl", pytest.param("qwen2_5_vl", marks=pytest.mark.nightly)])
def test_engine_given_images_writes_the_tokens_of_the_hf_engine(tmp_path: Path, family: str) -> None:
    folder = vision_model(family)
    processor = ImageProcessor.read(folder)
    assert processor is not None
    requests, sampling = requests_with_images(processor), dataclasses.replace(GREEDY, max_new_tokens=1)
    excluding = dataclasses.replace(GREEDY, excluded_token_ids=processor.placeholder_ids)
    expected = HFEngine(folder, "cpu", torch.float32, processor=processor)
    engine = SGLangEngine(folder, SETTINGS, tmp_path / "0.log")
    try:
        for one, other in zip(engine.generate(requests, sampling), expected.generate(requests, sampling), strict=True):
            assert one.tokens == other.tokens and one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        whole = expected.generate(requests, excluding)
        assert [sample.tokens for sample in engine.generate(requests, excluding)] == [s.tokens for s in whole]
        parts = [
            dataclasses.replace(s, tokens=s.tokens[:3], logprobs=s.logprobs[:3], policy_versions=(0,) * 3)
            for s in whole
        ]
        again = [dataclasses.replace(r, partial=part) for r, part in zip(requests, parts, strict=True)]
        assert [sample.tokens for sample in engine.generate(again, excluding)] == [s.tokens for s in whole]
        assert len({sample.tokens for sample in whole}) == len(requests)
    finally:
        engine.close()
