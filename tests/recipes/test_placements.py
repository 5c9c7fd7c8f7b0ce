"""PPO with roles in other layouts, on other ranks or offloaded has the metrics of one layout for all."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.helpers.tiny_models import daily_of
from tests.recipes.tiny_runs import comparable, tiny_run
from verl_mg.models.tiny_model import make_tiny_model
from verl_mg.recipes.tasks.repeat_digit import DIGITS, LENGTH
from verl_mg.stores.records import MODEL

RANKS = 4
COMMON = [
    *("job.iterations=2", "algorithm.prompts_per_iteration=24", "algorithm.critic_warmup=0"),
    # A large eps makes Adam's step proportional to small gradients: weights compare as gradients do.
    *(f"{role}.optimizer.eps=0.01" for role in ("actor", "critic")),
    *(f"{role}.optimizer.warmup_steps=0" for role in ("actor", "critic")),
]
ONE = ["actor.layout=tp1", "critic.layout=tp1", "reference.layout=tp1"]
MIXED = ["actor.layout=tp2-pp2", "critic.layout=tp4", "reference.layout=tp1"]
PLACEMENTS = {
    "mixed": MIXED,
    "mixed and offloaded": [*MIXED, "critic.offload=true", "reference.offload=true"],
    "apart": ["actor.layout=tp2", "actor.ranks=0-1", "critic.layout=pp2", "critic.ranks=2-3", "reference.ranks=3"],
    "overlapping": ["actor.layout=tp2", "actor.ranks=1-2", "critic.ranks=0,2", "critic.offload=true"],
}
OTHER = ("time/", "weight_sync/", "rollout/load_imbalance", "mismatch/")


@pytest.fixture(scope="module")
def task(tasks, tmp_path_factory) -> Path:
    """Task with enough attention heads for four tensor-parallel ranks, and a model to score answers."""
    folder = tmp_path_factory.mktemp("placements")
    (folder / "data").symlink_to(tasks(0) / "data")
    size = {"hidden": 64, "layers": 2, "ffn": 128, "kv_heads": 4, "max_positions": 64, "init_std": 0.06}
    for name, seed in (("model", 0), ("scorer", 1)):
        make_tiny_model(folder / name, "qwen3", characters=DIGITS + "=", perturb=True, seed=seed, **size)
    return folder


def run(ranks, task, output, overrides):
    return comparable(tiny_run(ranks, "ppo", task, output, [*COMMON, *overrides], count=RANKS), OTHER)


def compare(found, expected):
    assert len(found) == len(expected) == 2
    for line, (own, wanted) in enumerate(zip(found, expected, strict=True)):
        assert own.keys() == wanted.keys()
        for key, value in wanted.items():
            assert own[key] == pytest.approx(value, rel=1e-5, abs=1e-6), f"{key} of iteration {line + 1}"


@pytest.fixture(scope="module")
def one_layout(ranks, task, tmp_path_factory):
    output = tmp_path_factory.mktemp("one") / "run"
    lines = run(ranks, task, output, ONE)
    for line in lines:
        assert min(line["actor/grad_norm"], line["critic/grad_norm"]) > 1e-3 and line["response/length"] <= LENGTH
    return lines, output


@pytest.mark.parametrize("placement", daily_of(PLACEMENTS, "mixed and offloaded", "overlapping"))
def test_ppo_with_roles_on_other_ranks_has_equal_metrics(ranks, task, one_layout, tmp_path, placement):
    expected, trained = one_layout
    compare(run(ranks, task, tmp_path / "run", PLACEMENTS[placement]), expected)
    for role in (MODEL, "critic"):
        before, after = (load_file(folder / role / "model.safetensors") for folder in (trained, tmp_path / "run"))
        assert before.keys() == after.keys()
        for name, weight in before.items():
            assert (after[name] - weight).abs().max() <= 1e-5 * weight.abs().max(), name


@pytest.mark.nightly
def test_reward_model_on_separate_ranks_has_equal_metrics(ranks, task, tmp_path):
    scored = ["reward.from_model=true", f"reward_model.path={task / 'scorer'}"]
    expected = run(ranks, task, tmp_path / "one", [*ONE, *scored])
    apart = ["reward_model.ranks=3", "reward_model.offload=true", "actor.ranks=0-1", "actor.layout=pp2"]
    compare(run(ranks, task, tmp_path / "apart", [*scored, *apart]), expected)
    # Scores of the model, not shares of six places; reward functions are not run.
    assert all(line["reward/std"] > 0 and "reward/right" not in line for line in expected)
    assert any(not (line["reward/mean"] * 24 * 3).is_integer() for line in expected)
