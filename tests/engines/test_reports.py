"""What an engine reports is refused where it cannot be true: one planted fault at a time."""

import base64
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from verl_mg.batch import Batch
from verl_mg.engines import fed_tokens
from verl_mg.engines.engine import ACCEPTED, DRAFTED, PROMPT, RUNNING, Request, Sample, Sampling
from verl_mg.engines.reports import ReportRules
from verl_mg.engines.sampled_support import support_to_wire, top_to_wire
from verl_mg.errors import UserError
from verl_mg.megatron.routing import check_routed_experts
from verl_mg.models.attention_config import IndexerConfig
from verl_mg.models.hf_config import read_config
from verl_mg.models.tiny_model import make_tiny_model

NEWEST = 6
SAMPLING = Sampling(max_new_tokens=6, stop_token_ids=(9,))
PARTIAL = Sample(7, (2, 3), (-1.0, -2.0), (4, 5), "abort")
REQUEST = Request(7, (1, 1, 1), seed=0, partial=PARTIAL)
VALID = Sample(7, (4, 5, 9), (-0.5, 0.0, 1e-6), (5, 5, 6), "stop")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model with a dense layer, and another one with 4 experts, of which a token has 2."""
    return read_config(make_tiny_model(tmp_path_factory.mktemp("model"), "deepseek_v3", dense_layers=1, layers=2))


@pytest.fixture
def rules(model):
    return ReportRules.of_model("rollout.engine=sglang", model, routed=True)


@pytest.mark.parametrize(
    "report",
    [
        VALID,
        replace(VALID, finish="length", tokens=(4, 5, 5)),
        Sample(7, (), (), (), "abort"),
        Sample(7, (), (), (), "length"),
        replace(VALID, logprobs=(-0.5, 0, -900.0)),
    ],
)
def test_check_of_a_valid_report_returns_it(rules, report):
    assert rules.check(REQUEST, SAMPLING, report, NEWEST) is report


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"finish": "eos"}, "ended with 'eos'"),
        ({"logprobs": (-0.5, -0.5)}, "has 3 tokens, 2 log-probs and 3 versions"),
        ({"policy_versions": (5, 5, 5, 5)}, "3 log-probs and 4 versions"),
        ({"tokens": (4,) * 5, "logprobs": (-1.0,) * 5, "policy_versions": (5,) * 5}, "has 5 new tokens, and 4 were"),
        ({"tokens": (), "logprobs": (), "policy_versions": ()}, "ended with 'stop' and has no token"),
        ({"tokens": (4, 10_000, 9)}, "has the token 10000, which is not in the vocabulary of"),
        ({"tokens": (-1, 4, 9)}, "has the token -1"),
        ({"tokens": (4, "5", 9)}, "has the token '5'"),
        ({"tokens": (9, 4, 5)}, "continues after a token that ends it"),
        ({"logprobs": (-0.5, math.nan, -0.5)}, "has the log-prob nan for its token 1"),
        ({"logprobs": (-math.inf, -0.5, -0.5)}, "has the log-prob -inf for its token 0"),
        ({"logprobs": (-0.5, -0.5, 0.25)}, "has the log-prob 0.25 for its token 2"),
        ({"logprobs": (-0.5, None, -0.5)}, "has the log-prob None for its token 1"),
        ({"policy_versions": (5, 6, 7)}, "has tokens of the versions 5, 6, 7 of the weights, after 5, and 6 were sent"),
        ({"policy_versions": (6, 5, 6)}, "versions 6, 5 of the weights"),
        ({"policy_versions": (4, 5, 6)}, "versions 4, 5, 6 of the weights, after 5"),
        ({"policy_versions": (-1, -1, -1)}, "versions -1 of the weights"),
    ],
)
def test_check_of_a_wrong_report_raises_one_line_with_the_engine_and_a_remedy(rules, fault, message):
    with pytest.raises(UserError) as error:
        rules.check(REQUEST, SAMPLING, replace(VALID, **fault), NEWEST)
    text = str(error.value)
    assert text.startswith("rollout.engine=sglang: sample 7 ") and message in text
    assert text.endswith(".") and "\n" not in text and text.count(". ") >= 1


def encoded(chosen: object) -> str:
    return base64.b64encode(np.asarray(chosen, dtype=np.int32).tobytes()).decode()


def test_read_experts_of_a_valid_report_keeps_them(rules):
    chosen = [[[0, 0], [1, 3]], [[0, 0], [2, 0]]]  # nothing is chosen in the dense layer
    read = rules.read_experts(7, encoded(chosen), 2, True)
    assert read.dtype is torch.int16 and read.tolist() == chosen
    assert rules.read_experts(7, None, 2, False) is None
    assert replace(rules, experts=None).read_experts(7, encoded(chosen), 2, True) is None


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (None, "has no experts of its tokens"),
        ([[[0, 0], [1, 3]]], r"has 4 numbers of experts, and 2 x 2 x 2 \(tokens, layers, experts\) were expected"),
        ([[[0, 0], [0, 0]]] * 2, "has expert 0 more than once for token 0 in layer 1"),
        ([[[0, 0], [1, 0]], [[0, 0], [3, 3]]], "has expert 3 more than once for token 1 in layer 1"),
        ([[[0, 0], [1, 0]], [[0, 0], [3, 4]]], "has the experts 0 to 4, and the model has 4"),
        ([[[0, 0], [1, -1]], [[0, 0], [3, 2]]], "has the experts -1 to 3"),
    ],
)
def test_read_experts_of_a_wrong_report_raises_one_line_with_the_engine(rules, chosen, message):
    text = None if chosen is None else encoded(chosen)
    with pytest.raises(UserError, match=f"^rollout.engine=sglang: sample 7 {message}"):
        rules.read_experts(7, text, 2, True)


KEYS = [[[0, -1], [-1, 9]], [[1, 0], [0, 1]], [[0, 2], [2, 1]], [[3, 1], [0, 1]]]
"""Of four tokens in two layers; the first two attend to all keys, whatever is reported."""


@pytest.mark.parametrize("chunk", [2**27, 1])
def test_read_keys_of_a_valid_report_has_the_bits_of_tokens_with_more_than_all(rules, monkeypatch, chunk):
    monkeypatch.setattr(fed_tokens, "CHUNK_BYTES", chunk)
    keys = with_indexers(rules).read_keys(7, encoded(KEYS), 4, True)
    assert keys.sizes.tolist() == [0, 0, 1, 1] and keys.sizes.dtype is torch.int32
    assert keys.entries.tolist() == [[0b101, 0b110], [0b1010, 0b11]] and keys.entries.dtype is torch.uint8
    assert with_indexers(rules).read_keys(7, None, 0, False) is None and rules.read_keys(7, None, 4, True) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, "has no selected keys of its tokens"),
        (
            lambda keys: keys[:3],
            r"has 12 numbers of selected keys, and 4 x 2 x 2 \(tokens, layers, selected keys\) were",
        ),
        (lambda keys: [*keys[:3], [[3, 4], [0, 1]]], "has the selected keys 0 to 4 of token 3"),
        (lambda keys: [*keys[:2], [[0, -1], [2, 1]], keys[3]], "has the selected keys -1 to 2 of token 2"),
        (lambda keys: [*keys[:3], [[3, 1], [1, 1]]], "has the same selected key more than once for token 3"),
    ],
)
def test_read_keys_of_a_wrong_report_raises_one_line_with_the_engine(rules, change, message):
    text = change and encoded(change(KEYS))
    with pytest.raises(UserError, match=f"^rollout.engine=sglang: sample 7 {message}.*replay_selections=false"):
        with_indexers(rules).read_keys(7, text, 4, True)


def with_indexers(rules):
    indexer = IndexerConfig(heads=1, head_dim=2, top_k=2, interleaved=True, sources=(0, 1))
    return replace(rules, layers=2, indexer=indexer)


SUPPORT = ([[4, 7], [5], [1, 9, 3]], (4, 5, 9))
"""Candidates, and the drawn tokens."""


def test_read_support_of_a_valid_report_keeps_it(rules):
    support = rules.read_support(7, support_to_wire(SUPPORT[0]), SUPPORT[1])
    assert support.sizes.tolist() == [2, 1, 3] and support.ids.tolist() == [4, 7, 5, 1, 9, 3]
    assert len(rules.read_support(7, None, ()).sizes) == 0


@pytest.mark.parametrize(
    ("candidates", "message"),
    [
        (None, "has no candidates of its tokens"),
        (SUPPORT[0][:2], "has 3 tokens, candidates of 2 tokens, and 3 of 3 ids"),
        ([[4, 7], [], [9]], "has 3 tokens, candidates of 3 tokens"),
        ([[4, 7], [5], [1, 10_000, 9]], "has the candidates 1 to 10000, and the vocabulary has"),
        ([[4, 7], [5], [-1, 9]], "has the candidates -1 to 9"),
        ([[4, 7], [6], [1, 9, 3]], "has a token that is not one, or not once, among its candidates"),
        ([[4, 7], [5], [9, 9]], "has a token that is not one, or not once, among its candidates"),
    ],
)
def test_read_support_of_a_wrong_report_raises_one_line_with_the_engine(rules, candidates, message):
    wire = None if candidates is None else support_to_wire(candidates)
    with pytest.raises(UserError, match=f"^rollout.engine=sglang: sample 7 {message}"):
        rules.read_support(7, wire, SUPPORT[1])


def test_read_top_of_a_valid_report_is_as_wide_as_asked_for(rules):
    wire = top_to_wire([[(-0.5, 3), (-1.0, 2)], [(0.0, 4)]], 2)
    top = rules.read_top(7, wire, 2, 2)
    assert top.dtype is torch.float32
    assert top.tolist() == [[[-0.5, -1.0], [3, 2]], [[0.0, -math.inf], [4, 0]]]
    assert rules.read_top(7, None, 0, 2).shape == (0, 2, 2)
    (wide,) = replace(rules, vocab=2).read_top(7, top_to_wire([[(-0.5, 1), (-1.0, 0)]], 2), 1, 3)
    assert wide.tolist() == [[-0.5, -1.0, -math.inf], [1, 0, 0]]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (None, "has no likeliest tokens"),
        ([[(-0.5, 3)]], "has 2 log-probs and 2 ids as the 2 likeliest of 2 tokens"),
        ([[(-1.0, 3), (-0.5, 2)], [(0.0, 4)]], "has log-probs of likeliest tokens that do not fall"),
        ([[(-0.1, 3), (-0.1, 2)], [(0.0, 4)]], "that do not fall, or are of more than 1"),
        ([[(math.nan, 3)], [(0.0, 4)]], "that do not fall, or are of more than 1"),
        ([[(-0.5, 3)], [(0.0, 10_000)]], "has the likeliest tokens 0 to 10000, and the vocabulary has"),
    ],
)
def test_read_top_of_a_wrong_report_raises_one_line_with_the_engine(rules, entries, message):
    with pytest.raises(UserError, match=f"^rollout.engine=sglang: sample 7 .*{message}"):
        rules.read_top(7, None if entries is None else top_to_wire(entries, 2), 2, 2)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({PROMPT: -1}, "it counts -1 prompt tokens"),
        ({RUNNING: 1.5}, "it counts 1.5 running requests"),
    ],
)
def test_check_counts_of_impossible_ones_raises(rules, counts, message):
    with pytest.raises(UserError, match=f"^rollout.engine=sglang: {message}"):
        rules.check_counts(counts)


def test_check_counts_of_possible_ones_returns_them(rules):
    # 7 tokens that were accepted at once where SGLang was started with 3 draft tokens of each verification.
    counts = {PROMPT: 3, DRAFTED: 3, ACCEPTED: 7, RUNNING: 0}
    assert rules.check_counts(counts) == counts


def test_check_routed_experts_with_an_expert_twice_raises(model):
    batch = Batch.from_rows([(1, 2)])
    batch["routed_experts"] = torch.tensor([[[0, 0], [1, 2]], [[0, 0], [-1, -1]]], dtype=torch.int16)
    check_routed_experts(batch, model)
    batch["routed_experts"] = torch.tensor([[[0, 0], [1, 2]], [[0, 0], [2, 2]]], dtype=torch.int16)
    with pytest.raises(UserError, match="token 1 has expert 2 more than once in layer 1"):
        check_routed_experts(batch, model)
