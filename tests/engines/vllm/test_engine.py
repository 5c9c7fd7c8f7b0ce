"""Seeds, updates and lost processes of a real vLLM engine, beyond the promises of all (`test_conformance.py`)."""

import glob
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers.engines import bring_weights, options_of, process_of, requests, workers_of
from tests.helpers.traces import needs_vllm
from verl_mg.engines.engine import EngineDiedError, Request, Sample, Sampling
from verl_mg.engines.kinds import VLLM
from verl_mg.engines.payloads import Staging
from verl_mg.engines.process_engine import ProcessEngine
from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout
from verl_mg.models.hf_config import read_config
from verl_mg.models.tiny_model import make_tiny_model
from verl_mg.sharding.weight_table import weight_table

pytestmark = needs_vllm
of_vllm = pytest.mark.parametrize("started", ["vllm"], indirect=True, scope="package")


def made(folder: Path, architecture: str, seed: int = 3, **fields: object) -> Path:
    sizes = {"hidden": 32, "head_dim": 32, "ffn": 64, "max_positions": 1024, "init_std": 0.2}
    return make_tiny_model(folder, architecture, characters="abcdefgh", **(sizes | {"seed": seed} | fields))


@of_vllm
def test_engine_continuation_of_a_partial_sample_draws_other_numbers(engine):
    """The same context twice: once as a prompt, once as a prompt whose beginning is a response."""
    (first,) = engine.generate([Request(1, (6,) * 8, 5)], Sampling(max_new_tokens=6))
    partial = Sample(1, (6,) * 4, (0.0,) * 4, (0,) * 4, "abort")
    (second,) = engine.generate([Request(1, (6,) * 4, 5, partial=partial)], Sampling(max_new_tokens=10))
    assert second.tokens == (6,) * 4 + first.tokens  # a sample depends on its seed and the tokens in front of it
    (third,) = engine.generate([Request(1, (6,) * 9, 5)], Sampling(max_new_tokens=6))
    assert third.tokens != first.tokens


@of_vllm
def test_engine_update_without_all_parameters_raises(engine, mixtures):
    table = weight_table(read_config(mixtures[0])).for_engine("vllm")
    shards = dict(table.engine_shards(EngineLayout(), 0))
    del shards["model.norm.weight"]
    staging = Staging(shards, dict.fromkeys(shards, torch.float32), torch.device("cpu"))
    with pytest.raises(UserError, match=r"1 parameters were not written: model\.norm\.weight"):
        engine.loaded(engine.load([staging.payload()], 8))
    bring_weights(engine, mixtures[0], version=8)


def test_engine_whose_host_is_killed_leaves_no_process(mixtures, tmp_path):
    engine = ProcessEngine(VLLM, mixtures[0], options_of("vllm"), tmp_path / "0.log")
    processes = process_of(engine).children(recursive=True)
    assert workers_of(engine)
    process_of(engine).kill()
    _, alive = psutil.wait_procs(processes, timeout=600)
    with pytest.raises(EngineDiedError):
        engine.loaded(engine.load([], 1))
    engine.close()
    assert alive == []


def check_greedy(engine: ProcessEngine, path: Path, version: int) -> None:
    """After an update an engine writes what `transformers` finds likeliest."""
    bring_weights(engine, path, version)
    samples = engine.generate(requests(), Sampling(max_new_tokens=20, temperature=0.0))
    whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for request, sample in zip(requests(), samples, strict=True):
        with torch.no_grad():
            scores = whole(torch.tensor([[*request.prompt, *sample.tokens]])).logits[0].log_softmax(-1)
        scores = scores[len(request.prompt) - 1 : -1]
        assert sample.tokens == tuple(scores.argmax(-1).tolist()) and set(sample.policy_versions) == {version}
        torch.testing.assert_close(torch.tensor(sample.logprobs), scores.amax(-1), atol=1e-4, rtol=0)


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["tp2", "pp2", "tp2-pp2"])
@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("qwen3", {}),
        ("qwen2", {"tie_embeddings": True, "hidden": 128}),
        ("gemma2", {"tie_embeddings": True}),
        ("mixtral", {}),
    ],
)
def test_engine_updated_three_times_generates_as_transformers(tmp_path, architecture, fields, layout):
    before = set(glob.glob("/dev/shm/*"))
    paths = [made(tmp_path / str(seed), architecture, seed, layers=3, **fields) for seed in (1, 2)]
    options = options_of("vllm", layout=EngineLayout.parse(layout), routed_experts=False)
    engine = ProcessEngine(VLLM, paths[0], options, tmp_path / "0.log")
    try:
        for version, path in enumerate((paths[1], paths[0], paths[1])):
            check_greedy(engine, path, version)
    finally:
        process_of(engine).kill()  # what is killed cannot tidy up
        engine.close()
    left = {path for path in set(glob.glob("/dev/shm/*")) - before if "vllm" in path or "cpushm" in path}
    assert left == set()


@pytest.mark.nightly
def test_engine_with_latent_attention_recomputes_derived_weights(tmp_path):
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "topk_method": "greedy"}
    sizes = {"hidden": 64, "head_dim": 64, "ffn": 128, "dense_layers": 1, "init_std": 0.1}
    paths = [made(tmp_path / str(seed), "deepseek_v2", seed, fields=latent, **sizes) for seed in (1, 2)]
    options = options_of("vllm", routed_experts=False, max_positions=1024)
    with closing(ProcessEngine(VLLM, paths[0], options, tmp_path / "0.log")) as engine:
        for version, path in enumerate((paths[1], paths[0])):
            check_greedy(engine, path, version)
