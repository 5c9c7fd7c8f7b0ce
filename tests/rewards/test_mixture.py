"""Weighted mixtures of rewards, and edits of the weights file during a run."""

import os
from pathlib import Path

import pytest

from verl_mg.config import EvaluationConfig, RewardConfig, load_config
from verl_mg.errors import UserError
from verl_mg.rewards import Mixture, Reward

REWARDS = {"math": Reward(1.0, {"correct": 1.0}, "7"), "style": Reward(0.5)}


def test_combine_returns_the_weighted_sum_and_parts():
    mixture = Mixture({"style": 2.0, "math": 0.25})
    combined = mixture.combine(REWARDS)
    assert combined == Reward(1.25, {"style": 0.5, "math": 1.0, "math/correct": 1.0}, "7")
    mixture.use({"math": 0})
    assert mixture.weights == {"style": 2.0, "math": 0.0}
    assert mixture.combine(REWARDS).value == 1.0


def test_combine_of_rewards_by_agent_is_by_agent():
    style = Reward.by_agent({"critic": Reward(2.0), "solver": Reward(4.0, {"form": 3.0})})
    combined = Mixture({"style": 0.5, "math": 1.0}).combine(REWARDS | {"style": style})
    critic = Reward(2.0, {"style": 2.0, "math": 1.0, "math/correct": 1.0}, "7")
    solver = Reward(3.0, {"style": 4.0, "style/form": 3.0, "math": 1.0, "math/correct": 1.0}, "7")
    assert combined == Reward(2.5, agents={"critic": critic, "solver": solver})
    others = {"style": style, "math": Reward.by_agent({"judge": Reward(1.0)})}
    with pytest.raises(UserError, match=r"different agents \(critic, judge, solver\)"):
        Mixture({"style": 0.5, "math": 1.0}).combine(others)


@pytest.mark.parametrize(
    ("weights", "reason"),
    [({"maths": 1.0}, "no reward is named 'maths'. Write one of: math, style"), ({"math": float("inf")}, "is inf")],
)
def test_use_invalid_weights_raises(weights, reason):
    with pytest.raises(UserError, match=reason):
        Mixture({"math": 1.0, "style": 1.0}).use(weights)


class Watched:
    """A mixture with a file, edited as a user would, and what was reported."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.lines: list[str] = []
        self.mixture = Mixture({"math": 1.0, "style": 1.0}, file, self.lines.append)
        self._edits = 0

    def edit(self, text: str) -> dict[str, float]:
        self.file.write_text(text)
        self._edits += 1
        os.utime(self.file, (self._edits, self._edits))
        return self.mixture.refresh()


@pytest.mark.parametrize(("name", "first"), [("w.json", '{"math": 3}'), ("w.yaml", "math: 3"), ("w", "math: 3")])
def test_refresh_changed_file_is_read(tmp_path, name, first):
    watched = Watched(tmp_path / name)
    assert watched.edit(first) == {"math": 3.0, "style": 1.0}
    assert watched.mixture.weights == {"math": 1.0, "style": 1.0}  # before `use`
    watched.mixture.use({"math": 3.0, "style": 1.0})
    assert watched.edit('{"style": -0.5}') == {"math": 3.0, "style": -0.5}
    assert watched.lines == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"math": ', "neither JSON nor YAML"),
        ("{'a': [}", "neither JSON nor YAML"),
        ("\udcff", "neither JSON nor YAML"),
        ("[" * 100_000, "neither JSON nor YAML"),
        ('{"math": 2, "maths": 1}', "no reward is named 'maths'"),
        ('{"math": NaN}', "the weight of 'math' is nan"),
        ('{"math": Infinity}', "the weight of 'math' is inf"),
        ('{"math": "2"}', "the weight of 'math' is '2'"),
        ('{"math": true}', "the weight of 'math' is True"),
        ("[1, 2]", "Write a mapping"),
        ("", "neither JSON nor YAML"),
    ],
)
def test_refresh_invalid_file_is_reported_once_and_ignored(tmp_path, text, reason):
    watched = Watched(tmp_path / "weights.json")
    good = watched.edit('{"math": 4}')
    watched.file.write_bytes(text.encode(errors="surrogateescape"))
    assert watched.mixture.refresh() == watched.mixture.refresh() == good
    assert len(watched.lines) == 1
    assert reason in watched.lines[0]
    assert str(watched.file) in watched.lines[0]
    assert "\n" not in watched.lines[0]
    assert watched.edit('{"math": 5}')["math"] == 5.0


def test_refresh_missing_file_is_reported_once(tmp_path):
    watched = Watched(tmp_path / "weights.yaml")
    assert watched.mixture.refresh() == watched.mixture.refresh() == {"math": 1.0, "style": 1.0}
    assert len(watched.lines) == 1
    assert watched.edit("math: 2")["math"] == 2.0


def test_refresh_default_report_is_a_warning(tmp_path):
    mixture = Mixture({"math": 1.0}, tmp_path / "missing.json")
    with pytest.warns(UserWarning, match="cannot be read"):
        mixture.refresh()


CONFIG = """\
model: {path: m}
data: {train: t}
reward:
  mixture:
    math: {function: "verl_mg.rewards.math:score"}
    form: {function: "verl_mg.rewards.regex_format:RegexFormat", options: {hit: 2}, weight: 0.1}
  weights_file: weights.json
"""


def test_config_mixture_is_parsed(tmp_path):
    (tmp_path / "c.yaml").write_text(CONFIG)
    reward = load_config(tmp_path / "c.yaml", [], EvaluationConfig).reward
    assert {name: part.weight for name, part in reward.mixture.items()} == {"math": 1.0, "form": 0.1}
    assert reward.weights_file == Path("weights.json")
    assert RewardConfig().mixture == {}


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("reward.mixture.form.weight=.nan", "finite"),
        ("reward.options.a=1", "reward.options has no effect with a mixture"),
        ("reward.mixture={}", "requires reward.mixture"),
        ("reward.mixture.form.wieght=1", "reward.mixture.form.wieght: unknown key"),
        ("reward.workers=0", "reward.workers"),
    ],
)
def test_config_invalid_mixture_raises(tmp_path, override, reason):
    (tmp_path / "c.yaml").write_text(CONFIG)
    with pytest.raises(UserError, match=reason):
        load_config(tmp_path / "c.yaml", [override], EvaluationConfig)
