"""Directories as Kimi-K2 and Moonlight are published: a name that transformers does not know, code, a vocabulary."""

import base64
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from verl_mg.engines.engine import Request, Sampling
from verl_mg.engines.hf.engine import HFEngine
from verl_mg.errors import UserError
from verl_mg.models.tiny_model import make_tiny_model
from verl_mg.models.transformers_module import read_module_config, read_tokenizer

WORDS = (b"ab", b"abc", b" a", b" the")
SPECIAL = {"[BOS]": 260, "[EOS]": 261, "<|im_end|>": 262, "[PAD]": 270}
CODE = {"AutoConfig": "configuration_deepseek.DeepseekV3Config", "AutoModelForCausalLM": "modeling_deepseek.Model"}


@pytest.fixture(params=["kimi_k2", "deepseek_v3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Weights of a tiny model, with the published names; 271 tokens."""
    options = {"q_rank": 12 if request.param == "kimi_k2" else 0, "dense_layers": 1}
    make_tiny_model(tmp_path, "deepseek_v3", characters="".join(map(chr, range(0x4E00, 0x4E00 + 3))), **options)
    config = json.loads((tmp_path / "config.json").read_text()) | {"model_type": request.param, "auto_map": CODE}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def with_published_tokenizer(folder: Path) -> None:
    for file in ("tokenizer.json", "chat_template.jinja"):
        (folder / file).unlink()
    ranks = [*(bytes([value]) for value in range(256)), *WORDS]
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(ranks))
    (folder / "tiktoken.model").write_text("".join(lines))
    fields = {
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "added_tokens_decoder": {str(token): {"content": text, "special": True} for text, token in SPECIAL.items()},
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "chat_template": "{% for message in messages %}{{ message['content'] }}<|im_end|>{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))


def test_read_module_config_is_that_of_the_architecture(folder: Path) -> None:
    config = read_module_config(folder)
    assert config.model_type == "deepseek_v3" and config.n_group == 1
    assert (config.q_lora_rank is None) == (json.loads((folder / "config.json").read_text())["q_lora_rank"] is None)


def test_hf_engine_of_a_directory_with_code_loads_its_weights(folder: Path) -> None:
    engine = HFEngine(folder, "cpu", torch.float32)
    original = json.loads((folder / "config.json").read_text()) | {"model_type": "deepseek_v3"}
    original.pop("auto_map")
    (folder / "config.json").write_text(json.dumps(original))
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).generate(
        torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False
    )
    (sample,) = engine.generate([Request(0, (5, 6, 7), 0)], Sampling(max_new_tokens=4, temperature=0.0))
    assert list(sample.tokens) == expected[0, 3:].tolist()


def test_read_tokenizer_has_published_tokens_and_warns(folder: Path) -> None:
    pytest.importorskip("tiktoken", reason="the published tokenizer is read with tiktoken, which is not installed")
    with_published_tokenizer(folder)
    with pytest.warns(UserWarning, match=r"tiktoken\.model: read with a general pattern"):
        tokenizer = read_tokenizer(folder)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (261, 270, 271)
    text = "abc the a\u4f60"
    assert tokenizer.encode(text) == [257, 259, 258, *"\u4f60".encode()]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    messages = [{"role": "user", "content": "ab"}]
    assert tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False) == [256, 262]


def test_read_tokenizer_missing_is_user_error(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "qwen3", characters="ab", layers=1)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="no readable tokenizer .* Add tokenizer.json"):
        read_tokenizer(tmp_path)
