"""Tests of the benchmark of resharding: every case and every method that it compares with, on a small model."""

import re

import pytest

from tests.tools.tool import tool


@pytest.mark.nightly
def test_bench_reshard_of_all_cases_receives_the_lower_bound() -> None:
    printed = tool("bench.bench_reshard", "--parameters", "5", "--repeats", "1")
    rows = re.findall(r"^(\S+) +(ours|gather|megatron\S*) +([\d.]+) +[\d.]+ +([\d.]+) ", printed, re.M)
    assert {case for case, *_ in rows} == {"dense-tp4", "dense-tp2", "moe", "dense-megatron", "moe-megatron"}
    assert len(rows) == 10
    for _, method, received, least in rows:
        assert float(received) == float(least) if method == "ours" else float(received) >= float(least)
