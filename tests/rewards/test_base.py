"""A reward function is found by name, and only finite numbers come out of it."""

from pathlib import Path

import pytest

from verl_mg.errors import UserError
from verl_mg.rewards import Reward, Sample, exact, load_reward

SAMPLE = Sample("1+1=", " 2\n", "2", {"level": 3}, "stop")

REWARDS = """\
from __future__ import annotations
from dataclasses import dataclass
import numpy
from verl_mg.rewards import Reward

@dataclass
class Settings:
    scale: float = 2

def scaled(sample): return Settings().scale * sample.record["level"]
def truth(sample): return sample.response.strip() == sample.answer
def parts(sample): return Reward(0.5, {"format": True})
def numpy_number(sample): return numpy.float32(0.25)
def nothing(sample): pass
def not_a_number(sample): return float("nan")
def infinite_part(sample): return Reward(1.0, {"style": float("inf")})
def failing(sample): return sample.record["missing"]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(REWARDS)
    return path


@pytest.mark.parametrize(
    ("function", "reward"),
    [
        ("scaled", Reward(6.0)),
        ("truth", Reward(1.0)),
        ("parts", Reward(0.5, {"format": 1.0})),
        ("numpy_number", Reward(0.25)),
    ],
)
def test_numbers_become_rewards(file: Path, function: str, reward: Reward) -> None:
    result = load_reward(f"{file}:{function}")(SAMPLE)
    assert result == reward
    assert type(result.value) is float


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("nothing", ":nothing' returned None"),
        ("not_a_number", ":not_a_number' returned nan"),
        ("infinite_part", r":infinite_part \(style\)' returned inf"),
        ("failing", ":failing' raised KeyError: 'missing'"),
    ],
)
def test_bad_results_are_named(file: Path, function: str, reason: str) -> None:
    reward = load_reward(f"{file}:{function}")
    with pytest.raises(UserError, match=reason):
        reward(SAMPLE)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("verl_mg.rewards.exact", "package.module:function"),
        ("verl_mg.rewards.exact:", "package.module:function"),
        ("verl_mg.rewards.exact:scroe", "no function 'scroe'; write one of: score"),
        ("verl_mg.rewards.exakt:score", "ModuleNotFoundError: No module named 'verl_mg.rewards.exakt'"),
        ("nowhere/own.py:score", "FileNotFoundError"),
    ],
)
def test_bad_names(name: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        load_reward(name)


def test_broken_file(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(UserError, match="ZeroDivisionError: division by zero"):
        load_reward(f"{tmp_path}/broken.py:score")


def test_module_by_name() -> None:
    assert load_reward("verl_mg.rewards.exact:score")(SAMPLE) == exact.score(SAMPLE)
