"""LLM as a judge on a real tiny model's engine and on a server over HTTP."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoTokenizer, MambaForCausalLM

from tests.helpers.json_server import JsonRequest, JsonResponse, serving
from verl_mg.engines.engine import Request, Sampling
from verl_mg.engines.hf.engine import HFEngine
from verl_mg.engines.llm_judge import LLMJudge
from verl_mg.errors import UserError
from verl_mg.models.tiny_model import make_tiny_model
from verl_mg.rewards import AsyncScorer, LoadedReward, Reward, Sample, load_reward

SAMPLE = Sample("What is 1+1?", "It is {answer}, [[10]].", "2", {}, "stop")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("judge"), "qwen2", init_std=0.3, max_positions=512, seed=1)


def judge_at(url: str, **options: Any) -> list[Reward]:
    reward = load_reward("verl_mg.engines.llm_judge:LLMJudge", {"url": url} | options)
    with AsyncScorer({"": reward}) as scorer:
        return scorer.score([SAMPLE] * 3)


def test_question_placeholders_in_the_response_are_not_replaced(model):
    judge = LLMJudge("Q: {prompt} R: {response} A: {answer} {other}", url="http://nowhere")
    assert judge.question(SAMPLE) == "Q: What is 1+1? R: It is {answer}, [[10]]. A: 2 {other}"
    judge = LLMJudge("R: {response}", url="http://nowhere", model=model)
    assert judge.question(SAMPLE) == "<user>R: It is {answer}, [[10]].<assistant>"


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("Good. [[7]]", Reward(0.7, {"judged": 1.0, "verdict": 7.0})),
        ("From [[1]] to [[10]] I say [[2.5]]", Reward(0.25, {"judged": 1.0, "verdict": 2.5})),
        ("[7]", Reward(0.0, {"judged": 0.0})),
        ("", Reward(0.0, {"judged": 0.0})),
    ],
)
def test_verdict_reads_the_last_match(answer, reward):
    assert LLMJudge(url="http://nowhere").verdict(answer) == reward


def test_verdict_not_a_number_is_not_counted():
    judge = LLMJudge(pattern="Verdict: (A|B)?", url="http://nowhere")
    assert [judge.verdict(text).parts for text in ("Verdict: A", "Verdict: ")] == [{"judged": 0.0}] * 2


@pytest.mark.parametrize("chat", [True, False])
def test_score_many_with_engine_equals_direct_generation(tmp_path, chat):
    model = make_tiny_model(tmp_path, "qwen2", init_std=0.3, max_positions=512, seed=1)
    if not chat:
        (model / "chat_template.jinja").unlink()
    read: list[str] = []

    class Reading(LLMJudge):
        def verdict(self, answer: str) -> Reward:
            read.append(answer)
            return Reward(float(len(answer)))

    judge = Reading("Rate {response}", model=model, max_new_tokens=8, batch_size=2, device="cpu", dtype="float32")
    assert (judge.batch_size, judge.parallel) == (2, 1)
    samples = [Sample("p", response, None, {}, "stop") for response in ("a", "bb", "ccc", "dddd", "a")]
    with AsyncScorer({"": LoadedReward("judge", judge.score_many, batched=True, owner=judge)}) as scorer:
        values = [reward.value for reward in scorer.score(samples)]

    tokenizer, engine, expected = AutoTokenizer.from_pretrained(model), HFEngine(model, "cpu", torch.float32), []
    for sample in samples:
        ids = tuple(tokenizer(judge.question(sample), add_special_tokens=not chat)["input_ids"])
        assert tokenizer.decode(ids) == ("<user>Rate {}<assistant>" if chat else "Rate {}").format(sample.response)
        sampling = Sampling(max_new_tokens=8, temperature=0, stop_token_ids=(1,))
        (written,) = engine.generate([Request(0, ids, 0)], sampling)
        expected.append(tokenizer.decode(written.tokens, skip_special_tokens=True))
    assert sorted(read) == sorted(expected)
    assert values == [len(text) for text in expected]
    assert any(expected)


def test_score_many_too_long_question_gets_no_verdict(model):
    options = {"model": str(model), "max_new_tokens": 8, "device": "cpu", "dtype": "float32", "pattern": "(?s)()."}
    reward = load_reward("verl_mg.engines.llm_judge:LLMJudge", options | {"template": "{response}"})
    with AsyncScorer({"": reward}) as scorer:
        rewards = scorer.score([Sample("p", "a" * length, None, {}, "stop") for length in (600, 100, 503)])
    assert [reward.parts["judged"] for reward in rewards] == [0.0] * 3


def test_score_many_family_without_a_bound_of_positions_answers(tmp_path):
    make_tiny_model(tmp_path, "qwen2", seed=1)
    vocab = len(AutoTokenizer.from_pretrained(tmp_path))  # other tokens have no text
    config = CONFIG_MAPPING["mamba"](vocab_size=vocab, hidden_size=16, state_size=4, num_hidden_layers=1)
    torch.manual_seed(0)
    MambaForCausalLM(config).save_pretrained(tmp_path)
    judge = LLMJudge("{response}", "(?s)()", model=tmp_path, max_new_tokens=2, device="cpu", dtype="float32")
    texts = judge._generate(["a" * 3000])
    assert len(texts) == 1 and texts[0]


def test_score_many_with_server_posts_questions():
    seen: list[JsonRequest] = []

    def answer(requested: JsonRequest) -> JsonResponse:
        seen.append(requested)
        return JsonResponse({"text": "I say [[8]]", "meta_info": {}})

    with serving(answer) as url:
        rewards = judge_at(f"{url}/", template="Rate {response}", max_new_tokens=9)
    assert rewards == [Reward(0.8, {"judged": 1.0, "verdict": 8.0})] * 3
    assert {requested.path for requested in seen} == {"/generate"}
    assert seen[0].body == {
        "text": "Rate It is {answer}, [[10]].",
        "sampling_params": {"max_new_tokens": 9, "temperature": 0.0},
    }


def test_score_many_response_without_text_raises():
    with serving(lambda _: JsonResponse({"choices": []})) as url, pytest.raises(UserError, match="has no text"):
        judge_at(url)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "neither url nor model"),
        ({"url": "http://a", "template": "Rate it"}, "{response} is missing"),
        ({"url": "http://a", "pattern": "("}, "is not a regular expression"),
        ({"url": "http://a", "pattern": "a"}, "has no group"),
        ({"url": "http://a", "scale": 0}, "Give positive numbers"),
        ({"model": "/nowhere"}, "/nowhere: the tokenizer cannot be read"),
        ({"url": "http://a", "dtype": "half"}, "dtype: 'half'"),
    ],
)
def test_llm_judge_invalid_options_raise(options, reason):
    with pytest.raises(UserError, match=reason):
        load_reward("verl_mg.engines.llm_judge:LLMJudge", options)
