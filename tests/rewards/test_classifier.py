"""Classifier compared with direct calls of a tiny model, one text at a time and without padding."""

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, processors
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, PreTrainedConfig, Qwen2Config

from verl_mg.errors import UserError
from verl_mg.models.tiny_model import character_tokenizer
from verl_mg.rewards import AsyncScorer, Sample, load_reward
from verl_mg.rewards.classifier import Classifier

CHARACTERS = "abcdefghijklmnopqrstuvwxyz .?"
SIZE: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZE |= {"max_position_embeddings": 128, "initializer_range": 0.3, "vocab_size": 6 + len(CHARACTERS)}
QWEN = SIZE | {"num_key_value_heads": 2}
CONFIGS: dict[str, PreTrainedConfig] = {
    "qwen2": Qwen2Config(pad_token_id=0, num_labels=1, **QWEN),
    "bert": BertConfig(pad_token_id=0, num_labels=1, **SIZE),
    "qwen2-unpadded": Qwen2Config(num_labels=1, **QWEN),
    "two-labels": Qwen2Config(pad_token_id=0, id2label={0: "bad", 1: "good"}, **QWEN),
}


def saved(config: PreTrainedConfig, folder: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).save_pretrained(folder)
    character_tokenizer(CHARACTERS).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    return {name: saved(config, tmp_path_factory.mktemp(name)) for name, config in CONFIGS.items()}


def samples(count: int = 20, longest: int = 70) -> list[Sample]:
    source = random.Random(1)
    texts = ["".join(source.choices(CHARACTERS, k=source.randrange(1, longest))) for _ in range(count)]
    return [Sample("what? ", text, None, {"prompt": "what? "}, "stop") for text in texts]


def direct(folder: Path, text: str, special: bool = True) -> torch.Tensor:
    """Logits of a text as the model gives them by itself."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    ids = AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=special, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return model(input_ids=ids).logits[0]


@pytest.mark.parametrize("name", ["qwen2", "bert", "qwen2-unpadded"])
def test_score_many_returns_the_logits_of_the_model(models, name):
    classifier = Classifier(models[name], batch_size=4, device="cpu")
    rewards = classifier.score_many(samples(8))
    for sample, reward in zip(samples(8), rewards, strict=True):
        assert reward.value == pytest.approx(direct(models[name], sample.prompt + sample.response).item(), abs=2e-5)
    assert len({round(reward.value, 4) for reward in rewards}) == 8


@pytest.mark.parametrize("name", ["qwen2", "bert"])
def test_score_many_in_other_batches_is_bitwise_identical(models, name):
    classifier = Classifier(models[name], batch_size=4, device="cpu")
    alone = [classifier.score_many([sample])[0] for sample in samples()]
    order = list(range(20))
    random.Random(2).shuffle(order)
    together = classifier.score_many([samples()[number] for number in order])
    assert together == [alone[number] for number in order]


def test_classifier_in_async_scorer_equals_direct_calls(models):
    options = {"path": str(models["qwen2"]), "batch_size": 3, "device": "cpu"}
    reward = load_reward("verl_mg.rewards.classifier:Classifier", options)
    with AsyncScorer({"": reward}) as scorer:
        assert scorer.score(samples()) == [reward(sample) for sample in samples()]


def test_classifier_with_several_labels_returns_the_probability_of_the_label(models):
    folder, sample = models["two-labels"], samples(1)[0]
    expected = direct(folder, sample.prompt + sample.response).softmax(-1)
    for label in ("good", 1):
        reward = Classifier(folder, label=label, device="cpu").score_many([sample])[0]
        assert reward.value == pytest.approx(expected[1].item(), abs=1e-6)
    for wrong in (None, "fine", 2):
        with pytest.raises(UserError, match=r"label: .* is not a label of .* Write one of: bad, good"):
            Classifier(folder, label=wrong)


def test_classifier_conversation_uses_the_chat_template(models):
    messages = [{"role": "user", "content": "why?"}]
    sample = Sample("<user>why?<assistant>", "because.", None, {"prompt": messages}, "stop")
    expected = direct(models["qwen2"], "<user>why?<assistant>because.<eos>", special=False)
    reward = Classifier(models["qwen2"], device="cpu").score_many([sample])[0]
    assert reward.value == pytest.approx(expected.item(), abs=2e-5)


@pytest.mark.parametrize("single", ["<pad> $A", "$A <eos>", "<pad> $A <eos>"])
def test_classifier_text_has_special_tokens_of_the_tokenizer_once(models, tmp_path, single):
    folder = shutil.copytree(models["qwen2"], tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    special = [(name, tokenizer.token_to_id(name)) for name in ("<pad>", "<eos>")]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    tokenizer.save(str(folder / "tokenizer.json"))
    classifier = Classifier(folder, device="cpu")
    front, _, end = single.replace(" ", "").partition("$A")
    wanted = direct(models["qwen2"], f"{front}why? so.{end}", special=False).item()
    for prompt in ("why? ", f"{front}why? "):  # a prompt that the policy's template has begun
        reward = classifier.score_many([Sample(prompt, "so.", None, {}, "stop")])[0]
        assert reward.value == pytest.approx(wanted, abs=2e-5)


def test_classifier_long_text_is_cut_at_its_beginning(models):
    sample = Sample("a" * 60, "the end.", None, {}, "stop")
    reward = Classifier(models["qwen2"], max_tokens=20, device="cpu").score_many([sample])[0]
    assert reward.value == pytest.approx(direct(models["qwen2"], "a" * 12 + "the end.").item(), abs=2e-5)


def test_classifier_empty_text_is_scored(models):
    Classifier(models["qwen2"], device="cpu").score_many([Sample("", "", None, {}, "stop")])


def test_classifier_invalid_directory_or_dtype_raises(models, tmp_path):
    with pytest.raises(UserError, match="config.json is missing"):
        Classifier(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(UserError, match="the classification model cannot be read"):
        Classifier(tmp_path)
    with pytest.raises(UserError, match="dtype: 'half'"):
        Classifier(models["qwen2"], dtype="half")


def test_classifier_language_model_raises(tmp_path):
    from verl_mg.models.tiny_model import make_tiny_model

    with pytest.raises(UserError, match="tensor score.weight is missing"):
        Classifier(make_tiny_model(tmp_path, "qwen2"))
