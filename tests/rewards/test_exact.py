"""Reward for a response that equals the answer."""

import pytest

from verl_mg.rewards import Sample
from verl_mg.rewards.exact import score


@pytest.mark.parametrize(
    ("response", "answer", "value"),
    [(" yes\n", "yes ", 1.0), ("Yes", "yes", 0.0), ("y es", "yes", 0.0), ("", None, 0.0), ("1.0", "1", 0.0)],
)
def test_score_compares_characters_without_surrounding_space(response: str, answer: str | None, value: float) -> None:
    assert score(Sample("p", response, answer, {}, "stop")).value == value
