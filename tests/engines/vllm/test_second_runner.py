"""Engines of vLLM's second model runner beyond the promises of all (`test_conformance.py`)."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers import second_runner
from tests.helpers.engines import bring_weights, options_of, requests
from tests.helpers.traces import needs_vllm
from verl_mg.checkpoint.peft import adapted_tensors, adapter_shapes
from verl_mg.engines.engine import ACCEPTED, Sampling
from verl_mg.engines.engine_options import AdapterSettings
from verl_mg.engines.payloads import Staging
from verl_mg.engines.process_engine import ProcessEngine
from verl_mg.layout import EngineLayout
from verl_mg.models.hf_config import read_config
from verl_mg.models.tiny_model import make_tiny_model
from verl_mg.sharding.boxes import Piece, Shard, full_box
from verl_mg.sharding.weight_table import weight_table

pytestmark = [needs_vllm, pytest.mark.nightly]
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
SIZES: dict[str, Any] = {"hidden": 64, "head_dim": 64, "ffn": 128, "max_positions": 256, "init_std": 0.1, "layers": 3}
LATENT = {"dense_layers": 1, "fields": {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "topk_method": "greedy"}}
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


def made(folder: Path, architecture: str, seed: int, **fields: Any) -> Path:
    return make_tiny_model(folder / str(seed), architecture, characters="abcdefgh", seed=seed, **(SIZES | fields))


@contextmanager
def running(folder: Path, model: Path, **options: Any) -> Iterator[ProcessEngine]:
    (folder / "path").mkdir()
    kind = second_runner.kind_with_links_in(folder / "path")
    settings = options_of("vllm", routed_experts=False, python=second_runner.VLLM_PYTHON, **options)
    with closing(ProcessEngine(kind, model, settings, folder / "0.log")) as engine:
        yield engine


def check_logprobs(engine: ProcessEngine, whole: Any) -> None:
    """Log-probs are those of `transformers` after temperature, 1 for greedy requests, whatever limits there are."""
    for temperature, limits in ((0.7, {"top_k": 3}), (1.0, {}), (0.0, {}), (1.0, {"top_p": 0.5})):
        samples = engine.generate(requests(), Sampling(max_new_tokens=12, temperature=temperature, **limits))
        for request, sample in zip(requests(), samples, strict=True):
            with torch.no_grad():
                logits = whole(torch.tensor([[*request.prompt, *sample.tokens]])).logits[0]
            scores = (logits / (temperature or 1.0)).log_softmax(-1)[len(request.prompt) - 1 : -1]
            expected = scores.gather(1, torch.tensor(sample.tokens)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(sample.logprobs), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("architecture", "fields", "layout", "extra"),
    [
        ("qwen3", {}, "tp1", {"speculative_config": DRAFTS}),
        ("qwen3", {}, "tp2-pp2", {}),
        ("deepseek_v2", LATENT, "tp1", {}),
    ],
)
def test_engine_updated_twice_has_logprobs_of_transformers(tmp_path, architecture, fields, layout, extra):
    paths = [made(tmp_path, architecture, seed, **fields) for seed in (3, 4)]
    with running(tmp_path, paths[0], layout=EngineLayout.parse(layout), extra=extra) as engine:
        for version, path in enumerate(paths[::-1]):
            bring_weights(engine, path, version)
            check_logprobs(engine, AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
        assert bool(engine.take_counts().get(ACCEPTED)) == bool(extra)


def test_engine_with_replaced_adapters_has_logprobs_of_merged_weights(tmp_path):
    path = made(tmp_path, "qwen3", 3)
    table = weight_table(read_config(path))
    shapes = adapter_shapes(table, adapted_tensors(table, TARGETS), 4)
    shards = {name: Shard(shape, (Piece(name, full_box(shape), full_box(shape)),)) for name, shape in shapes.items()}
    config = {"r": 4, "lora_alpha": 8, "target_modules": list(TARGETS), "peft_type": "LORA"}
    with running(tmp_path, path, adapters=AdapterSettings(4, TARGETS)) as engine:
        bring_weights(engine, path, 0)
        for version in (1, 2):
            generator = torch.Generator().manual_seed(version)
            staging = Staging(shards, dict.fromkeys(shards, torch.float32), torch.device("cpu"))
            for tensor in staging.tensors.values():
                tensor.normal_(std=0.2, generator=generator)
            engine.load_adapters([staging.payload() for _ in range(engine.num_adapter_readers)], version, config)
            merged = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
            weights = dict(merged.named_parameters())
            for name, a in staging.tensors.items():
                if ".lora_A." in name:
                    weight = weights[name.removeprefix("base_model.model.").replace(".lora_A", "")]
                    weight.data += 2 * staging.tensors[name.replace("lora_A", "lora_B")] @ a
            check_logprobs(engine, merged)
