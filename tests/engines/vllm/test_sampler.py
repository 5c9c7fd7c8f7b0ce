"""Log-probabilities of the samplers of vLLM's two model runners, whose kernels Triton interprets."""

import importlib.util
import itertools
import json
import os
from typing import Any

import pytest
import torch

from tests.helpers import warm_start
from tests.helpers.internals import printed
from tests.helpers.launched import ROOT
from tests.helpers.second_runner import path_with_triton
from tests.helpers.traces import needs_vllm

TEMPERATURES = {"1": [1.0] * 3, "scaled": [0.7, 1.5, 0.7], "greedy": [0.0] * 3, "mixed": [0.0, 0.7, 1.0]}
ASKS = {"extra_args": {"returns_support": True}}
CANDIDATES: dict[str, list[dict[str, Any]]] = {
    "all": [{}, {}, {}],
    "cut": [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3, "top_k": 9}],
    # One of the excluded tokens is among the 36 likeliest of the 37.
    "asked": [
        {"top_k": 36, "logit_bias": {"5": -100.0, "7": -100.0}} | ASKS,
        {"top_p": 0.5},
        {"min_p": 0.1, "top_p": 0.7, "top_k": 9} | ASKS,
    ],
    "excluded": [{"logit_bias": {"5": -100.0, "7": -100.0}}, {}, {"top_p": 0.8}],
}
CASES = list(itertools.product(TEMPERATURES, CANDIDATES))
# Twice in an order in which each case follows others, with drafts once and without once.
ORDER = [*CASES, *CASES[::-1], CASES[0]]


@pytest.fixture(scope="module")
def sampled(tmp_path_factory) -> dict[str, Any]:
    """The steps of both runners; vLLM's environment has no Triton, that of the tests has."""
    path = path_with_triton(tmp_path_factory.mktemp("path"))
    steps = [
        [
            {key: value for key, value in cut.items() if t or key != "extra_args"} | {"temperature": t}
            for cut, t in zip(CANDIDATES[candidates], TEMPERATURES[name], strict=True)
        ]
        for name, candidates in ORDER
    ]
    variables = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([path, str(ROOT)])}
    return printed(warm_start.vllm().python, "tests.engines.vllm.sampler_probe", json.dumps(steps), env=variables)


def candidates_of(scores: torch.Tensor, cut: dict[str, Any]) -> torch.Tensor:
    """Which of the scores (n,) are of candidates, by min_p, top_k and top_p one after the other."""
    probs, order = scores.double().softmax(-1).sort(descending=True)
    kept = probs >= cut.get("min_p", 0.0) * probs[0]
    kept[cut.get("top_k", len(probs)) :] = False
    left = probs * kept / (probs * kept).sum()
    kept &= left.cumsum(0) - left < cut.get("top_p", 1.0)
    candidates = torch.zeros_like(kept).scatter(0, order, kept)
    candidates[[int(token) for token in cut.get("logit_bias", {})]] = False
    return candidates


@needs_vllm
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed; run tools/test.sh")
@pytest.mark.parametrize("runner", ["first", "second"])
def test_sampler_returns_the_distribution_that_the_request_wants(sampled, runner):
    num_asked = 0
    for (name, candidates), step in zip(ORDER, sampled[runner], strict=True):
        requests = zip(TEMPERATURES[name], CANDIDATES[candidates], strict=True)
        logits, drawn = torch.tensor(step["logits"]), torch.tensor(step["tokens"])
        logits, drawn, logprobs = logits.view(3, -1, logits.shape[1]), drawn.view(3, -1), torch.tensor(step["logprobs"])
        columns = (requests, logits, drawn, logprobs.view(3, -1), step["candidates"])
        for (temperature, cut), rows, tokens, found, taken in zip(*columns, strict=True):
            rows, tokens, found = rows[tokens >= 0], tokens[tokens >= 0], found[tokens >= 0]
            for token, bias in cut.get("logit_bias", {}).items():
                rows[:, int(token)] += bias
            ranks = (rows > rows.gather(1, tokens[:, None])).sum(-1)
            assert len(tokens) and (ranks < (cut.get("top_k", rows.shape[1]) if temperature else 1)).all()
            scores = rows / (temperature or 1.0)
            # Not with drafts, which jobs refuse.
            if "extra_args" in cut and temperature and logits.shape[1] == 1:
                inside = candidates_of(scores[0], cut)
                assert taken == inside.nonzero()[:, 0].tolist()
                scores, num_asked = scores.where(inside, -torch.inf), num_asked + 1
            else:
                assert taken is None
            expected = scores.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
            torch.testing.assert_close(found, expected, msg=f"{name}, {candidates}: {found} {expected}")
    assert num_asked > 4
