"""Reward for the format of a response."""

import pytest

from verl_mg.errors import UserError
from verl_mg.rewards import Reward, Sample, load_reward
from verl_mg.rewards.regex_format import RegexFormat


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("<think>a\nb</think>\n<answer>4</answer>\n", 1.0),
        ("<think>a</think> and <answer>4</answer>", 0.0),
        ("<answer>4</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_score_default_pattern_requires_thinking_before_answering(response: str, value: float) -> None:
    assert RegexFormat().score(Sample("p", response, None, {}, "stop")) == Reward(value, {"form": value})


def test_regex_format_options_set_pattern_and_rewards() -> None:
    reward = load_reward("verl_mg.rewards.regex_format:RegexFormat", {"pattern": "[a-z]+", "hit": 0.5, "miss": -0.5})
    assert [reward(Sample("p", text, None, {}, "stop")).value for text in ("abc", "abc1")] == [0.5, -0.5]
    with pytest.raises(UserError, match=r"pattern: '\(' is not a regular expression"):
        load_reward("verl_mg.rewards.regex_format:RegexFormat", {"pattern": "("})
