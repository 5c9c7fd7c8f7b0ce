"""The configuration tree: what is shipped parses, and what is wrong is named with its remedy."""

from pathlib import Path

import pytest
import yaml

from tests.recipes.tiny_runs import recipe_of
from verl_mg.config import dump_config, load_config
from verl_mg.errors import UserError
from verl_mg.job.recipe import load_recipe

ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "recipes" / "configs").rglob("*.yaml"))
MINIMUM = {"model": {"path": "m"}, "data": {"train": "d.jsonl"}}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_shipped_configuration_parses_against_its_recipe(config):
    recipe = load_recipe(recipe_of(config))
    loaded = load_config(config, [], recipe.config)
    assert isinstance(loaded.algorithm, recipe.config)
    recipe.roles(loaded.algorithm)


def test_configurations_are_shipped():
    assert len(CONFIGS) >= 3


@pytest.fixture
def grpo():
    return load_recipe(ROOT / "recipes" / "grpo.py").config


def write(folder: Path, tree: object) -> Path:
    path = folder / "c.yaml"
    path.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree))
    return path


def test_overrides_replace_what_the_file_says(tmp_path, grpo):
    path = write(tmp_path, MINIMUM | {"actor": {"layout": "tp2"}})
    overrides = ["actor.layout=tp4-pp2", "algorithm.group_size=3", "actor.optimizer.betas=[0.8, 0.9]", "job.seed=7"]
    config = load_config(path, overrides, grpo)
    assert (config.actor.layout, config.algorithm.group_size, config.job.seed) == ("tp4-pp2", 3, 7)
    assert config.actor.optimizer.betas == (0.8, 0.9)
    assert config.rollout.temperature == 1.0


def test_temperature_zero_stays_zero(tmp_path, grpo):
    assert load_config(write(tmp_path, MINIMUM), ["rollout.temperature=0"], grpo).rollout.temperature == 0


def test_the_dump_reads_back_equal(tmp_path, grpo):
    config = load_config(write(tmp_path, MINIMUM), ["algorithm.kl_coefficient=0.1"], grpo)
    again = load_config(write(tmp_path, dump_config(config)), [], grpo)
    assert again.model_dump() == config.model_dump()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["actor.layuot=tp2"], "unknown key 'actor.layuot'; did you mean 'actor.layout'?"),
        (["algorithm.groupsize=2"], "did you mean 'algorithm.group_size'?"),
        (["actor.lr=1"], "did you mean 'actor.optimizer.lr'?"),
        (["zzz=1"], "the top level has model, data, actor"),
        (["actor.layout=tp2-pq2"], "'actor.layout' is 'tp2-pq2': .*pq2"),
        (["rollout.temperature=-1"], "'rollout.temperature' is -1: .*greater than or equal to 0"),
        (["job.iterations=many"], "'job.iterations' is 'many'"),
        (["model={}"], "'model.path' is missing"),
        (["evaluation.samples=4"], "'evaluation.temperature' is 0.0: greedy samples are copies; write a temperature"),
        (["novalue"], "override 'novalue': write section.key=value"),
        (["job.seed.deep.er=1", "job.seed=1", "job.seed.x=2"], "'seed' is a value, not a section"),
        (["actor.optimizer.warmup_steps=9", "actor.optimizer.decay_steps=9"], "must be larger than warmup_steps"),
    ],
)
def test_a_wrong_value_is_named_with_its_remedy(tmp_path, grpo, overrides, message):
    with pytest.raises(UserError, match=message) as caught:
        load_config(write(tmp_path, MINIMUM), overrides, grpo)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: [1", "c.yaml:2?1?.*not valid YAML"), ("- 1", "must be a mapping"), ("", "'model' is missing")],
)
def test_a_broken_file_is_named(tmp_path, grpo, text, message):
    with pytest.raises(UserError, match=message):
        load_config(write(tmp_path, text), [], grpo)


def test_a_missing_file_is_named(tmp_path, grpo):
    with pytest.raises(UserError, match="nowhere.yaml: cannot read"):
        load_config(tmp_path / "nowhere.yaml", [], grpo)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import nothing_like_it", "cannot be imported \\(ModuleNotFoundError"),
        ("x = 1", "a recipe defines `class Config"),
        (
            "from verl_mg.config import RecipeConfig\nclass Config(RecipeConfig): ...\n",
            "defines the function roles\\(cfg\\)",
        ),
    ],
)
def test_a_broken_recipe_is_named(tmp_path, source, message):
    path = tmp_path / "mine.py"
    path.write_text(source)
    with pytest.raises(UserError, match=f"mine.py: .*{message}"):
        load_recipe(path)
    with pytest.raises(UserError, match="no such recipe"):
        load_recipe(tmp_path / "other.py")
