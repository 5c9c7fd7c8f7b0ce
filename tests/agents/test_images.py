"""Images in the requests of agents: read in each protocol, in front of the policy's tokens, and in the rows."""

import base64
from typing import Any

import anthropic
import openai
import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from tests.agents.agent_runs import LoggedEngine
from tests.helpers.tiny_models import noise_image, vision_model
from tests.helpers.traces import needs_sglang
from verl_mg.agents.agent import Session
from verl_mg.agents.call import Call, RequestError
from verl_mg.agents.engine import AgentEngine
from verl_mg.agents.protocols.chat_completions import ChatCompletions
from verl_mg.agents.protocols.memory import SessionMemory
from verl_mg.agents.protocols.messages import Messages
from verl_mg.agents.protocols.responses import Responses
from verl_mg.agents.renderer import ConversationRenderer
from verl_mg.agents.tool_calls import ReplyParser
from verl_mg.config.roles import RolloutConfig
from verl_mg.data.image_processor import ImageProcessor
from verl_mg.data.images import ImageLimits, ImageSource
from verl_mg.data.prompts import Prompt
from verl_mg.engines.engine import Request, Sampling
from verl_mg.engines.hf.engine import HFEngine
from verl_mg.images import Image
from verl_mg.rows.samples import samples_to_batch

Json = dict[str, Any]
LIMITS = ImageLimits(max_pixels=100 * 100, max_images=8)
FIRST, SECOND, THIRD = noise_image(84, 56, 0), noise_image(28, 60, 1), noise_image(84, 56, 2)
TEXT = {"type": "text", "text": "what is it"}


def url_of(image: Image) -> str:
    return "data:image/png;base64," + base64.b64encode(image.data).decode()


def chat_image(image: Image) -> Json:
    return {"type": "image_url", "image_url": {"url": url_of(image), "detail": "auto"}}


def messages_image(image: Image) -> Json:
    data = url_of(image).partition(",")[2]
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def chat(memory: SessionMemory, *contents: Any, role: str = "user") -> Call:
    messages = [{"role": role, "content": content, "tool_call_id": "c1"} for content in contents]
    return ChatCompletions().read({"model": "policy", "messages": messages}, memory).call


def test_images_of_each_protocol_are_parts_of_the_same_messages():
    memory, part = SessionMemory(LIMITS), {"type": "image", "image": FIRST.key}
    shown = [part, TEXT, {"type": "image", "image": SECOND.key}]
    of_tool = {"role": "tool", "content": [part], "tool_call_id": "c1"}
    call = chat(memory, [chat_image(FIRST), TEXT, chat_image(SECOND)])
    assert call.messages == ({"role": "user", "content": shown},) and call.shown_images == (FIRST, SECOND)
    assert chat(memory, [chat_image(FIRST)], role="tool").messages == (of_tool,)
    blocks = [messages_image(FIRST), TEXT, messages_image(SECOND)]
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [messages_image(FIRST)]}
    body = {"model": "policy", "max_tokens": 9, "messages": [{"role": "user", "content": [*blocks, result]}]}
    call = Messages().read(body, SessionMemory(LIMITS)).call
    assert call.messages == ({"role": "user", "content": shown}, of_tool)
    assert call.shown_images == (FIRST, SECOND, FIRST)
    image = {"type": "input_image", "image_url": url_of(FIRST)}
    question = {"role": "user", "content": [image, TEXT | {"type": "input_text"}]}
    items = [question, {"type": "function_call_output", "call_id": "c1", "output": [image]}]
    call = Responses().read({"model": "policy", "input": items}, SessionMemory(LIMITS)).call
    assert call.messages == ({"role": "user", "content": shown[:2]}, of_tool) and call.shown_images == (FIRST, FIRST)


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("http://x.org/a.png", r"image_url.url: .http://x.org/a.png. is not in the request, and the endpoint"),
        ("/etc/hostname", r"image_url.url: .* fetches no images. Send data:image/png;base64"),
        ("data:image/png;base64,%%%", r"image_url.url: not an image in base64"),
        ("data:image/png,abc", r"image_url.url: not an image in base64"),
        ("data:image/png;base64,YWJj", r"content\[0\]: not a readable image"),
        (url_of(Image(FIRST.data[:-500])), r"content\[0\]: not a readable image \(.*truncated.*\)"),
        (url_of(noise_image(101, 100, 0)), r"content\[0\]: it has 101 x 100 pixels, data.max_image_pixels is 10000"),
    ],
)
def test_image_that_cannot_be_read_is_refused_with_one_line(url, error):
    memory = SessionMemory(LIMITS)
    with pytest.raises(RequestError, match=rf"messages\[0\]\..*{error}") as refused:
        chat(memory, [{"type": "image_url", "image_url": {"url": url}}])
    assert refused.value.status == 400 and "\n" not in refused.value.message and not memory.images


def test_image_for_a_policy_that_reads_text_alone_is_refused():
    with pytest.raises(RequestError, match=r'content\[0\]\.type: "image_url" is not supported'):
        chat(SessionMemory(), [chat_image(FIRST)])


async def converse(session: Session, sample: Any) -> float:
    """Two conversations with the official clients, which get images of the data, of the user and of tools."""
    openai_client = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)
    messages: list[Any] = list(session.messages)
    for content in ([chat_image(SECOND), TEXT], [chat_image(THIRD)]):
        reply = await openai_client.chat.completions.create(model="policy", messages=messages, max_tokens=6)
        messages.append({"role": "assistant", "content": reply.choices[0].message.content})
        messages.append({"role": "tool", "tool_call_id": "c1", "content": content})
    await openai_client.chat.completions.create(model="policy", messages=messages, max_tokens=6)
    for wrong in ([{"type": "image_url", "image_url": {"url": "http://x/y.png"}}], "<|image_pad|><start_of_image>"):
        with pytest.raises(openai.BadRequestError):
            await openai_client.chat.completions.create(model="policy", messages=[{"role": "user", "content": wrong}])
    client = anthropic.AsyncAnthropic(base_url=session.anthropic_base_url, api_key=session.api_key, max_retries=0)
    asked: list[Any] = [{"role": "user", "content": [messages_image(THIRD), TEXT]}]
    answer = await client.messages.create(model="policy", messages=asked, max_tokens=6)
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [messages_image(FIRST)]}
    asked += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    await client.messages.create(model="policy", messages=asked, max_tokens=6)
    return 1.0


@needs_sglang
@pytest.mark.parametrize("family", ["qwen3_vl", pytest.param("gemma3", marks=pytest.mark.nightly)])
def test_conversations_with_images_are_rows_with_the_logprobs_of_transformers(family):
    folder = vision_model(family)
    processor, tokenizer = ImageProcessor.read(folder), AutoTokenizer.from_pretrained(folder)
    assert processor is not None
    stops = [tokenizer.eos_token_id]
    renderer = ConversationRenderer(tokenizer, stops, processor)
    engine = LoggedEngine(HFEngine(folder, "cpu", torch.float32, processor=processor))

    config = RolloutConfig(agent_timeout_s=600.0, agent_failure_reward=-1.0, agent_concurrency=1)
    agents = AgentEngine(engine, converse, config, renderer, ReplyParser(tokenizer, "qwen25"), 512, LIMITS)
    asked = [{"role": "user", "content": [{"type": "image"}, TEXT]}]
    source = ImageSource("data:1", FIRST.size, data=FIRST.data)
    prompt = Prompt(0, (7,), "", None, {}, messages=asked, images=(source,))
    sampling = Sampling(max_new_tokens=200, stop_token_ids=(*stops,), excluded_token_ids=processor.placeholder_ids)
    (sample,) = agents.generate([Request(3, (7,), 0, origin=prompt, images=prompt.load_images())], sampling)
    assert sample.trajectory is not None and sample.trajectory.error == ""
    first, second = sample.trajectory.segments
    assert (first.images, second.images) == ((FIRST, SECOND, THIRD), (THIRD, FIRST))
    oracle = AutoProcessor.from_pretrained(folder)
    text = oracle.apply_chat_template(asked, add_generation_prompt=True)
    begin = oracle(text=[text], images=[[FIRST.pixels()]])["input_ids"][0]
    assert list(first.tokens[: len(begin)]) == list(begin)
    module = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    for segment in (first, second):
        generated = torch.tensor(segment.policy_versions) >= 0
        expected = _logprobs(module, oracle, segment.tokens, segment.images)
        torch.testing.assert_close(torch.tensor(segment.logprobs)[generated], expected[generated], atol=1e-4, rtol=0)
        assert generated.sum() >= 2
        # With other images the same tokens have other log-probs.
        others = _logprobs(module, oracle, segment.tokens, tuple(noise_image(*i.size, 9) for i in segment.images))
        assert (others - expected)[generated].abs().max() > 1e-3
    batch = samples_to_batch([prompt], [sample], 0)
    assert batch.images == [first.images, second.images]
    shown = "".join(str(turn.messages) for turn in sample.trajectory.turns)
    assert FIRST.key in shown and SECOND.key in shown and "base64" not in shown


def _logprobs(module: Any, oracle: Any, tokens: tuple[int, ...], images: tuple[Image, ...]) -> torch.Tensor:
    """Log-probability of each token but the first, which has 0."""
    prompt = "".join(getattr(oracle, "boi_token", None) or oracle.image_token for _ in images)
    inputs = oracle(text=[prompt], images=[[image.pixels() for image in images]], return_tensors="pt")
    ids = torch.tensor([tokens])
    kinds = torch.isin(ids, torch.tensor(oracle.image_token_ids)).int()
    masks = {"mm_token_type_ids": kinds, "token_type_ids": kinds, "attention_mask": torch.ones_like(ids)}
    given = {name: masks.get(name, value) for name, value in inputs.items()} | {"input_ids": ids}
    with torch.no_grad():
        scores = module(**given).logits[0].log_softmax(-1)
    return torch.cat([torch.zeros(1), scores[:-1].gather(1, ids[0, 1:, None])[:, 0]])
