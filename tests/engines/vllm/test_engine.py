"""One real vLLM engine: requests, aborts, updates in flight, seeds, kills and restarts."""

import dataclasses
import glob
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers import warm_start
from tests.helpers.engines import all_of, bring_weights, cut_short, late_and_other, process_of, requests, workers_of
from tests.helpers.traces import needs_vllm
from verl_mg.engines.engine import EngineDiedError, Request, Sample, Sampling, count_metrics
from verl_mg.engines.engine_options import EngineOptions
from verl_mg.engines.ipc_payload import Staging
from verl_mg.engines.kinds import VLLM
from verl_mg.engines.process_engine import ProcessEngine
from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout
from verl_mg.models.hf_config import read_config
from verl_mg.models.tiny_model import make_tiny_model
from verl_mg.sharding.weight_table import weight_table

pytestmark = needs_vllm
SETTINGS = EngineOptions(
    layout=EngineLayout(),
    dtype=torch.float32,
    max_running=16,
    max_positions=1024,
    routed_experts=True,
    python=Path(warm_start.vllm().python) if warm_start.VLLM_PYTHON.exists() else None,
)
LENGTH = 160
LONG, SHORT = Sampling(max_new_tokens=LENGTH), Sampling(max_new_tokens=5)
GREEDY = Sampling(max_new_tokens=LENGTH, temperature=0.0)


def made(folder: Path, architecture: str, seed: int = 3, **fields: object) -> Path:
    sizes = {"hidden": 32, "head_dim": 32, "ffn": 64, "max_positions": 1024, "init_std": 0.2}
    return make_tiny_model(folder, architecture, characters="abcdefgh", **(sizes | {"seed": seed} | fields))


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Path]:
    """Three sets of weights of one model."""
    folder = tmp_path_factory.mktemp("models")
    return [made(folder / str(seed), "qwen3_moe", seed) for seed in (3, 4, 5)]


@pytest.fixture(scope="module")
def model(models) -> Path:
    return models[0]


@pytest.fixture(scope="module")
def engine(model, tmp_path_factory) -> Iterator[ProcessEngine]:
    engine = ProcessEngine(VLLM, model, SETTINGS, tmp_path_factory.mktemp("log") / "0.log")
    bring_weights(engine, model, version=7)
    yield engine
    engine.close()


def check_sample(whole, request: Request, sample: Sample, temperature: float = 1.0, min_p: float = 0.0) -> None:
    """Its log-probs are those of the full distribution, and its experts those of `transformers`."""
    row = torch.tensor([[*request.prompt, *sample.tokens]])
    with torch.no_grad():
        out = whole(row, output_router_logits=True)
    scores = (out.logits[0] / temperature).log_softmax(-1)[len(request.prompt) - 1 : -1]
    oracle = scores.gather(1, torch.tensor(sample.tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(sample.logprobs), oracle, atol=1e-4, rtol=0)
    assert ((oracle - scores.amax(1)).exp() >= min_p - 1e-4).all()
    chosen = torch.stack([layer.topk(2).indices for layer in out.router_logits], dim=1)[:-1]
    assert sample.routed_experts is not None
    assert torch.equal(sample.routed_experts.long().sort(-1).values, chosen.sort(-1).values)


@pytest.mark.parametrize("cut", [{}, {"top_k": 3, "top_p": 0.7}, {"min_p": 0.4}])
def test_engine_samples_match_transformers_logprobs_and_routing(engine, model, cut):
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    requested = requests()
    samples = engine.generate(requested, Sampling(max_new_tokens=12, temperature=0.8, **cut))
    load = count_metrics([engine.take_counts()])
    assert 0 < load["time/engine_running"] <= len(requested) and load["time/engine_waiting"] >= 0
    assert 0 < load["time/engine_cache_usage"] < 1
    for request, sample in zip(requested, samples, strict=True):
        check_sample(whole, request, sample, 0.8, cut.get("min_p", 0.0))
        assert sample.policy_versions == (7,) * 12 and sample.finish == "length"


def test_engine_given_stop_tokens_stops_there(engine):
    free = engine.generate(requests(), Sampling(max_new_tokens=30, temperature=0.0))
    stop = free[0].tokens[10]
    stopped = engine.generate(requests(), Sampling(max_new_tokens=30, temperature=0.0, stop_token_ids=(stop,)))
    assert {len(sample.tokens) for sample in free} == {30}
    first = free[0].tokens[: free[0].tokens.index(stop) + 1]
    assert stopped[0].tokens == first and stopped[0].finish == "stop"


def test_engine_sample_depends_on_its_seed_alone(engine):
    (alone,) = engine.generate(requests()[2:3], SHORT)
    beside = engine.generate(requests()[::-1], SHORT)
    assert [sample.tokens for sample in beside if sample.id == alone.id] == [alone.tokens]
    others = engine.generate([dataclasses.replace(requests()[2], id=i, seed=i) for i in range(20)], SHORT)
    assert len({sample.tokens for sample in others}) > 10


def test_engine_given_partial_samples_continues_them(engine):
    whole = engine.generate(requests(), GREEDY)
    cut = cut_short(engine, requests(), GREEDY)
    assert all(len(sample.tokens) < LENGTH for sample in cut)
    again = [Request(r.id, r.prompt, r.seed, partial=s) for r, s in zip(requests(), cut, strict=True)]
    joined = engine.generate(again, GREEDY)
    assert [sample.tokens for sample in joined] == [sample.tokens for sample in whole]
    for one, other in zip(joined, whole, strict=True):
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=1e-4, rtol=0)
        assert len(one.policy_versions) == LENGTH and torch.equal(one.routed_experts, other.routed_experts)


def test_engine_continuation_of_a_partial_sample_draws_other_numbers(engine):
    """The same context twice: once as a prompt, once as a prompt whose beginning is a response."""
    (first,) = engine.generate([Request(1, (6,) * 8, 5)], Sampling(max_new_tokens=6))
    partial = Sample(1, (6,) * 4, (0.0,) * 4, (0,) * 4, "abort")
    (second,) = engine.generate([Request(1, (6,) * 4, 5, partial=partial)], Sampling(max_new_tokens=10))
    assert second.tokens == (6,) * 4 + first.tokens  # a sample depends on its seed and the tokens in front of it
    (third,) = engine.generate([Request(1, (6,) * 9, 5)], Sampling(max_new_tokens=6))
    assert third.tokens != first.tokens


def test_engine_abort_right_after_submit_cuts_requests(engine):
    engine.submit(requests(), LONG)
    engine.abort()
    assert any(sample.finish == "abort" for sample in all_of(engine, 6))
    assert [len(sample.tokens) for sample in engine.generate(requests(), SHORT)] == [5] * 6


def test_engine_request_over_its_time_is_cut_alone(engine, monkeypatch):
    late, other = late_and_other(engine, monkeypatch, LONG)
    assert len(late.tokens) < LENGTH
    assert other.finish == "length" and len(other.tokens) == LENGTH


def updated_in_flight(engine, models, keep_cache: bool) -> list[Sample]:
    """Samples of `requests`, of which the first tokens are of version 7, the next of version 1, the others of 2."""
    requested, samples = requests(), {}
    engine.submit(requested, GREEDY)
    for version in (1, 2):
        # When a short request is complete, the others have gone on too.
        engine.submit([Request(version, (6, 7), 0)], SHORT)
        while version not in samples:
            samples |= {sample.id: sample for sample in engine.collect(0.1)}
        engine.pause()
        bring_weights(engine, models[version], version)
        engine.unpause()
    samples |= {sample.id: sample for sample in all_of(engine, 8 - len(samples))}
    bring_weights(engine, models[0], version=7)
    return [samples[request.id] for request in requested]


@pytest.mark.parametrize("keep_cache", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_engine_updated_in_flight_gives_each_token_the_version_that_wrote_it(engine, models, keep_cache):
    for _ in range(20):  # on a machine under load, samples may be complete before the second update
        samples = updated_in_flight(engine, models, keep_cache)
        if any(set(sample.policy_versions) == {7, 1, 2} for sample in samples):
            break
    else:
        pytest.fail("no sample spans the updates")
    order = (7, 1, 2).index
    assert all(list(sample.policy_versions) == sorted(sample.policy_versions, key=order) for sample in samples)
    if engine.options.keep_cache:
        return  # the later tokens attend to keys and values of several versions
    for version, path in ((7, models[0]), (1, models[1]), (2, models[2])):
        whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for request, sample in zip(requests(), samples, strict=True):
            row = torch.tensor([[*request.prompt, *sample.tokens]])
            with torch.no_grad():
                scores = whole(row).logits[0].log_softmax(-1)[len(request.prompt) - 1 : -1]
            its = torch.tensor(sample.policy_versions) == version
            tokens = torch.tensor(sample.tokens)
            assert torch.equal(scores.argmax(-1)[its], tokens[its])
            oracle = scores.gather(1, tokens[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(sample.logprobs)[its], oracle[its], atol=1e-4, rtol=0)


def test_engine_update_without_all_parameters_raises(engine, model):
    table = weight_table(read_config(model)).for_engine("vllm")
    shards = dict(table.engine_shards(EngineLayout(), 0))
    del shards["model.norm.weight"]
    staging = Staging(shards, dict.fromkeys(shards, torch.float32), torch.device("cpu"))
    with pytest.raises(RuntimeError, match=r"1 parameters were not written: model\.norm\.weight"):
        engine.loaded(engine.load([staging.payload()], 8))
    bring_weights(engine, model, version=7)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ((), "request 5: the prompt is empty"),
        ((6,) * 1024, "1024 tokens fill the 1024 positions"),
        ((6, 500), "its token 500 is not in the vocabulary of"),
    ],
)
def test_engine_given_unanswerable_prompt_raises(engine, prompt, words):
    with pytest.raises(UserError, match=words):
        engine.submit([Request(5, prompt, 0)], SHORT)


def test_engine_killed_while_generating_restarts_and_finishes(engine, model):
    requested = requests(12)
    engine.submit(requested, LONG)
    finished = engine.collect(0.2)
    workers_of(engine)[0].kill()
    with pytest.raises(EngineDiedError, match="vLLM's processes have ended"):
        while len(finished) < 12:
            finished += engine.collect(0.5)
    assert not engine.health()
    engine.restart()
    bring_weights(engine, model, version=9)
    engine.resume()
    samples = all_of(engine, 12 - len(finished))
    assert samples and {v for sample in samples for v in sample.policy_versions} == {9}
    assert sorted(sample.id for sample in [*samples, *finished]) == [request.id for request in requested]


def test_engine_of_a_dead_rank_leaves_no_process(engine):
    """What the kernel does to the socket of a rank that is killed."""
    processes = [psutil.Process(engine.pid), process_of(engine), *process_of(engine).children(recursive=True)]
    assert len(processes) > 3
    engine._running_process._socket.shutdown(socket.SHUT_RDWR)
    _, alive = psutil.wait_procs(processes, timeout=600)
    assert alive == []


def test_engine_whose_host_is_killed_leaves_no_process(model, tmp_path):
    engine = ProcessEngine(VLLM, model, SETTINGS, tmp_path / "0.log")
    processes = process_of(engine).children(recursive=True)
    assert workers_of(engine)
    process_of(engine).kill()
    _, alive = psutil.wait_procs(processes, timeout=600)
    with pytest.raises(EngineDiedError):
        engine.loaded(engine.load([], 1))
    engine.close()
    assert alive == []


def test_engine_that_cannot_start_raises_with_its_log(model, tmp_path):
    wrong = dataclasses.replace(SETTINGS, extra={"max_num_batched_token": 512})
    with pytest.raises(UserError, match=r"cannot start. See its log .*0\.log, which ends:[\s\S]*max_num_batched_token"):
        ProcessEngine(VLLM, model, wrong, tmp_path / "0.log")


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
    settings = dataclasses.replace(SETTINGS, layout=EngineLayout.parse(layout), routed_experts=False)
    engine = ProcessEngine(VLLM, paths[0], settings, tmp_path / "0.log")
    try:
        for version, path in enumerate((paths[1], paths[0], paths[1])):
            bring_weights(engine, path, version)
            samples = engine.generate(requests(), Sampling(max_new_tokens=20, temperature=0.0))
            whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
            for request, sample in zip(requests(), samples, strict=True):
                row = torch.tensor([[*request.prompt, *sample.tokens]])
                with torch.no_grad():
                    scores = whole(row).logits[0].log_softmax(-1)[len(request.prompt) - 1 : -1]
                assert sample.tokens == tuple(scores.argmax(-1).tolist())
                torch.testing.assert_close(torch.tensor(sample.logprobs), scores.amax(-1), atol=1e-4, rtol=0)
                assert set(sample.policy_versions) == {version}
    finally:
        process_of(engine).kill()  # what is killed cannot tidy up
        engine.close()
    left = {path for path in set(glob.glob("/dev/shm/*")) - before if "vllm" in path or "cpushm" in path}
    assert left == set()


@pytest.mark.nightly
def test_engine_with_latent_attention_recomputes_derived_weights(tmp_path):
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64}
    paths = [tiny_latent_model(tmp_path / str(seed), seed, latent) for seed in (1, 2)]
    settings = dataclasses.replace(SETTINGS, routed_experts=False)
    engine = ProcessEngine(VLLM, paths[0], settings, tmp_path / "0.log")
    try:
        for version, path in enumerate((paths[1], paths[0])):
            bring_weights(engine, path, version)
            samples = engine.generate(requests(), Sampling(max_new_tokens=20, temperature=0.0))
            whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
            for request, sample in zip(requests(), samples, strict=True):
                row = torch.tensor([[*request.prompt, *sample.tokens]])
                with torch.no_grad():
                    scores = whole(row).logits[0].log_softmax(-1)[len(request.prompt) - 1 : -1]
                assert sample.tokens == tuple(scores.argmax(-1).tolist())
                torch.testing.assert_close(torch.tensor(sample.logprobs), scores.amax(-1), atol=1e-4, rtol=0)
    finally:
        engine.close()


def tiny_latent_model(folder: Path, seed: int, latent: dict[str, int]) -> Path:
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    torch.manual_seed(seed)
    sizes = {"vocab_size": 106, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": None}
    experts = {
        **{"first_k_dense_replace": 1, "n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 64},
        **{"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "topk_method": "greedy"},
    }
    config = DeepseekV2Config(
        **sizes, **heads, **experts, **latent, max_position_embeddings=1024, tie_word_embeddings=False,
        initializer_range=0.1, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    DeepseekV2ForCausalLM(config).eval().save_pretrained(folder)
    return folder
