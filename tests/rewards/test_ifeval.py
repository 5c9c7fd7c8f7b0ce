"""Verifiable instructions: hand-made responses, and the figures of the package itself."""

import pytest

from verl_mg.errors import UserError
from verl_mg.rewards import Sample, ifeval, load_reward
from verl_mg.rewards.worker_pool import shared_pool

package = pytest.importorskip("if_verifiable")

RECORD = {
    "key": 1,
    "prompt": "Write about rain.",
    "instruction_id_list": [
        "punctuation:no_comma",
        "keywords:existence",
        "detectable_format:number_highlighted_sections",
    ],
    # As Parquet has them: each with the fields of all others.
    "kwargs": [
        {"keywords": None},
        {"keywords": ["rain"], "num_highlights": None},
        {"num_highlights": 1, "keywords": None},
    ],
}
RESPONSES = {
    "It is *rain* again.": (1, 1, 1, 1),
    "Sure, here it is:\nIt is *rain* again.": (0, 1, 2 / 3, 1),
    "It is, or was, snow.": (0, 0, 0, 0),
    "": (0, 0, 0, 0),
}


@pytest.mark.parametrize("response", RESPONSES)
def test_score_has_both_levels_strict_and_loose(response):
    sample = Sample("p", response, None, RECORD, "stop")
    for level in ("prompt", "instruction"):
        for mode in ("strict", "loose"):
            reward = load_reward("verl_mg.rewards.ifeval:Score", {"level": level, "mode": mode})(sample)
            assert reward.value == reward.parts[f"{level}_{mode}"]
    parts = [
        reward.parts[name] for name in ("prompt_strict", "prompt_loose", "instruction_strict", "instruction_loose")
    ]
    assert parts == pytest.approx(RESPONSES[response])
    _, scores = package.evaluate_output_for_sample(
        "ifeval", package.IFEvalSample(1, RECORD["prompt"], RECORD["instruction_id_list"], RECORD["kwargs"]), response
    )
    assert parts == [scores.binary_strict, scores.binary_loose, scores.partial_strict, scores.partial_loose]


def test_records_and_options_that_cannot_be_scored_are_refused():
    score = load_reward("verl_mg.rewards.ifeval:Score")
    with pytest.raises(UserError, match="has no instruction_id_list with as many kwargs"):
        score(Sample("p", "r", None, {"instruction_id_list": ["a"], "kwargs": []}, "stop"))
    with pytest.raises(UserError, match="no:such is no instruction of ifeval"):
        names = ["no:such", "punctuation:no_comma"]
        score(Sample("p", "r", None, {"instruction_id_list": names, "kwargs": [{}, {}]}, "stop"))
    with pytest.raises(UserError, match="mode 'lax' is unknown. Write strict or loose"):
        load_reward("verl_mg.rewards.ifeval:Score", {"mode": "lax"})
    with pytest.raises(UserError, match=r"instructions keywords:existence of the prompt '' .* Correct their kwargs"):
        names = ["keywords:existence"]
        score(Sample("p", "r", None, {"instruction_id_list": names, "kwargs": [{"no": "such"}]}, "stop"))


def test_score_of_a_response_that_the_package_searches_for_too_long_is_0(monkeypatch):
    record = {"instruction_id_list": ["detectable_format:number_bullet_lists"], "kwargs": [{"num_bullets": 2}]}
    sample = Sample("p", "* a\n* b" + "\n" * 40_000 + "x", None, record, "stop")  # the square of line ends: seconds
    function = "verl_mg.rewards.ifeval:_evaluate"
    pool = shared_pool(function, ifeval.WORKERS, ifeval.SECONDS, ("if_verifiable.ifeval",))
    assert pool.score("ifeval", "p", *record.values(), "* a\n* b") is not None  # a worker has started
    monkeypatch.setattr(pool, "seconds", 0.5)
    reward = load_reward("verl_mg.rewards.ifeval:Score")(sample)
    assert (reward.value, set(reward.parts.values())) == (0.0, {0.0})
