"""Tools that return images: these become part of the sample, and of the context of its next turn."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoProcessor, AutoTokenizer

from tests.agents.tools.scripted import Scripted, qwen
from tests.helpers.tiny_models import noise_image
from tests.helpers.traces import needs_sglang
from verl_mg.agents.tools.chat_format import ToolCallFormat
from verl_mg.agents.tools.multi_turn import MultiTurnEngine
from verl_mg.agents.tools.tool import Tool
from verl_mg.data.image_processor import ImageProcessor
from verl_mg.data.prompts import Prompt
from verl_mg.engines import Request, Sample, Sampling
from verl_mg.engines.hf.engine import HFEngine
from verl_mg.images import Image
from verl_mg.models.tiny_vision_model import make_tiny_vision_model
from verl_mg.rows.samples import samples_to_batch

pytestmark = needs_sglang
FIRST, SECOND = noise_image(84, 56, 0), noise_image(28, 60, 1)
EOS = 1
SAMPLING = Sampling(max_new_tokens=400, stop_token_ids=(EOS,))


def look(n: int) -> Any:
    """Show an image.

    Args:
        n: which one.
    """
    return [FIRST.pixels(), "behind it"] if n == 1 else SECOND


def broken() -> Any:
    """Show a file that is no image."""
    return Image(b"text")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_vision_model(tmp_path_factory.mktemp("model"), "qwen3_vl")


class Written(Scripted):
    """Writes the turns of a list in tokens of a model."""

    def __init__(self, model: Path, *turns: str) -> None:
        super().__init__(lambda request: "")
        tokenizer = AutoTokenizer.from_pretrained(model)
        self.turns = [(*tokenizer(turn, add_special_tokens=False)["input_ids"], EOS) for turn in turns]

    def _write(self, request: Request, sampling: Sampling) -> Sample:
        tokens = self.turns[len(self.requested) - 1]
        return Sample(request.id, tokens, (-1.0,) * len(tokens), (0,) * len(tokens), "stop")


def conversation(engine: Written, model: Path, processor: ImageProcessor | None, request: Request) -> Sample:
    tokenizer, tools = AutoTokenizer.from_pretrained(model), [Tool.from_function(f) for f in (look, broken)]
    dialogue = ToolCallFormat(tokenizer, tools, "qwen25", None, processor)
    turns = MultiTurnEngine(engine, dialogue, tools, max_turns=3, tool_timeout=30)
    (sample,) = turns.generate([request], SAMPLING)
    turns.close()
    return sample


def test_images_of_tools_are_in_the_next_context_and_the_row(model):
    processor = ImageProcessor.read(model)
    engine = Written(model, f"{qwen('look', n=1)}\n{qwen('look', n=2)}", "ok")
    prompt_image = noise_image(56, 56, 2)
    oracle = AutoProcessor.from_pretrained(model)
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]
    pixels = [image.pixels() for image in (prompt_image, FIRST, SECOND)]

    def tokens_of(messages: list[dict[str, Any]], count: int) -> tuple[int, ...]:
        text = oracle.apply_chat_template(messages, add_generation_prompt=True)
        return tuple(oracle(text=[text], images=[pixels[:count]])["input_ids"][0])

    prompt = tokens_of(messages, 1)
    sample = conversation(engine, model, processor, Request(3, prompt, 0, images=(prompt_image,)))
    calls = f"{qwen('look', n=1)}\n{qwen('look', n=2)}"
    shown = [[{"type": "image"}, {"type": "text", "text": "behind it"}], [{"type": "image"}]]
    messages += [{"role": "assistant", "content": calls}, *({"role": "tool", "content": parts} for parts in shown)]
    assert (*prompt, *sample.tokens) == (*tokens_of(messages, 3), *engine.turns[1])
    assert [image.pixels().tobytes() for image in sample.images] == [image.tobytes() for image in pixels[1:]]
    assert engine.requested[1].context_images == (prompt_image, *sample.images)
    mask = processor.image_mask(torch.tensor(sample.tokens))
    assert mask.sum() == 6 + 2 and not (mask & torch.tensor(sample.generated_mask)).any()
    # The model takes the context of the last turn with its images, and the row of the sample has them all.
    hf = HFEngine(model, "cpu", torch.float32, processor=processor)
    assert len(hf.generate([engine.requested[1]], SAMPLING)[0].tokens) > len(engine.requested[1].partial.tokens)
    batch = samples_to_batch([Prompt(0, prompt, "", None, {})], [sample], 0)
    assert batch.images == [sample.images]


def test_images_for_a_policy_that_reads_text_alone_are_mentioned(model):
    engine = Written(model, qwen("look", n=1), "ok")
    sample = conversation(engine, model, None, Request(3, (7, 8), 0))
    text = AutoTokenizer.from_pretrained(model).decode(sample.tokens)
    assert "behind it\n(an image)" in text and not sample.images


def test_image_of_a_tool_that_cannot_be_decoded_is_an_error_for_the_policy(model):
    engine = Written(model, qwen("broken"), "ok")
    sample = conversation(engine, model, ImageProcessor.read(model), Request(3, (7, 8), 0))
    text = AutoTokenizer.from_pretrained(model).decode(sample.tokens)
    assert "error: broken raised UnidentifiedImageError" in text and not sample.images
