"""Names of models in a configuration become folders, in every section that has one."""

import base64
import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from verl_mg.config import Config
from verl_mg.engines.engine import Request, Sampling
from verl_mg.engines.hf.engine import HFEngine
from verl_mg.errors import UserError
from verl_mg.models import named_models
from verl_mg.models.flops import active_elements, layer_elements, orthogonalization_flops, row_flops
from verl_mg.models.hf_config import read_config
from verl_mg.models.hf_tensors import model_spec
from verl_mg.models.named_models import CONFIG_FILES, local_model, with_local_models
from verl_mg.models.tensor_index import index_of
from verl_mg.models.tiny_model import make_tiny_model
from verl_mg.models.transformers_module import read_module_config, read_tokenizer
from verl_mg.sharding.weight_table import weight_table


def test_with_local_models_names_become_folders(monkeypatch):
    requested = []

    def fetch(name: object, kind: str, patterns: object, key: str) -> Path:
        requested.append((str(getattr(name, "repository", "")), kind, patterns, key))
        return Path("/cache") / key

    monkeypatch.setattr(named_models, "fetch", fetch)
    sections = {"critic": {"path": "hf:a/critic"}, "reference": {"path": "/a/path"}}
    sections["teachers"] = {"math": {"path": "a/math"}, "code": {"path": "/a/code"}}
    config = Config.model_validate({"model": {"path": "a/model"}, "data": {"train": "x"}, **sections})
    local = with_local_models(config, CONFIG_FILES)
    assert [str(section.path) for section in (local.model, local.critic, local.reference)] == [
        "/cache/model.path",
        "/cache/critic.path",
        "/a/path",
    ]
    assert [str(teacher.path) for teacher in local.teachers.values()] == ["/cache/teachers.math.path", "/a/code"]
    assert (local.reward_model.path, str(config.model.path)) == (None, "a/model")
    assert requested[0] == ("a/model", "model", CONFIG_FILES, "model.path")


def test_local_model_with_a_part_raises():
    with pytest.raises(UserError, match=r"model.path: a/b:main: a model has no part ':main'. Write OWNER/NAME"):
        local_model(Path("a/b:main"), "model.path")


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("llama", {}),
        ("qwen3", {"head_dim": 24}),
        ("qwen2", {"tie_embeddings": True}),
        ("deepseek_v3", {"dense_layers": 2}),
    ],
)
def test_row_flops_equal_the_count_of_torch(tmp_path, architecture, options):
    """Without a causal mask, so twice the pairs; DeepSeek's layers are dense here, since loops over experts vary."""
    config = read_config(make_tiny_model(tmp_path, architecture, **options))
    predicted, length = row_flops(config, index_of(model_spec(config))), 48
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(tmp_path), dtype=torch.float32, attn_implementation="eager"
    )
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, length, dtype=torch.int64))
    expected = predicted(length) + predicted.per_pair * length**2
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.01)


def test_row_flops_mixture_counts_top_k_experts(tmp_path):
    make_tiny_model(tmp_path, "qwen3_moe", experts=8)
    c = read_config(tmp_path)
    flops = row_flops(c, index_of(model_spec(c)))
    attention = 2 * c.hidden * c.head_dim * (c.heads + c.kv_heads)
    a_layer = attention + c.experts.top_k * 3 * c.hidden * c.experts.ffn + c.experts.count * c.hidden
    by_hand = 2 * (c.layers * a_layer + c.vocab * c.hidden)
    assert flops.per_token == pytest.approx(by_hand, rel=0.01)  # norms are counted as matrices
    assert flops.per_pair == 2 * c.layers * c.heads * c.head_dim


def test_row_flops_value_head_has_no_vocabulary(tmp_path):
    config = read_config(make_tiny_model(tmp_path, "llama"))
    tables = (weight_table(config, head) for head in ("language", "value"))
    language, value = (row_flops(config, table.tensor_index) for table in tables)
    assert language.per_token - value.per_token == 2 * (config.vocab - 1) * config.hidden


@pytest.mark.parametrize(
    "name", ["qwen3_30b_a3b", "qwen3_235b_a22b", "deepseek_v3", "deepseek_v3_2", "glm_5", "qwen3_32b", "llama_3_1_405b"]
)
def test_layer_elements_add_up_to_the_active_elements(name):
    """Against the tensors of the checkpoint; norms and biases, which are no matrices, are below a thousandth."""
    config = read_config(Path(__file__).parents[2] / "tools" / "model_configs" / f"{name}.json")
    layers = sum(layer_elements(config, config.has_experts(layer)).all for layer in range(config.layers))
    expected = active_elements(config, index_of(model_spec(config)))
    assert layers + config.vocab * config.hidden == pytest.approx(expected, rel=1e-3)


def test_orthogonalization_flops_equal_the_count_of_torch(tmp_path):
    """Five iterations on every matrix of the layers, as Muon computes them."""
    config = read_config(make_tiny_model(tmp_path, "llama"))
    index = index_of(model_spec(config))
    matrices = [e.tensor.shape for e in index.entries.values() if e.layer is not None and len(e.tensor.shape) == 2]
    with FlopCounterMode(display=False) as counter, torch.device("meta"):
        for shape in matrices:
            x = torch.empty(min(shape), max(shape))
            for _ in range(5):
                gram = x @ x.T
                x = (gram + gram @ gram) @ x
    assert orthogonalization_flops(index) == counter.get_total_flops()


WORDS = (b"ab", b"abc", b" a", b" the")
SPECIAL = {"[BOS]": 260, "[EOS]": 261, "<|im_end|>": 262, "[PAD]": 270}
CODE = {"AutoConfig": "configuration_deepseek.DeepseekV3Config", "AutoModelForCausalLM": "modeling_deepseek.Model"}


@pytest.fixture(params=["kimi_k2", "deepseek_v3"])
def folder(request, tmp_path) -> Path:
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


def test_read_module_config_is_that_of_the_architecture(folder):
    config = read_module_config(folder)
    assert config.model_type == "deepseek_v3" and config.n_group == 1
    assert (config.q_lora_rank is None) == (json.loads((folder / "config.json").read_text())["q_lora_rank"] is None)


def test_hf_engine_of_a_directory_with_code_loads_its_weights(folder):
    engine = HFEngine(folder, "cpu", torch.float32)
    original = json.loads((folder / "config.json").read_text()) | {"model_type": "deepseek_v3"}
    original.pop("auto_map")
    (folder / "config.json").write_text(json.dumps(original))
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).generate(
        torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False
    )
    (sample,) = engine.generate([Request(0, (5, 6, 7), 0)], Sampling(max_new_tokens=4, temperature=0.0))
    assert list(sample.tokens) == expected[0, 3:].tolist()


def test_read_tokenizer_has_published_tokens_and_warns(folder):
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


def test_read_tokenizer_missing_is_user_error(tmp_path):
    make_tiny_model(tmp_path, "qwen3", characters="ab", layers=1)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="no readable tokenizer .* Add tokenizer.json"):
        read_tokenizer(tmp_path)
