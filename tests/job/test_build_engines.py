"""Checks of the section `rollout` before anything is built."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from verl_mg.config import Config
from verl_mg.errors import UserError
from verl_mg.job import build_engines
from verl_mg.job.build_engines import check_engines
from verl_mg.models.hf_config import parse_config
from verl_mg.sharding.weight_table import weight_table

SIZES = {"model_type": "qwen3", "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4}
SIZES |= {"head_dim": 64, "hidden_size": 256, "vocab_size": 100}


def check(folder, ffn=512, lora=None, sizes=(), dtype="bfloat16", **rollout):
    sections = {
        "model": {"path": folder, "dtype": dtype},
        "data": {"train": folder},
        "actor": {"lora": lora},
        "rollout": {"engine": "sglang", **rollout},
    }
    table = weight_table(parse_config(SIZES | {"intermediate_size": ffn} | dict(sizes)))
    check_engines(Config.model_validate(sections), table, 2)


EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MIXED = EXPERTS | {"num_hidden_layers": 2, "mlp_only_layers": [0], "decoder_sparse_step": 1}
LATENT = {"model_type": "deepseek_v3", "q_lora_rank": None, "kv_lora_rank": 32, "qk_rope_head_dim": 16}
LATENT |= {"qk_nope_head_dim": 32, "v_head_dim": 32, "first_k_dense_replace": 1, "n_routed_experts": 4}
LATENT |= {"n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_group": 1, "topk_group": 1}
"""Sizes of models with experts, with experts in one of two layers, and with latent attention."""


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
        ({"engine": "hf", "delta": True}, "rollout.delta=true: only SGLang can receive changes instead of all weights"),
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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"wire": "fp8_block"}, r"rollout\.wire=fp8_block: .* inputs of 16 bits, and the actor is in float32"),
        ({"sglang": {"attention_backend": "fa3"}}, r"rollout\.sglang\.attention_backend=fa3: .* for float32"),
        (
            {"sglang": {"decode_attention_backend": "flashinfer"}},
            r"rollout\.sglang\.decode_attention_backend=flashinfer: .* for float32",
        ),
        ({"sizes": EXPERTS}, r"rollout\.engine=sglang: .* float32, .* a model with experts"),
        ({"sizes": LATENT}, r"rollout\.engine=sglang: .* float32, .* a model with latent attention"),
        ({"sizes": {"head_dim": 256}}, r"rollout\.engine=sglang: .* float32, .* a model with heads of 256"),
    ],
)
def test_check_engines_float32_without_kernels_on_gpus_is_refused(on_gpus, tmp_path, settings, message):
    with pytest.raises(UserError, match=f"^{message}"):
        check(tmp_path, dtype="float32", **settings)


def test_check_engines_float32_with_kernels_on_gpus_is_accepted(on_gpus, tmp_path):
    check(tmp_path, dtype="float32")
    check(tmp_path, dtype="float32", sglang={"attention_backend": "torch_native"})
    check(tmp_path, sglang={"attention_backend": "fa3"})
    check(tmp_path, dtype="float32", engine="hf", sizes=EXPERTS)
    check(tmp_path, dtype="float32", engine="vllm", sizes={"head_dim": 256})


def test_check_engines_quantized_engine_without_a_gpu_is_refused(tmp_path):
    with pytest.raises(
        UserError, match="rollout.wire=fp8_channel: SGLang computes with quantized weights on GPUs only"
    ):
        check(tmp_path, wire="fp8_channel")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "the actor has none. Set actor.lora"),
        ({"lora": {}, "engine": "hf"}, "the engine hf has merged weights. Write rollout.engine=sglang"),
        ({"lora": {}, "urls": ["http://a:1"]}, "servers outside the job receive merged weights. Leave it out"),
        ({"lora": {}, "delta": True, "sleep": False}, "rollout.delta is for weights that are sent again"),
        ({"lora": {}, "mode": "async", "num_ranks": 1}, "requests in flight keep the adapters"),
        ({"lora": {}}, "engines that sleep lose the weights under the adapters"),
        ({"lora": {"experts": True}, "sleep": False, "sizes": EXPERTS}, "engines receive no adapters of experts"),
        ({"lora": {}, "sleep": False, "sizes": MIXED}, "take adapters of down_proj, gate_proj, up_proj for"),
        ({"lora": {}, "sleep": False, "sizes": LATENT}, "engines compute latent attention with weights"),
        ({"lora": {}, "sleep": False, "layout": "tp2-ep2-adp2", "sizes": EXPERTS}, "pins adapters with .* remove adp"),
    ],
)
def test_check_engines_adapters_that_engines_cannot_use_are_refused(on_gpus, tmp_path, settings, message):
    with pytest.raises(UserError, match=rf"^rollout\.adapters=true: .*{message}"):
        check(tmp_path, adapters=True, **settings)


def test_check_engines_adapters_of_a_rank_that_vllm_has_no_memory_for_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"^actor\.lora\.rank=600: vLLM's adapters have ranks of 512 at most"):
        check(tmp_path, adapters=True, engine="vllm", lora={"rank": 600})


def test_check_engines_adapters_of_engines_that_keep_weights_are_accepted(on_gpus, tmp_path):
    check(tmp_path, adapters=True, lora={"targets": ["q_proj"]}, num_ranks=1, mode="one_step_off")


def test_check_engines_adapters_with_experts_of_vllm_on_the_cpu_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"^rollout\.adapters=true: vLLM then computes experts with kernels for GPUs"):
        check(tmp_path, adapters=True, engine="vllm", lora={}, sizes=EXPERTS)


def test_check_engines_adapters_of_engines_over_nodes_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(build_engines.device, "ranks_of_a_node", lambda ranks: 1)
    with pytest.raises(UserError, match=r"^rollout\.adapters=true: adapters are in the memory of one node"):
        check(tmp_path, adapters=True, lora={}, layout="tp2")
