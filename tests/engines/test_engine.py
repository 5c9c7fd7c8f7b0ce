"""Counters of engines: from SGLang's fields to metrics."""

import os

import pytest

from tests.helpers import warm_start
from tests.helpers.internals import printed
from tests.helpers.traces import needs_sglang
from verl_mg.engines.engine import ACCEPTED, CACHED, DRAFTED, GENERATED, PROMPT, VERIFIED, count_metrics
from verl_mg.engines.sglang.arguments import ON_CPU
from verl_mg.engines.sglang.host import parse_response


def response(**meta: object) -> dict[str, object]:
    common = {"output_token_logprobs": [], "finish_reason": {"type": "stop"}}
    return {"output_ids": [], "meta_info": common | meta}


@needs_sglang
def test_counts_of_speculative_decoding_are_those_of_sglang():
    meta = printed(warm_start.sglang().python, "tests.engines.sglang.counts_probe", env=os.environ | ON_CPU)
    counts = parse_response(response(prompt_tokens=20, cached_tokens=15, completion_tokens=12, **meta), 0)["counts"]
    assert counts == {PROMPT: 20, CACHED: 15, DRAFTED: 15, ACCEPTED: 7, VERIFIED: 5, GENERATED: 12}
    metrics = count_metrics([counts, {PROMPT: 10, CACHED: 0}])
    assert metrics == {
        "time/prompt_cache_hits": pytest.approx(0.5),
        "time/draft_acceptance": pytest.approx(7 / 15),
        "time/draft_tokens_per_step": pytest.approx(12 / 5),
    }


def test_counts_of_an_engine_without_any_are_no_metrics():
    assert count_metrics([{}, {}]) == {}
    assert parse_response(response(), 0)["counts"] == {PROMPT: 0, CACHED: 0}
