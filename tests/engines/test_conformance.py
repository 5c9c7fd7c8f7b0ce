"""The promises of an engine (`verl_mg.engines.engine`), kept by every kind: real engines, one suite."""

import base64
import math
import socket
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import psutil
import pytest
import torch

from tests.helpers.engines import (
    SECOND_RUNNER,
    SGLANG,
    VERSION,
    VLLM,
    VLLM_NIGHTLY,
    all_of,
    bring_weights,
    cut_short,
    late_and_other,
    options_of,
    process_of,
    requests,
    weights_of,
    workers_of,
)
from verl_mg.engines.engine import EngineDiedError, Request, Sample, Sampling, count_metrics
from verl_mg.engines.engine_options import AdapterSettings
from verl_mg.engines.kinds import PROCESSES
from verl_mg.engines.process_engine import ProcessEngine
from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout
from verl_mg.models.hf_config import read_config
from verl_mg.models.tiny_model import make_tiny_model
from verl_mg.sharding.boxes import Piece, Shard

LENGTH = 200
LATER = (VERSION + 1, VERSION + 2)
"""Versions of updates in flight."""
LONG, SHORT = Sampling(max_new_tokens=LENGTH), Sampling(max_new_tokens=5)
GREEDY = Sampling(max_new_tokens=LENGTH, temperature=0.0)

of_all = pytest.mark.parametrize("started", ["hf", SGLANG, VLLM, SECOND_RUNNER], indirect=True, scope="package")
of_processes = pytest.mark.parametrize("started", [SGLANG, VLLM, SECOND_RUNNER], indirect=True, scope="package")
with_padding = pytest.mark.parametrize("started", [SGLANG, VLLM_NIGHTLY, SECOND_RUNNER], indirect=True, scope="package")
with_seeds = pytest.mark.parametrize("started", ["hf", VLLM, SECOND_RUNNER], indirect=True, scope="package")


def scores_of(whole: Any, request: Request, sample: Sample, temperature: float = 1.0) -> tuple[Any, Any]:
    """Log-probs of all tokens at each place of a response, (n, vocabulary), and experts of all tokens but the last."""
    with torch.no_grad():
        out = whole(torch.tensor([[*request.prompt, *sample.tokens]]), output_router_logits=True)
    experts = torch.stack([layer.topk(2).indices for layer in out.router_logits], dim=1)[:-1]
    return (out.logits[0] / temperature).log_softmax(-1)[len(request.prompt) - 1 : -1], experts


def at(scores: Any, tokens: Sequence[int]) -> Any:
    return scores.gather(1, torch.tensor(tokens)[:, None])[:, 0]


@of_all
@pytest.mark.parametrize("cut", [{}, {"top_k": 3, "top_p": 0.7}, {"min_p": 0.4}])
def test_samples_have_the_logprobs_and_the_routing_of_transformers(engine, wholes, cut):
    requested = requests()
    samples = engine.generate(requested, Sampling(max_new_tokens=12, temperature=0.8, **cut))
    for request, sample in zip(requested, samples, strict=True):
        scores, experts = scores_of(wholes[0], request, sample, 0.8)
        own = at(scores, sample.tokens)
        torch.testing.assert_close(torch.tensor(sample.logprobs), own, atol=1e-4, rtol=0)
        assert ((own - scores.amax(1)).exp() >= cut.get("min_p", 0.0) - 1e-4).all()
        assert (scores > own[:, None] + 1e-4).sum(1).max() < cut.get("top_k", 1000)
        assert sample.policy_versions == (VERSION,) * 12 and sample.finish == "length"
        if isinstance(engine, ProcessEngine):
            assert sample.routed_experts is not None
            assert torch.equal(sample.routed_experts.long().sort(-1).values, experts.sort(-1).values)


REPORTS: dict[str, Any] = {"returns_support": True, "top_logprobs": 4}
LIMITS: list[dict[str, Any]] = [
    {"top_p": 0.9},
    {"top_k": 3},
    {"min_p": 0.2},
    {"top_p": 0.8, "top_k": 4, "min_p": 0.05, "temperature": 1.3},
    {"top_p": 0.95, "excluded_token_ids": (7, 9)},
]


def bounds_of(scores: Any, sampling: Sampling, engine: Any) -> tuple[Any, Any]:
    """Tokens that are surely and possibly candidates, (n, vocabulary) bool each: rounding decides about the others.

    top_p counts shares of all tokens, on SGLang without the excluded ones. vLLM applies min_p, top_k and top_p one
    after the other, each to the distribution that is left.
    """
    kind = engine.kind.name if isinstance(engine, ProcessEngine) else "hf"
    found = []
    for slack in (-1e-5, 1e-5):
        probs = scores.double().exp()
        drawn = probs.clone()
        drawn[:, list(sampling.excluded_token_ids)] = 0.0
        order = drawn.argsort(-1, descending=True)
        probs, drawn = probs.gather(1, order), drawn.gather(1, order)
        kept = drawn >= (sampling.min_p - slack) * drawn[:, :1]
        kept[:, sampling.top_k or kept.shape[1] :] = False
        left = drawn * kept if kind == "vllm" else drawn
        share = (left.cumsum(-1) - left) / (probs if kind == "hf" else left).sum(-1, keepdim=True)
        kept &= (share < sampling.top_p + slack) | (sampling.top_p == 1)
        found.append(torch.zeros_like(kept).scatter(1, order, kept & (drawn > 0)))
    return found[0], found[1]


def check_candidates(engine: Any, whole: Any, request: Request, sampling: Sampling, sample: Sample) -> set[int]:
    """Checks candidates, log-probs over them and the likeliest of them; returns the numbers of candidates."""
    scores, _ = scores_of(whole, request, sample, sampling.temperature)
    assert sample.support is not None and sample.top is not None
    rows, candidates = torch.arange(len(sample.tokens)), torch.zeros_like(scores, dtype=torch.bool)
    candidates[rows.repeat_interleave(sample.support.sizes), sample.support.ids.long()] = True
    surely, possibly = bounds_of(scores, sampling, engine)
    assert candidates[rows, sample.tokens].all() and (surely <= candidates).all() and (candidates <= possibly).all()
    inside = scores.double().where(candidates, -torch.inf).log_softmax(-1).float()
    torch.testing.assert_close(torch.tensor(sample.logprobs), inside[rows, sample.tokens], atol=1e-5, rtol=0)
    values = inside.sort(-1, descending=True).values[:, : sample.top.shape[2]]
    torch.testing.assert_close(sample.top[:, 0], values, atol=1e-5, rtol=0)
    torch.testing.assert_close(inside.gather(1, sample.top[:, 1].long()).where(values > -torch.inf, values), values)
    return set(sample.support.sizes.tolist())


@of_all
def test_samples_have_the_candidates_of_each_token_and_the_logprobs_over_them(engine, wholes):
    """Requests with different limits, with reports and without, are in a batch together; some are continued."""
    asked: dict[int, tuple[Request, Sampling]] = {}
    for limits in LIMITS:
        for report in ({}, REPORTS):
            sampling = Sampling(**{"max_new_tokens": 12, "temperature": 0.8} | limits | report)
            new = [replace(request, id=100 * len(asked) + request.id) for request in requests(3)]
            asked |= {request.id: (request, sampling) for request in new}
            engine.submit(new, sampling)
    num_candidates: set[int] = set()
    drawn: dict[tuple[Sampling, int], set[tuple[int, ...]]] = {}
    for sample in all_of(engine, len(asked)):
        request, sampling = asked[sample.id]
        plain = replace(sampling, returns_support=False, top_logprobs=0)
        drawn.setdefault((plain, request.seed), set()).add(sample.tokens)
        if sampling.returns_support:
            num_candidates |= check_candidates(engine, wholes[0], request, sampling, sample)
        else:
            assert sample.support is None and sample.top is None
    assert len(num_candidates) > 4
    if not isinstance(engine, ProcessEngine) or engine._limits.seeded:
        assert len(drawn) == 15 and {len(tokens) for tokens in drawn.values()} == {1}  # reports change no draw
    sampling = Sampling(max_new_tokens=LENGTH // 2, top_p=0.9, **REPORTS)
    cut = cut_short(engine, requests(3), sampling)
    again = [replace(request, partial=part) for request, part in zip(requests(3), cut, strict=True)]
    for request, sample in zip(again, engine.generate(again, sampling), strict=True):
        check_candidates(engine, wholes[0], request, sampling, sample)


WRONG = {
    "tokens": (10**6,) * 5,
    "logprobs": (math.nan,) * 5,
    "routed_experts": base64.b64encode(bytes(4 * 7 * 2 * 2)).decode(),  # expert 0 twice for each token and layer
}


@of_all
@pytest.mark.parametrize("column", WRONG)
def test_wrong_report_raises_with_the_name_of_the_engine(engine, monkeypatch, column):
    name = engine.kind.name if isinstance(engine, ProcessEngine) else "hf"
    fault = {column: WRONG[column]}
    if isinstance(engine, ProcessEngine):
        complete = engine._complete
        monkeypatch.setattr(engine, "_complete", lambda rid, result: complete(rid, result | fault))
    elif column == "routed_experts":
        return  # it reports none
    else:
        decode = engine._decode

        def faulty(new):
            decode(new)
            for _, _, row in engine._running:
                setattr(row, column, fault[column])

        monkeypatch.setattr(engine, "_decode", faulty)
    with pytest.raises(UserError, match=f"^rollout.engine={name}: sample 4 has "):
        engine.generate([Request(4, (3, 4, 5), seed=0)], SHORT)


@of_processes
def test_started_engine_says_what_it_has_made_of_its_arguments(started, mixtures):
    """Not what it was passed: SGLang's schedulers and vLLM's workers decide the rest."""
    chosen, kind = started.chosen, started.kind
    passed = kind.choices(kind.arguments(mixtures[0], started.options))
    decided = {
        "sglang": {"CUDA graphs": "disabled in prefill, disabled in decode", "key-value cache": "4096 tokens"},
        "vllm": {"attention": "CPU_ATTN", "memory fraction": "0.92"},
    }
    assert chosen == passed | decided[kind.name] and chosen != passed


@of_all
def test_greedy_samples_are_the_likeliest_tokens_and_end_at_stop_tokens(engine, wholes):
    greedy = Sampling(max_new_tokens=30, temperature=0.0)
    free = engine.generate(requests(), greedy)
    for request, sample in zip(requests(), free, strict=True):
        scores, _ = scores_of(wholes[0], request, sample)
        assert sample.tokens == tuple(scores.argmax(-1).tolist()) and len(sample.tokens) == 30
    stop = free[0].tokens[10]
    stopped = engine.generate(requests(), replace(greedy, stop_token_ids=(stop,)))
    assert stopped[0].tokens == free[0].tokens[: free[0].tokens.index(stop) + 1] and stopped[0].finish == "stop"


@with_seeds
def test_sample_depends_on_its_seed_alone(engine):
    (alone,) = engine.generate(requests()[2:3], SHORT)
    others = engine.generate(requests()[::-1], SHORT)
    assert [sample.tokens for sample in others if sample.id == alone.id] == [alone.tokens]
    seeds = engine.generate([replace(requests()[2], id=i, seed=i) for i in range(16)], SHORT)
    assert len({sample.tokens for sample in seeds}) > 8


@of_all
def test_partial_samples_are_continued(engine):
    whole = engine.generate(requests(), GREEDY)
    cut = cut_short(engine, requests(), GREEDY)
    assert all(len(sample.tokens) < LENGTH for sample in cut)
    again = [Request(r.id, r.prompt, r.seed, partial=s) for r, s in zip(requests(), cut, strict=True)]
    joined = engine.generate(again, GREEDY)
    assert [sample.tokens for sample in joined] == [sample.tokens for sample in whole]
    for one, other in zip(joined, whole, strict=True):
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=1e-4, rtol=0)
        assert len(one.policy_versions) == LENGTH
        assert one.routed_experts is other.routed_experts or torch.equal(one.routed_experts, other.routed_experts)


@of_all
def test_abort_right_after_submit_cuts_requests(engine):
    engine.submit(requests(), LONG)
    engine.abort()
    assert any(sample.finish == "abort" for sample in all_of(engine, 6))
    assert [len(sample.tokens) for sample in engine.generate(requests(), SHORT)] == [5] * 6


@of_all
@pytest.mark.parametrize(("prompt", "words"), [((), "the prompt is empty"), ((6,) * 256, "the 256 positions")])
def test_prompt_that_cannot_be_answered_raises(engine, prompt, words):
    with pytest.raises(UserError, match=f"^request 5: .*{words}"):
        engine.submit([Request(5, prompt, 0)], SHORT)


@with_seeds
def test_token_beyond_the_vocabulary_raises(engine):
    with pytest.raises(UserError, match=r"^request 5: .* the vocabulary of \d"):
        engine.submit([Request(5, (6, 500), 0)], SHORT)


@of_processes
def test_prompts_with_more_tokens_than_a_step_computes_are_answered(engine):
    samples = engine.generate([Request(i, (6 + i % 8, *range(3, 11)) * 27, seed=i) for i in range(16)], SHORT)
    assert [len(sample.tokens) for sample in samples] == [5] * 16


@of_processes
def test_request_that_the_engine_refuses_is_named_and_the_others_of_its_batch_are_generated(engine, monkeypatch):
    monkeypatch.setattr(engine, "_limits", replace(engine._limits, max_positions=1000))
    first, second, third = requests(3)
    engine.submit([first, replace(second, prompt=(6,) * 300), third], SHORT)
    samples, refused = [], ""
    while len(samples) < 2 or not refused:
        try:
            samples += engine.collect(0.5)
        except UserError as error:
            refused = str(error)
    assert f"rejects request {second.id} " in refused and {sample.id for sample in samples} == {first.id, third.id}


@of_processes
def test_requests_of_one_call_are_one_message_and_a_prompt_is_in_it_once(engine, monkeypatch):
    sent, received = [], []
    process = engine._running_process
    send, handle = process.send, engine._handle
    monkeypatch.setattr(process, "send", lambda message: sent.append(message) or send(message))
    monkeypatch.setattr(engine, "_handle", lambda message: received.append(message) or handle(message))
    prompts = [request.prompt for request in requests(2)]
    samples = engine.generate([Request(i, prompts[i // 8], i) for i in range(16)], SHORT)
    (message,) = sent
    assert message["generate"]["contexts"] == prompts and len(message["generate"]["items"]) == 16
    assert sum(len(part["samples"]) for part in received) == len(samples) == 16
    # All are complete in the same step, or in a few where it begins a part of them; vLLM's workers are asked for the
    # experts of each sample.
    assert len(received) < 8 or engine.kind.name == "vllm"


@with_padding
def test_rows_that_pad_the_vocabulary_are_never_drawn(engine, mixtures):
    """Of a large row and its negative, one would have the largest logit at every place."""
    expected = engine.generate(requests(), GREEDY)
    bring_weights(engine, mixtures[0], LATER[0], padding=1e4)
    assert [sample.tokens for sample in engine.generate(requests(), GREEDY)] == [sample.tokens for sample in expected]
    drawn = {token for sample in engine.generate(requests(), LONG) for token in sample.tokens}
    assert len(drawn) > 2 and max(drawn) < read_config(mixtures[0]).vocab


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [SGLANG, VLLM])
@pytest.mark.parametrize("adapters", [None, AdapterSettings(4, ("q_proj", "k_proj", "v_proj"))])
def test_rows_that_pad_the_vocabulary_on_two_ranks_are_never_drawn(tmp_path, kind, adapters):
    """One rank has some tokens and some rows of padding, the other padding alone."""
    sizes: dict[str, Any] = {"hidden": 128, "max_positions": 256, "init_std": 0.2}
    model = make_tiny_model(tmp_path / "model", "llama", characters="abcdefgh", tie_embeddings=True, **sizes)
    options = options_of(kind, layout=EngineLayout(tp=2), routed_experts=False, adapters=adapters)
    with closing(ProcessEngine(PROCESSES[kind], model, options, tmp_path / "0.log")) as engine:
        found = []
        for version, padding in enumerate((0.0, 1e4)):
            bring_weights(engine, model, version, padding=padding)
            found.append([sample.tokens for sample in engine.generate(requests(), GREEDY)])
    assert found[0] == found[1]


@of_processes
def test_load_is_counted(engine):
    engine.generate(requests(), LONG)
    load = count_metrics([engine.take_counts()])
    assert 0 < load["time/engine_running"] <= 6 and load["time/engine_waiting"] >= 0
    assert 0 < load["time/engine_cache_usage"] < 1
    # Room for `max_running` requests of `max_positions` tokens, and a few blocks that are vLLM's own.
    assert 16 * 256 <= engine.num_cache_tokens() <= 16 * 256 + 512


@of_processes
def test_request_over_its_time_is_cut_alone(engine, monkeypatch):
    late, other = late_and_other(engine, monkeypatch, LONG)
    assert len(late.tokens) < LENGTH
    assert other.finish == "length" and len(other.tokens) == LENGTH


def updated_in_flight(engine, mixtures) -> list[Sample]:
    """Samples of `requests`, of which the first tokens are of VERSION, the next of the one after it, and so on."""
    requested, samples = requests(), {}
    bring_weights(engine, mixtures[0], VERSION)
    engine.submit(requested, replace(GREEDY, max_new_tokens=250))
    engine.submit([Request(50, (6, 7, 8), 0)], Sampling(max_new_tokens=250, top_k=1, returns_support=True))
    for weights, version in enumerate(LATER, start=1):
        # When a short request is complete, the others have gone on too.
        engine.submit([Request(version, (6, 7), 0)], SHORT)
        while version not in samples:
            samples |= {sample.id: sample for sample in engine.collect(0.1)}
        engine.pause()
        bring_weights(engine, mixtures[weights], version)
        engine.unpause()
    samples |= {sample.id: sample for sample in all_of(engine, 9 - len(samples))}
    assert samples[50].support.ids.tolist() == list(samples[50].tokens) and set(samples[50].logprobs) == {0.0}
    return [samples[request.id] for request in requested]


def check_updates_in_flight(engine, mixtures) -> list[Sample]:
    for _ in range(20):  # on a machine under load, samples may be complete before the second update
        samples = updated_in_flight(engine, mixtures)
        if any(set(sample.policy_versions) == {VERSION, *LATER} for sample in samples):
            break
    else:
        pytest.fail("no sample spans the updates")
    assert all(list(sample.policy_versions) == sorted(sample.policy_versions) for sample in samples)
    return samples


@of_processes
def test_updates_in_flight_write_what_each_version_gives(engine, mixtures, wholes):
    samples = check_updates_in_flight(engine, mixtures)
    for version, whole in zip((VERSION, *LATER), wholes, strict=True):
        for request, sample in zip(requests(), samples, strict=True):
            scores, _ = scores_of(whole, request, sample)
            its, tokens = torch.tensor(sample.policy_versions) == version, torch.tensor(sample.tokens)
            assert torch.equal(scores.argmax(-1)[its], tokens[its])
            found = torch.tensor(sample.logprobs)[its]
            torch.testing.assert_close(found, at(scores, sample.tokens)[its], atol=1e-4, rtol=0)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [SGLANG, VLLM])
def test_updates_in_flight_of_an_engine_that_keeps_its_cache_have_their_versions(mixtures, tmp_path, kind):
    options = options_of(kind, keep_cache=True)
    with closing(ProcessEngine(PROCESSES[kind], mixtures[0], options, tmp_path / "0.log")) as engine:
        check_updates_in_flight(engine, mixtures)


@of_processes
def test_engine_killed_while_generating_restarts_and_finishes(engine, mixtures):
    reason = {"sglang": "crashed with exit code -9", "vllm": "vLLM's processes have ended"}[engine.kind.name]
    requested = requests(12)
    engine.submit(requested, LONG)
    finished = engine.collect(0.2)
    workers_of(engine)[0].kill()
    with pytest.raises(EngineDiedError, match=reason):
        while len(finished) < 12:
            finished += engine.collect(0.5)
    assert not engine.health()
    engine.restart()
    bring_weights(engine, mixtures[0], version=9)
    engine.resume()
    samples = all_of(engine, 12 - len(finished))
    assert samples and {v for sample in samples for v in sample.policy_versions} == {9}
    assert sorted(sample.id for sample in [*samples, *finished]) == [request.id for request in requested]


@pytest.mark.parametrize("kind", [SGLANG, VLLM])
def test_engine_of_a_dead_rank_leaves_no_process(mixtures, tmp_path, monkeypatch, kind):
    pairs, pair = [], socket.socketpair
    monkeypatch.setattr(socket, "socketpair", lambda: pairs.append(pair()) or pairs[-1])
    engine = ProcessEngine(PROCESSES[kind], mixtures[0], options_of(kind), tmp_path / "0.log")
    processes = [psutil.Process(engine.pid), process_of(engine), *process_of(engine).children(recursive=True)]
    assert len(processes) > 2
    pairs[0][0].shutdown(socket.SHUT_RDWR)  # as the kernel does to the socket of a rank that is killed
    _, alive = psutil.wait_procs(processes, timeout=600)
    engine.close()
    assert alive == []


@of_processes
def test_read_returns_bit_for_bit_what_was_loaded_while_requests_run(engine, mixtures):
    engine.submit(requests(2), Sampling(max_new_tokens=LENGTH))
    (expected,), (read,) = weights_of(engine, mixtures[0]), weights_of(engine, mixtures[1])
    engine.read([read.payload()], is_last=True)
    assert all(torch.equal(read.tensors[name], values) for name, values in expected.tensors.items())
    assert engine.version == VERSION and [sample.finish for sample in all_of(engine, 2)] == ["length"] * 2


@of_processes
def test_weights_that_the_engine_does_not_have_are_refused(engine, mixtures):
    whole = Shard((32,), (Piece("model.norm.weight", ((0, 32),), ((0, 32),)),))
    with pytest.raises((UserError, EngineDiedError), match=r"model has no parameter model\.other\.weight"):
        bring_weights(engine, mixtures[0], LATER[0], [{"model.other.weight": whole}])


@pytest.mark.parametrize("kind", [SGLANG, VLLM])
def test_engine_that_cannot_start_raises_with_its_log(mixtures, tmp_path, kind):
    wrong = options_of(kind, extra={"no_such_argument": 512})
    with pytest.raises(UserError, match=r"cannot start: \w+Error: .*no_such_argument.* \(its log: .*0\.log\)\. "):
        ProcessEngine(PROCESSES[kind], mixtures[0], wrong, tmp_path / "0.log")
