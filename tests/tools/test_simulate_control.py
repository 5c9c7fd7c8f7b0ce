"""Tests of the figures of large jobs: what a rank of 1,024 may need, and that figures follow the layout."""

import pytest

from tools.bench.simulate_control import CONFIG, SimulatedJob
from verl_mg.layout import EngineLayout, Layout
from verl_mg.models.hf_config import read_config
from verl_mg.sharding.weight_table import weight_table


def simulated(ranks: int) -> SimulatedJob:
    layout, engines = Layout.parse("tp8-pp16-ep8-etp1"), EngineLayout.parse("tp32-ep32-adp32")
    return SimulatedJob(weight_table(read_config(CONFIG)), ranks, layout, engines)


@pytest.mark.nightly
def test_job_of_1024_ranks_needs_little_around_its_computation() -> None:
    figures = simulated(1024).figures()
    assert 1 < figures.groups <= 40
    assert 32 <= figures.sync_peers < 60
    assert 0 < figures.store_requests < 2000
    assert 163 * 3 < figures.files_of_resume < figures.files_at_start
    assert figures.files_at_start + figures.files_of_checkpoint + figures.files_of_resume < 10_000
    assert 0 < figures.row_mb_computed <= figures.row_mb_received <= 4 * figures.row_mb_computed
    assert 0 < figures.row_mb_sent <= 4 * figures.row_mb_computed
