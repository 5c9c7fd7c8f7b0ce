"""Weights on their way into one real SGLang engine: pipeline stages, and what SGLang derives from weights."""

import dataclasses
import json
from contextlib import closing
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from tests.checkpoint.fp8_directories import quantize_directory
from tests.engines.sglang import probes
from tests.helpers.engines import bring_weights
from tests.helpers.traces import needs_sglang
from verl_mg.engines.engine import Request, Sampling
from verl_mg.engines.engine_options import EngineOptions
from verl_mg.engines.kinds import SGLANG
from verl_mg.engines.process_engine import ProcessEngine
from verl_mg.layout import EngineLayout
from verl_mg.models.tiny_model import make_tiny_model

pytestmark = needs_sglang
SETTINGS = EngineOptions(layout=EngineLayout(), dtype=torch.float32, max_running=16, max_positions=128)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1,
        "mscale": 0.7, "mscale_all_dim": 0.7}  # fmt: skip


def made(folder: Path, architecture: str, **fields: object) -> Path:
    sizes = {"hidden": 64, "ffn": 128, "max_positions": 128, "init_std": 0.2, "seed": 3}
    return make_tiny_model(folder, architecture, characters="abcdefgh", **sizes, **fields)


def greedy(model: torch.nn.Module, request: Request) -> tuple[int, ...]:
    """Tokens of a response of `transformers`."""
    sampling = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return tuple(model.generate(torch.tensor([request.prompt]), **sampling)[0, len(request.prompt) :].tolist())


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_weight_update_with_pipeline_stages_reaches_each(tmp_path, tied):
    model = made(tmp_path / "model", "qwen3", tie_embeddings=tied)
    settings = dataclasses.replace(SETTINGS, layout=EngineLayout(pp=2))
    with closing(ProcessEngine(SGLANG, model, settings, tmp_path / "0.log")) as engine:
        bring_weights(engine, model, version=1)
        bring_weights(engine, model, version=2)
        requested = [Request(i, (6 + i, 7, 9, 11), i) for i in range(5)]
        samples = engine.generate(requested, Sampling(max_new_tokens=12, temperature=0.0))
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for request, sample in zip(requested, samples, strict=True):
        assert sample.tokens == greedy(whole, request) and set(sample.policy_versions) == {2}


@pytest.mark.nightly
def test_engine_of_an_fp8_checkpoint_computes_in_the_dtype_of_training(tmp_path):
    model = made(tmp_path / "model", "qwen3")
    quantize_directory(model, (16, 16))
    request = Request(0, (6, 7, 9, 11), 0)
    with closing(ProcessEngine(SGLANG, model, SETTINGS, tmp_path / "0.log")) as engine:
        bring_weights(engine, model, version=1)
        (sample,) = engine.generate([request], Sampling(max_new_tokens=12, temperature=0.0))
    dequantized = FineGrainedFP8Config(weight_block_size=(16, 16), dequantize=True)
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, quantization_config=dequantized)
    assert sample.tokens == greedy(whole, request)


def test_weight_update_with_latent_attention_recomputes_derived_weights(tmp_path, monkeypatch):
    """Attention over latents does not run on the CPU; that its weights are derived anew shows all the same."""
    model = made(tmp_path / "model", "deepseek_v2", kv_heads=4, rope_scaling=YARN)
    config = json.loads((model / "config.json").read_text())
    config |= {"topk_method": "greedy", "scoring_func": "softmax", "moe_layer_freq": 1}
    (model / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("verl_mg.engines.kinds.ProcessKind.host", probes.__name__)
    settings = dataclasses.replace(SETTINGS, extra={"custom_weight_loader": [probes.LOADER]})
    with closing(ProcessEngine(SGLANG, model, settings, tmp_path / "0.log")) as engine:
        bring_weights(engine, model, version=1)
        bring_weights(engine, model, version=2)
