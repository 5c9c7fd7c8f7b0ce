"""The plan's predicted speeds against published figures: the errors that the planner states are those that it has."""

import statistics
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tools.calibrate_plan import BOUNDS, error, fit, plan_inputs, predict, read_rows
from verl_mg.models.flops import row_flops
from verl_mg.planner.efficiency import CALIBRATION, FITTED

ROWS = read_rows()
IN_FIT = [row for row in ROWS if row.fitted]
OTHERS = [row for row in ROWS if not row.fitted]
ITERATIONS = [row for row in IN_FIT if row.kind == "iteration"]


def median(rows) -> float:
    return statistics.median(abs(error(row, FITTED)) for row in rows)


def test_error_median_of_whole_iterations_is_below_a_quarter():
    """Tokens per second and GPU; of releases that the constants are fitted on, and of those that they are not."""
    assert len(ITERATIONS) >= 12 and median(ITERATIONS) < 0.25
    assert len(OTHERS) >= 12 and median(OTHERS) < 0.25


def test_calibration_states_the_errors_that_the_constants_have():
    worst = max(IN_FIT, key=lambda row: abs(error(row, FITTED)))
    assert (len(IN_FIT), len(OTHERS)) == (CALIBRATION.rows, CALIBRATION.others)
    assert median(IN_FIT) == pytest.approx(CALIBRATION.median, abs=5e-4)
    assert median(OTHERS) == pytest.approx(CALIBRATION.others_median, abs=5e-4)
    assert abs(error(worst, FITTED)) == pytest.approx(CALIBRATION.worst, abs=5e-4)
    assert worst.values["model"].replace("_", "-").lower() in CALIBRATION.worst_row.lower()
    assert f"{worst.values['gpus']} {worst.values['gpu'].upper()}" in CALIBRATION.worst_row


def test_fitted_constants_are_physically_possible():
    for name, value in asdict(FITTED).items():
        low, high = BOUNDS[name]
        assert low <= value <= high, name


@pytest.mark.parametrize("row", ITERATIONS, ids=lambda row: row.name)
def test_rows_published_seconds_agree_with_published_rate(row):
    """Rate = samples x (prompt + mean response) / seconds / GPUs: a digit that was copied wrong breaks it."""
    v = row.values
    rate = v["samples"] * (v["mean"] + v["prompt"]) / v["seconds"] / v["gpus"]
    assert rate == pytest.approx(v["tokens_per_second_per_gpu"], rel=0.12)


def test_predict_training_rate_equals_flops_per_second_of_the_devices():
    """The rate times the FLOPs of a token, three times a forward pass, is at most the GPU's peak of FP8 or bf16."""
    for row in (row for row in ROWS if row.kind == "training"):
        inputs = plan_inputs(row, FITTED)
        flops = 3 * row_flops(inputs.weights.config, inputs.weights.tensor_index)(inputs.sequence) / inputs.sequence
        assert 0.02 < predict(row, FITTED) * flops / 1e12 / (2 * inputs.flops) < 1


@pytest.mark.nightly
def test_fit_from_elsewhere_finds_constants_as_good():
    start = replace(FITTED, gemm=0.65, decode_step=5e-3, imbalance=1.1, elementwise=2.0)
    found = fit(IN_FIT, start)
    assert statistics.median(abs(error(row, found)) for row in IN_FIT) < CALIBRATION.median + 0.03


@pytest.mark.parametrize(
    "rows",
    [
        *([row for row in IN_FIT if row.source == source] for source in ("nemo-rl-0.7", "megatron-bridge", "verl")),
        [row for row in IN_FIT if row.kind == "sync"],
        IN_FIT,
        OTHERS,
    ],
    ids=lambda rows: f"{rows[0].source} {len(rows)}",
)
def test_page_states_the_errors_that_the_constants_have(rows):
    sizes = sorted(abs(error(row, FITTED)) for row in rows)
    third, worst = sizes[3 * len(sizes) // 4], sizes[-1]
    cells = f"| {len(rows)} | {statistics.median(sizes):.0%} | {third:.0%} | {worst:.0%} |"
    assert cells in (Path(__file__).parents[2] / "docs" / "choosing_a_layout.md").read_text()
