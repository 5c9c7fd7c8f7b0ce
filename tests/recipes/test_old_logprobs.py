"""algorithm.old_logprobs: updates without the pass for log-probs before them are the same, or are refused."""

import pytest

from tests.helpers.tiny_jobs import RECIPES
from tests.recipes.tiny_runs import comparable, tiny_run
from verl_mg.config import load_config
from verl_mg.errors import UserError
from verl_mg.job.recipe import load_recipe

SIZES = ["job.iterations=2", "job.save=false", "algorithm.prompts_per_iteration=8", "algorithm.group_size=4"]


def run(ranks, name, task, output, choice, overrides=()):
    # The check of the first iteration computes log-probs too.
    overrides = [*SIZES, "rollout.max_mismatch=null", f"algorithm.old_logprobs={choice}", *overrides]
    return tiny_run(ranks, name, task, output, overrides, count=1)


@pytest.mark.parametrize("choice", ["skip", "rollout"])
def test_update_without_the_pass_for_old_logprobs_is_the_same(ranks, tasks, tmp_path, choice):
    expected = run(ranks, "grpo", tasks(0), tmp_path / "recompute", "recompute")
    found = run(ranks, "grpo", tasks(0), tmp_path / choice, choice)
    for line, other, compared in zip(found, expected, comparable(expected), strict=True):
        assert "time/phase/forward" in other and "time/phase/forward" not in line
        assert "mismatch/max_abs" in other and "mismatch/max_abs" not in line
        assert {name: line[name] for name in compared} == pytest.approx(compared, rel=1e-3, abs=1e-4)
    assert expected[0]["actor/grad_norm"] > 1e-3


def test_skipped_old_logprobs_with_penalty_report_its_divergence(ranks, tasks, tmp_path):
    kl = ["algorithm.kl.coefficient=0.05"]
    expected = run(ranks, "grpo", tasks(0), tmp_path / "recompute", "recompute", kl)
    found = run(ranks, "grpo", tasks(0), tmp_path / "skip", "skip", kl)
    for name in ("kl/mean", "actor/kl", "actor/loss", "actor/grad_norm"):
        assert found[1][name] == pytest.approx(expected[1][name], rel=1e-2, abs=1e-5), name
    assert abs(expected[1]["actor/kl"]) > 1e-4


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("grpo", ["old_logprobs=skip", "num_minibatches=2"], "num_minibatches and num_epochs must be 1"),
        ("grpo", ["old_logprobs=skip", "num_epochs=3"], "num_minibatches and num_epochs must be 1"),
        ("ppo", ["old_logprobs=skip", "kl.coefficient=0.1"], "kl.placement=reward needs log-probs before the update"),
        ("grpo", ["old_logprobs=rollout", "off_policy.weight=token"], "off_policy compares"),
        ("gspo", ["old_logprobs=skip", "off_policy.score_centering=8"], "off_policy compares"),
        ("dppo", ["off_policy.weight=token"], "off_policy compares"),
        ("clip_cov", ["old_logprobs=skip"], "'recompute' or 'rollout'"),
    ],
)
def test_old_logprobs_that_do_not_fit_the_recipe_are_refused(name, overrides, message):
    algorithm = load_recipe(RECIPES / f"{name}.py").config
    needed = ["model.path=m", "data.train=d"]
    with pytest.raises(UserError, match=rf"algorithm\.old_logprobs.*{message}"):
        load_config(None, [*needed, *(f"algorithm.{override}" for override in overrides)], algorithm)
