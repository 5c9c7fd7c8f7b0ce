"""HFEngine compared with `transformers`: greedy `generate`, and a forward pass without a cache."""

import dataclasses
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.helpers.engines import all_of
from tests.helpers.tiny_models import CHARACTERS, SPARSE, tiny_model
from verl_mg.checkpoint.hf_safetensors import CheckpointReader, load_shards
from verl_mg.checkpoint.model_directory import ModelDirectory
from verl_mg.engines.engine import Request, RolloutEngine, Sample, Sampling
from verl_mg.engines.hf.engine import HFEngine
from verl_mg.errors import UserError
from verl_mg.models.hf_config import parse_config
from verl_mg.models.tiny_model import make_tiny_model
from verl_mg.sharding.weight_table import weight_table

WINDOW = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
DENSE = ("llama", "qwen2", "qwen2-window", "qwen3")
MIXTURES = ("qwen3_moe", "deepseek_v3")
SPARSE_FIELDS: dict[str, Any] = {
    **{"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4},
    **{"v_head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    **{"moe_intermediate_size": 16, "num_experts_per_tok": 2, "max_position_embeddings": 128},
    **{"index_topk": 6, "index_n_heads": 16, "index_head_dim": 8},
}
"""Sizes with which no two keys have equal scores for the indexer."""
VOCAB = 30


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small only lose time to a second thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def made(name: str, folder: Path) -> Path:
    if name in SPARSE:
        torch.manual_seed(0)
        module = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SPARSE_FIELDS), dtype=torch.float32)
        for parameter in module.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.3)
        module.save_pretrained(folder)
        return folder
    return tiny_model(folder, "qwen2", **WINDOW) if name == "qwen2-window" else tiny_model(folder, name)


def engine_of(directory: Path, **options: Any) -> HFEngine:
    return HFEngine(directory, "cpu", torch.float32, **options)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory) -> Path:
    return made("qwen3", tmp_path_factory.mktemp("qwen3"))


def requests(prompts: int = 5, group: int = 3) -> list[Request]:
    source = random.Random(0)
    texts = [tuple(source.randrange(VOCAB) for _ in range(source.randrange(1, 14))) for _ in range(prompts)]
    return [Request(id=100 + i, prompt=texts[i // group], seed=i) for i in range(prompts * group)]


def shapes_of_calls(engine: HFEngine) -> list[tuple[int, int]]:
    """Rows and tokens of each call of the module from now on, before its operators are recorded."""
    shapes: list[tuple[int, int]] = []
    embedding = engine.module.get_input_embeddings()
    embedding.register_forward_hook(lambda _, args, __: shapes.append(tuple(args[0].shape)))
    return shapes


def by_id(samples: list[Sample]) -> dict[int, tuple[int, ...]]:
    return {sample.id: sample.tokens for sample in samples}


@pytest.mark.parametrize("name", DENSE)
def test_generate_greedy_equals_transformers(name, tmp_path):
    engine = engine_of(made(name, tmp_path))
    stops = (3, 20, 21, 22, 27)
    sampling = Sampling(max_new_tokens=12, temperature=0, stop_token_ids=stops)
    requested = requests(prompts=8, group=1)
    for request, sample in zip(requested, engine.generate(requested, sampling), strict=True):
        ids = torch.tensor([request.prompt])
        options = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": list(stops), "pad_token_id": 0}
        expected = engine.module.generate(ids, attention_mask=torch.ones_like(ids), **options)
        assert sample.id == request.id
        assert list(sample.tokens) == expected[0, len(request.prompt) :].tolist()


@pytest.mark.parametrize("name", [*DENSE, *SPARSE])
def test_generate_logprobs_equal_a_forward_without_cache(name, tmp_path):
    engine = engine_of(made(name, tmp_path))
    sampling = Sampling(max_new_tokens=16, temperature=1.5, top_k=40, stop_token_ids=(1, 2, 3, 4))
    requested = requests()
    for request, sample in zip(requested, engine.generate(requested, sampling), strict=True):
        row = torch.tensor([request.prompt + sample.tokens])
        scores = engine.module(row).logits[0, len(request.prompt) - 1 : -1] / 1.5
        expected = scores.log_softmax(-1).gather(1, torch.tensor(sample.tokens)[:, None]).squeeze(1)
        torch.testing.assert_close(torch.tensor(sample.logprobs), expected, atol=1e-5, rtol=1e-5)


def test_generate_samples_do_not_depend_on_their_batch(qwen3):
    sampling = Sampling(max_new_tokens=20, top_p=0.95, stop_token_ids=(5, 6, 7, 8))
    requested = requests(prompts=7)
    whole = engine_of(qwen3).generate(requested, sampling)
    assert [sample.id for sample in whole] == [request.id for request in requested]
    assert len({len(sample.tokens) for sample in whole}) > 3, "rows should leave the batch at different times"
    small = engine_of(qwen3, max_running_requests=4)
    shuffled = random.Random(1).sample(requested, len(requested))
    assert by_id(small.generate(shuffled, sampling)) == by_id(whole)
    assert by_id(small.generate(requested[4:5], sampling)) == by_id(whole[4:5])


def test_collect_requests_with_other_token_limits_share_a_batch(qwen3):
    engine, requested = engine_of(qwen3), requests(prompts=4, group=2)
    limits = [Sampling(max_new_tokens=3 + 2 * i, stop_token_ids=(5, 6)) for i in range(len(requested))]
    alone = [engine_of(qwen3).generate([request], limit)[0] for request, limit in zip(requested, limits, strict=True)]
    for request, limit in zip(requested, limits, strict=True):
        engine.submit([request], limit)
    shapes = shapes_of_calls(engine)
    together = {sample.id: sample for sample in all_of(engine, len(requested))}
    assert max(rows for rows, _ in shapes) == len(requested)
    assert [together[sample.id].tokens for sample in alone] == [sample.tokens for sample in alone]
    assert [together[sample.id].finish for sample in alone] == [sample.finish for sample in alone]
    assert {len(sample.tokens) for sample in alone} > {3, 5}


def test_generate_equal_prompts_share_a_prefill(qwen3):
    engine = engine_of(qwen3)
    shapes = shapes_of_calls(engine)
    sampling = Sampling(max_new_tokens=30, stop_token_ids=tuple(range(20)))
    engine.generate(requests(prompts=5, group=8), sampling)
    rows = [shape[0] for shape in shapes]
    assert rows[0] == 5
    assert {width for _, width in shapes[1:]} == {1}
    assert 5 < rows[1] <= 40
    assert rows[1:] == sorted(rows[1:], reverse=True)
    assert rows[-1] < 10


def test_update_written_parameters_change_the_policy(qwen3, tmp_path):
    other = engine_of(
        make_tiny_model(
            tmp_path, "qwen3", characters=CHARACTERS, hidden=32, head_dim=12, ffn=56, layers=4, init_std=0.3, seed=1
        )
    )
    engine: RolloutEngine = engine_of(qwen3)
    requested, sampling = requests(), Sampling(max_new_tokens=8)
    before = engine.generate(requested, sampling)
    assert {v for sample in before for v in sample.policy_versions} == {0}
    engine.begin_update()
    assert not engine.health()
    with pytest.raises(RuntimeError, match="update"):
        engine.generate(requested, sampling)
    for name, tensor in engine.parameters().items():
        tensor.copy_(other.parameters()[name])
    engine.end_update(7)
    after = engine.generate(requested, sampling)
    assert {v for sample in after for v in sample.policy_versions} == {7}
    assert by_id(after) == by_id(other.generate(requested, sampling)) != by_id(before)


@pytest.mark.parametrize("name", [*DENSE, *MIXTURES])
def test_engine_without_weights_is_filled_by_an_update(name, tmp_path):
    directory = made(name, tmp_path)
    engine = engine_of(directory, load_weights=False)
    assert not engine.health()
    engine.begin_update()
    fill(engine, directory)
    engine.end_update(1)
    requested, sampling = requests(), Sampling(max_new_tokens=6)
    assert by_id(engine.generate(requested, sampling)) == by_id(engine_of(directory).generate(requested, sampling))


def test_share_same_dtype_uses_the_same_memory(qwen3):
    engine = engine_of(qwen3)
    requested, sampling = requests(), Sampling(max_new_tokens=6)
    before = by_id(engine.generate(requested, sampling))
    names = ["model.norm.weight", "lm_head.weight"]
    offered = {name: engine.parameters()[name].clone() for name in names}
    offered["lm_head.weight"] = offered["lm_head.weight"].bfloat16()
    engine.begin_update()
    engine.share(offered)
    engine.end_update(1)
    taken = [engine.parameters()[name].data_ptr() == offered[name].data_ptr() for name in names]
    assert taken == [True, False]
    assert by_id(engine.generate(requested, sampling)) == before


def fill(engine: HFEngine, directory: Path) -> None:
    """Write every tensor of the checkpoint where the weight table says; its names have to be those of the engine."""
    fields = json.loads((directory / "config.json").read_text())
    fields.pop("use_sliding_window", None)  # no matter of the weights, and refused for training
    reader = CheckpointReader(ModelDirectory.find(directory))
    load_shards(reader, weight_table(parse_config(fields)).transformers(), engine.parameters())


def test_abort_returns_partial_samples(qwen3):
    engine = engine_of(qwen3, max_running_requests=6)
    requested, sampling = requests(prompts=4), Sampling(max_new_tokens=20)
    whole = engine.generate(requested, sampling)
    steps: list[int] = []

    def cut(*_: object) -> None:
        steps.append(1)
        if len(steps) == 5:
            engine.abort()

    hook = engine.module.register_forward_hook(cut)
    samples = engine.generate(requested, sampling)
    hook.remove()
    assert {sample.finish for sample in samples} == {"abort"}
    assert sorted(len(sample.tokens) for sample in samples) == [0] * 6 + [5] * 6
    for cut_short, full in zip(samples, whole, strict=True):
        assert cut_short.tokens == full.tokens[: len(cut_short.tokens)]
    assert engine.generate(requested, sampling) == whole


def test_submit_partial_sample_continues_like_an_uninterrupted_one(qwen3):
    engine = engine_of(qwen3)
    engine.begin_update()
    engine.end_update(6)
    requested, sampling = requests(), Sampling(max_new_tokens=20)
    whole = engine.generate(requested, sampling)
    for length in (1, 7, 19, 20):
        begun = [
            dataclasses.replace(sample, tokens=sample.tokens[:length], logprobs=sample.logprobs[:length],
                                policy_versions=(5,) * len(sample.tokens[:length]))
            for sample in whole
        ]  # fmt: skip
        again = [dataclasses.replace(request, partial=part) for request, part in zip(requested, begun, strict=True)]
        for one, other in zip(engine.generate(again, sampling), whole, strict=True):
            assert (one.id, one.tokens) == (other.id, other.tokens)
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
            assert one.policy_versions == (5,) * length + (6,) * (20 - length) and one.finish == "length"


def test_collect_without_requests_returns_nothing(qwen3):
    assert engine_of(qwen3).generate([], Sampling(max_new_tokens=4)) == []


def test_engine_directory_without_model_raises(qwen3, tmp_path):
    with pytest.raises(UserError, match=r"config\.json"):
        engine_of(tmp_path)
    shutil.copy(qwen3 / "config.json", tmp_path)
    with pytest.raises(UserError, match="safetensors weights cannot be read"):
        engine_of(tmp_path)


def test_engine_bfloat16_is_the_dtype_of_the_weights(qwen3):
    for load in (True, False):
        engine = HFEngine(qwen3, "cpu", torch.bfloat16, load_weights=load)
        assert {tensor.dtype for tensor in engine.parameters().values()} == {torch.bfloat16}
