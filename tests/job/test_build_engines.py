"""Checks of the section `rollout` before anything is built."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from verl_mg.config import Config
from verl_mg.errors import UserError
from verl_mg.job.build_engines import check_engines
from verl_mg.models.hf_config import parse_config
from verl_mg.sharding.weight_table import weight_table

SIZES = {"model_type": "qwen3", "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4}
SIZES |= {"head_dim": 64, "hidden_size": 256, "vocab_size": 100}


def check(folder, ffn=512, **rollout):
    sections = {"model": {"path": folder}, "data": {"train": folder}, "rollout": {"engine": "sglang", **rollout}}
    check_engines(Config.model_validate(sections), weight_table(parse_config(SIZES | {"intermediate_size": ffn})), 2)


@pytest.fixture
def on_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace())


def test_check_engines_whole_blocks_and_engines_that_keep_weights_are_accepted(on_gpus, tmp_path):
    check(tmp_path, layout="tp2", wire="fp8_block", delta=True, sleep=False)
    check(tmp_path, ffn=320, layout="tp2", wire="fp8_channel")
    check(tmp_path, layout="tp2", wire="int4")


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"layout": "tp2", "wire": "fp8_block", "ffn": 320}, r"gate_up_proj.weight: the box .* whole blocks of \(128"),
        ({"engine": "hf", "wire": "fp8_block"}, "rollout.wire=fp8_block: only SGLang has such weights"),
        ({"engine": "hf", "delta": True}, "rollout.delta=true: only SGLang receives changes alone"),
        ({"urls": ["http://a:1"], "wire": "fp8_block"}, "only as shards, and rollout.weight_transfer is process_group"),
        (
            {"urls": ["http://a:1"], "delta": True},
            "receive only shards or files so, and rollout.weight_transfer is process_",
        ),
        ({"layout": "tp2", "wire": "int4", "ffn": 640}, r"down_proj.weight: the box .* whole blocks of \(1, 128\)"),
        (
            {"layout": "tp1", "wire": "int4", "ffn": 544},
            "down_proj.weight: a rank of the engine has 256 x 544 of it",
        ),
        ({"wire": "int4", "delta": True, "sleep": False}, "rollout.wire=int4: .* nor changed in parts"),
        (
            {"wire": "int4", "urls": ["http://a:1"], "weight_transfer": "shards"},
            "rollout.wire=int4: .* outside the job",
        ),
        ({"delta": True}, "rollout.delta=true: engines that sleep lose the weights"),
    ],
)
def test_check_engines_impossible_transfers_are_refused_with_a_remedy(on_gpus, tmp_path, rollout, message):
    with pytest.raises(UserError, match=message):
        check(tmp_path, **rollout)


def test_check_engines_quantized_engine_without_a_gpu_is_refused(tmp_path):
    with pytest.raises(
        UserError, match="rollout.wire=fp8_channel: SGLang computes with quantized weights on GPUs only"
    ):
        check(tmp_path, wire="fp8_channel")
