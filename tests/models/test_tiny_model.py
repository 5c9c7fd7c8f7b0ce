"""Tiny models load as any other, with a tokenizer that loses nothing."""

import filecmp
import importlib.util
import json
import string
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_mg.errors import UserError
from verl_mg.models.hf_config import read_config
from verl_mg.models.tiny_model import ARCHITECTURES, character_tokenizer, make_tiny_model
from verl_mg.sharding.weight_table import weight_table

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
TEXT = string.printable + "  a .b , 'c' n't \n\n  x"


@pytest.mark.parametrize("text", [TEXT, "", " ", "\n\r\n"])
def test_character_tokenizer_round_trip_has_one_token_per_character(text):
    tokenizer = character_tokenizer(string.printable)
    tokens = tokenizer.encode(text)
    assert len(tokens) == len(text)
    assert tokenizer.decode(tokens) == text
    assert len(tokenizer) == 6 + len(string.printable)


def test_character_tokenizer_beyond_ascii_restores_text():
    tokenizer = character_tokenizer("aé€😀üa")
    text = "é€😀aüaé"
    assert len(tokenizer.encode(text)) == len(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("b") == [tokenizer.unk_token_id]


def test_character_tokenizer_words_are_single_tokens(tmp_path):
    words = ("<tool_call>", '{"name": "')
    make_tiny_model(tmp_path, "qwen2", characters="ab<", words=words, chat_template="{{ 'ab' }}", layers=1)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = 'a<tool_call>{"name": "b<'
    assert tokenizer.encode(text) == [6, 9, 10, 7, 8]
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.vocab_size == len(tokenizer) == 11
    assert tokenizer.apply_chat_template([{"role": "tool", "content": ""}], tokenize=False) == "ab"


def test_character_tokenizer_special_tokens_have_fixed_ids():
    tokenizer = character_tokenizer("ab")
    assert [tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id] == [0, 1, 2]
    assert tokenizer.decode(tokenizer.encode("<user>a<eos>b"), skip_special_tokens=True) == "ab"
    messages = [{"role": role, "content": "a"} for role in ("system", "user", "assistant", "user")]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<system>a<user>a<assistant>a<eos><user>a<assistant>"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_make_tiny_model_loads_and_computes(tmp_path, architecture):
    make_tiny_model(tmp_path, architecture, layers=4, perturb=True)  # linear attention in three of four
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode(TEXT) == character_tokenizer(string.printable).encode(TEXT)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert [tokenizer.pad_token_id, tokenizer.eos_token_id] == [0, 1]
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.model_type == architecture
    assert model.generation_config.eos_token_id == 1
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    logits = model(torch.tensor([tokenizer.encode("1+1=")])).logits
    assert logits.shape == (1, 4, len(tokenizer)) and logits.isfinite().all()


ATTENTION, MLP = "model.layers.1.self_attn.", "model.layers.1.mlp."
EXPERTS = MLP + "experts."


@pytest.mark.parametrize(
    ("architecture", "options", "shapes"),
    [
        ("llama", {}, {ATTENTION + "q_proj.weight": (64, 64), ATTENTION + "q_proj.bias": None}),
        ("qwen2", {"kv_heads": 1}, {ATTENTION + "k_proj.weight": (16, 64), ATTENTION + "v_proj.bias": (16,)}),
        ("qwen3", {"head_dim": 24}, {ATTENTION + "q_proj.weight": (96, 64), ATTENTION + "k_norm.weight": (24,)}),
        ("qwen3_moe", {"experts": 3}, {EXPERTS + "2.gate_proj.weight": (64, 64), EXPERTS + "3.gate_proj.weight": None}),
        ("mixtral", {}, {"model.layers.1.block_sparse_moe.experts.3.w1.weight": (128, 64)}),
        (
            "deepseek_v2",
            {"shared_experts": 3},
            {
                EXPERTS + "3.down_proj.weight": (64, 64),
                MLP + "shared_experts.up_proj.weight": (192, 64),
                ATTENTION + "q_proj.weight": (96, 64),
                ATTENTION + "kv_a_proj_with_mqa.weight": (40, 64),
            },
        ),
        (
            "deepseek_v3",
            {"dense_layers": 1, "q_rank": 24},
            {
                EXPERTS + "0.up_proj.weight": (64, 64),
                "model.layers.0.mlp.up_proj.weight": (128, 64),
                ATTENTION + "q_a_proj.weight": (24, 64),
                MLP + "gate.e_score_correction_bias": (4,),
            },
        ),
        ("gemma2", {}, {"model.layers.1.post_feedforward_layernorm.weight": (64,)}),
    ],
)
def test_make_tiny_model_has_published_tensor_names(tmp_path, architecture, options, shapes):
    make_tiny_model(tmp_path, architecture, characters="abc", **options)
    found = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    assert {name: found.get(name) for name in shapes} == shapes
    expected = weight_table(read_config(tmp_path)).huggingface()
    assert found == {name: shard.shape for name, shard in expected.items()}


def test_make_tiny_model_options_reach_the_config(tmp_path):
    make_tiny_model(tmp_path, "llama", layers=1, tie_embeddings=True, rope_scaling=LLAMA3, init_std=0.5)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rope_parameters"] == LLAMA3 | {"rope_theta": 10000.0}
    tensors = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in tensors
    assert tensors["model.layers.0.mlp.up_proj.weight"].std().item() == pytest.approx(0.5, rel=0.05)


def test_make_tiny_model_perturb_changes_norms_and_biases(tmp_path):
    make_tiny_model(tmp_path / "still", "qwen2", layers=1)
    make_tiny_model(tmp_path / "moved", "qwen2", layers=1, perturb=True)
    still, moved = (load_file(tmp_path / name / "model.safetensors") for name in ("still", "moved"))
    for name, tensor in still.items():
        assert torch.equal(tensor, moved[name]) is (tensor.dim() > 1), name


def test_make_tiny_model_seed_fixes_bytes_and_keeps_global_generator(tmp_path):
    state = torch.get_rng_state()
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_tiny_model(tmp_path / name, "qwen3", layers=1, perturb=True, seed=seed)
    assert torch.equal(torch.get_rng_state(), state)
    files = [tmp_path / name / "model.safetensors" for name in "abc"]
    assert filecmp.cmp(files[0], files[1], shallow=False)
    assert not filecmp.cmp(files[0], files[2], shallow=False)


@pytest.mark.parametrize(
    ("architecture", "options", "reason"),
    [
        ("lama", {}, "unknown architecture 'lama'. Choose from llama, qwen2, qwen3"),
        ("llama", {"kv_heads": 3}, "heads=4 must be a multiple of kv_heads=3"),
        ("llama", {"hidden": 66}, "hidden=66"),
    ],
)
def test_make_tiny_model_invalid_arguments_write_nothing(tmp_path, architecture, options, reason):
    with pytest.raises(UserError, match=reason):
        make_tiny_model(tmp_path / "model", architecture, **options)
    assert not (tmp_path / "model").exists()


def test_make_tiny_model_command_exit_codes(tmp_path, capsys):
    path = Path(__file__).parents[2] / "tools" / "make_tiny_model.py"
    spec = importlib.util.spec_from_file_location("make_tiny_model_command", path)
    assert spec is not None and spec.loader is not None
    command = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(command)
    folder = tmp_path / "model"
    arguments = ["--architecture", "qwen3", "--out", str(folder), "--hidden", "32", "--kv-heads", "4"]
    assert command.main(arguments) == 0
    assert json.loads((folder / "config.json").read_text())["hidden_size"] == 32
    assert command.main(["--architecture", "none", "--out", str(folder)]) == 2
    assert "unknown architecture 'none'" in capsys.readouterr().err
