"""Rewards are loaded by name with options, and only finite numbers are accepted from them."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from verl_mg.errors import UserError
from verl_mg.rewards import Reward, Sample, load_reward

SAMPLE = Sample("1+1=", " 2\n", "2", {"level": 3}, "stop")

REWARDS = """\
from __future__ import annotations
from dataclasses import dataclass
import numpy
from verl_mg.rewards import Reward

@dataclass
class Settings:
    scale: float = 2

def agents(sample): return {"solver": True, "critic": Reward(0.5, {"form": 1})}
def no_agent(sample): return {}
def missing_number(sample): return {"solver": 1.0, "critic": None}
def scaled(sample): return Settings().scale * sample.record["level"]
def truth(sample): return sample.response.strip() == sample.answer
def parts(sample): return Reward(0.5, {"format": True})
def numpy_number(sample): return numpy.float32(0.25)
def nothing(sample): pass
def not_a_number(sample): return float("nan")
def infinite_part(sample): return Reward(1.0, {"style": float("inf")})
def failing(sample): return sample.record["missing"]
def leaving(sample): raise SystemExit(3)
def bonus(sample, size: float, scale=1.0): return size * scale
def anything(sample, **options): return len(options)
async def later(sample, value=1.0): return value

class Length:
    def __init__(self, unit: int = 1): self.unit = 1 / (1 / unit)
    def score(self, sample): return len(sample.response) / self.unit

class Batched:
    batch_size = 3
    def __init__(self): self.closed = False
    async def score_many(self, samples): return [len(sample.response) for sample in samples]
    def close(self): self.closed = True

class Short:
    def score_many(self, samples): return []

class Mute: pass
"""


@pytest.fixture
def file(tmp_path) -> Path:
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
        ("agents", Reward(0.75, agents={"solver": Reward(1.0), "critic": Reward(0.5, {"form": 1.0})})),
    ],
)
def test_loaded_reward_converts_numbers_to_rewards(file, function, reward):
    result = load_reward(f"{file}:{function}")(SAMPLE)
    assert result == reward
    assert type(result.value) is float


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("nothing", ":nothing' returned None"),
        ("no_agent", ":no_agent' returned {}"),
        ("missing_number", ":missing_number' returned None. Return a finite number .* a mapping of such by name"),
        ("not_a_number", ":not_a_number' returned nan"),
        ("infinite_part", r":infinite_part \(style\)' returned inf"),
        ("failing", ":failing' raised KeyError: 'missing'"),
        ("leaving", ":leaving' raised SystemExit: 3"),
        ("Short", ":Short' returned 0 results for 1 samples"),
    ],
)
def test_loaded_reward_invalid_result_raises(file, function, reason):
    reward = load_reward(f"{file}:{function}")
    with pytest.raises(UserError, match=reason):
        reward(SAMPLE)


@pytest.mark.parametrize("threads", [None, ThreadPoolExecutor(1)])
def test_exception_in_a_reward_names_its_line_and_the_sample(tmp_path, threads):
    mine = tmp_path / "mine.py"
    mine.write_text("import json\n\ndef score(sample):\n    return json.loads(sample.response)\n")
    expected = r"Expecting value.* \(mine.py:4, prompt '1\+1=', response 'two'\)\. Return a number"
    with pytest.raises(UserError, match=expected):
        asyncio.run(load_reward(f"{mine}:score").score([replace(SAMPLE, response="two")], threads))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("verl_mg.rewards.exact", "package.module:function"),
        ("verl_mg.rewards.exact:", "package.module:function"),
        ("verl_mg.rewards.exact:scroe", "no function 'scroe'. Write one of: score"),
        ("verl_mg.rewards.exakt:score", "ModuleNotFoundError: No module named 'verl_mg.rewards.exakt'"),
        ("nowhere/own.py:score", "FileNotFoundError"),
    ],
)
def test_load_reward_invalid_name_raises(name, reason):
    with pytest.raises(UserError, match=reason):
        load_reward(name)


@pytest.mark.parametrize(
    ("name", "options", "value"),
    [
        ("bonus", {"size": 2, "scale": 0.5}, 1.0),
        ("anything", {"a": 1, "b": 2}, 2.0),
        ("later", {"value": 3}, 3.0),
        ("Length", {"unit": 2}, 1.5),
        ("Batched", {}, 3.0),
    ],
)
def test_load_reward_passes_options(file, name, options, value):
    assert load_reward(f"{file}:{name}", options)(SAMPLE) == Reward(value)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("bonus", {"size": 1, "scael": 2}, r"unknown option 'scael'. Did you mean 'scale'\? Its options are: size, sc"),
        ("bonus", {}, "the option 'size' is missing"),
        ("bonus", {"sample": 1, "size": 1}, "unknown option 'sample'"),
        ("truth", {"x": 1}, "unknown option 'x'. Its options are: none"),
        ("Length", {"x": 1}, "unknown option 'x'. Its options are: unit"),
        ("Length", {"unit": 0}, r"the options are not accepted \(ZeroDivisionError"),
        ("Mute", {}, "neither score"),
    ],
)
def test_load_reward_invalid_options_raises(file, name, options, reason):
    with pytest.raises(UserError, match=reason):
        load_reward(f"{file}:{name}", options)


def test_loaded_reward_attributes_describe_the_function(file):
    batched, later, plain = (load_reward(f"{file}:{name}") for name in ("Batched", "later", "truth"))
    assert (batched.batched, batched.batch_size, batched.asynchronous) == (True, 3, True)
    assert (later.batched, later.batch_size, later.asynchronous) == (False, 1, True)
    assert (plain.batched, plain.asynchronous) == (False, False)
    batched.close()
    plain.close()


def test_load_reward_broken_file_raises(tmp_path):
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(UserError, match="ZeroDivisionError: division by zero"):
        load_reward(f"{tmp_path}/broken.py:score")
