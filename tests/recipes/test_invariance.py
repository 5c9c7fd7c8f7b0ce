"""Metrics of an iteration of every recipe are independent of ranks, layout and micro-batches."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from pyarrow import parquet

from tests.helpers.tiny_jobs import RECIPES
from tests.helpers.tiny_models import daily_of
from tests.recipes.tiny_runs import TEACHER_OF, comparable, tiny_run
from verl_mg.job.recipe import load_recipe

NAMES = sorted(recipe.stem for recipe in RECIPES.glob("[!_]*.py"))
# The others differ from these in a loss or an advantage alone, which have tests of their own.
DAILY = {"dapo", "dpo", "gkd", "grpo", "gspo", "ppo", "prime", "reward_model", "sft"}
# Those with a rollout. Clip-Cov draws tokens by their places in rows, the loss of PRIME's reward model is of rows, and
# the cut makes two turns of one.
OF_ROWS = {"clip_cov", "gigpo", "mt_grpo", "prime"}
SPLIT = [name for name in NAMES if name not in OF_ROWS | {"dpo", "reward_model", "sft"}]
SPLIT_DAILY = {"grpo", "ppo", "gspo"}
OF_SEGMENTS = {"gspo", "gmpo"}
CENTRED = "algorithm.off_policy={score_centering: 3, weight: token}"
TRAINED = ("actor", "critic", "process_reward", "reward_model")
ALL_ON_FSDP = [f"{role}.backend=fsdp" for role in (*TRAINED, "reference")]
SMALL = [f"{role}.tokens_per_micro_batch=40" for role in (*TRAINED, "reference")]
SIZES = {
    "prompts_per_iteration": 9,
    "group_size": 4,
    "examples_per_iteration": 9,
    "pairs_per_iteration": 9,
    "critic_warmup": 0,
    "num_minibatches": 2,
    "num_epochs": 1,
    "kl": "{coefficient: 0.01}",
    "entropy_coefficient": 0.02,
    "dual_clip": 1.01,
}


@pytest.fixture(scope="module")
def task(ranks, tasks, tmp_path_factory) -> Path:
    """Task with a model that is sometimes right: a random one gives no right answers to imitate or to filter."""
    output = tmp_path_factory.mktemp("taught") / "sft"
    tiny_run(ranks, "sft", tasks(0), output, ["job.iterations=12"])
    (output / "data").symlink_to(tasks(0) / "data")
    (output / "mixture").symlink_to(tasks(0) / "mixture")
    return output


def first_iteration(
    ranks, name: str, task, output, count: int, overrides: list[str], split: bool = False
) -> dict[str, float]:
    recipe = load_recipe(RECIPES / f"{name}.py")
    known, built = recipe.config.model_fields, recipe.roles(recipe.config())
    # Sections of other roles have no effect.
    overrides = [text for text in overrides if (role := text.partition(".")[0]) not in TRAINED or role in built]
    if name in TEACHER_OF:
        # Any other model can teach.
        overrides = [*overrides, f"reference.path={task / 'mixture'}"]
    sizes = [f"algorithm.{key}={value}" for key, value in SIZES.items() if key in known]
    overrides = ["job.iterations=1", "job.save=false", *sizes, *overrides]
    (line,) = comparable(tiny_run(ranks, name, task, output, overrides, count=count, split=split))
    return line


@pytest.fixture(scope="module")
def on_one_rank(ranks, task, tmp_path_factory) -> Callable[..., dict[str, float]]:
    """First iteration of a recipe on one rank with large micro-batches, run once for all tests that compare with it."""

    @cache
    def run(name: str, *overrides: str) -> dict[str, float]:
        return first_iteration(ranks, name, task, tmp_path_factory.mktemp(name) / "alone", 1, [*overrides])

    return run


def assert_trained(line: dict[str, float]) -> None:
    norms = [value for key, value in line.items() if key.endswith("/grad_norm")]
    assert norms and all(norm > 1e-3 for norm in norms)


def compare(found: dict[str, float], expected: dict[str, float]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-4, abs=2e-6), key


@pytest.mark.parametrize("name", daily_of(NAMES, *DAILY))
def test_iteration_on_two_ranks_in_small_micro_batches_is_unchanged(ranks, task, on_one_rank, tmp_path, name):
    alone = on_one_rank(name)
    assert_trained(alone)
    compare(first_iteration(ranks, name, task, tmp_path / "two", 2, SMALL), alone)


@pytest.mark.parametrize(
    ("name", "count", "overrides"),
    [
        ("ppo", 2, ["actor.backend=fsdp", "critic.backend=megatron", "reference.backend=fsdp"]),
        pytest.param("ppo", 2, ["critic.backend=fsdp"], marks=pytest.mark.nightly),
        ("grpo", 4, ["actor.backend=fsdp", "actor.layout=cp2", "reference.backend=fsdp", "reference.layout=tp2"]),
        ("grpo", 2, ["actor.backend=fsdp", "actor.lora={rank: 4, seed: 1}", "reference.backend=fsdp"]),
        *(pytest.param(name, 4, ALL_ON_FSDP, marks=pytest.mark.nightly) for name in NAMES),
    ],
)
def test_iteration_with_roles_on_fsdp_is_unchanged(ranks, task, on_one_rank, tmp_path, name, count, overrides):
    alone = on_one_rank(name, *(text for text in overrides if ".lora=" in text))
    compare(first_iteration(ranks, name, task, tmp_path / "fsdp", count, [*SMALL, *overrides]), alone)


@pytest.mark.parametrize("name", daily_of(SPLIT, *SPLIT_DAILY))
def test_iteration_with_responses_cut_into_segments_is_unchanged(ranks, task, on_one_rank, tmp_path, name):
    # Ratios of sequences, and outcomes of the process reward model, are those of segments: with one step the same.
    # With score centering, whose columns are cut as well.
    overrides = ["algorithm.num_minibatches=1", CENTRED] if name in OF_SEGMENTS else []
    whole = on_one_rank(name, *overrides)
    assert_trained(whole)
    assert ("actor/centering_mass" in whole) == (CENTRED in overrides)
    found = first_iteration(ranks, name, task, tmp_path / "cut", 2, [*SMALL, *overrides], split=True)
    rows = sum(parquet.read_metadata(file).num_rows for file in (tmp_path / "cut" / "samples").rglob("*.parquet"))
    assert rows > 1.5 * found["response/samples"]
    compare(found, whole)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "overrides"),
    [(name, []) for name in NAMES if "off_policy" in load_recipe(RECIPES / f"{name}.py").config.model_fields]
    + [("grpo", [f"actor.layout={layout}"]) for layout in ("tp2", "pp2", "cp2", "tp2-pp2")]
    + [("grpo", ["actor.backend=fsdp", f"actor.layout={layout}"]) for layout in ("tp2", "cp2")],
)
def test_iteration_with_score_centering_is_unchanged(ranks, task, on_one_rank, tmp_path, name, overrides):
    centred = [CENTRED, *(["algorithm.old_logprobs=recompute"] if name == "dppo" else [])]
    whole = on_one_rank(name, *centred)
    assert_trained(whole)
    assert 0 < whole["actor/centering_mass"] < 1
    compare(first_iteration(ranks, name, task, tmp_path / "others", 4, [*SMALL, *centred, *overrides]), whole)


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["pp2", "cp2", "tp2-pp2"])
def test_iteration_with_segments_in_other_layouts_is_unchanged(ranks, task, on_one_rank, tmp_path, layout):
    whole = on_one_rank("sapo")
    overrides = [*SMALL, *(f"{role}.layout={layout}" for role in ("actor", "reference"))]
    compare(first_iteration(ranks, "sapo", task, tmp_path / "cut", 4, overrides, split=True), whole)


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["tp2", "pp2", "cp2", "tp2-pp2"])
@pytest.mark.parametrize("name", NAMES)
def test_iteration_in_other_layouts_is_unchanged(ranks, task, on_one_rank, tmp_path, name, layout):
    alone = on_one_rank(name)
    # The reference too: a policy is compared with it, and where the two are equal a rounding would decide.
    layouts = [f"{role}.layout={layout}" for role in (*TRAINED, "reference")]
    compare(first_iteration(ranks, name, task, tmp_path / "cut", 4, [*layouts, *SMALL]), alone)
