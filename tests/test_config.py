"""Reading of the configuration: shipped files are valid, and errors name the key and the remedy."""

import inspect
import re
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field

from tests.recipes.tiny_runs import recipe_of
from tools.docs.write_configuration_doc import DOCUMENT, document
from verl_mg.cli import main
from verl_mg.config import ConfigSection, RecipeConfig, apply_override, dump_config, load_config, tree_for
from verl_mg.config.reference import sections
from verl_mg.errors import UserError
from verl_mg.job.recipe import load_recipe

ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "recipes" / "configs").rglob("*.yaml"))
MINIMUM = {"model": {"path": "m"}, "data": {"train": "d.jsonl"}}


class Penalty(ConfigSection):
    coefficient: float = 0.0
    placement: str = "loss"


class Algorithm(RecipeConfig):
    group_size: int = Field(8, ge=2)
    num_minibatches: int = 1
    kl: Penalty = Penalty(placement="reward")


def write_config(folder: Path, tree: object) -> Path:
    path = folder / "c.yaml"
    path.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree))
    return path


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_load_config_shipped_file_matches_its_recipe(config):
    recipe = load_recipe(recipe_of(config))
    loaded = load_config(config, [], recipe.config)
    assert isinstance(loaded.algorithm, recipe.config)
    recipe.roles(loaded.algorithm)


def test_load_config_overrides_replace_values_of_the_file(tmp_path):
    path = write_config(tmp_path, MINIMUM | {"actor": {"layout": "tp2"}})
    overrides = ["actor.layout=tp4-pp2", "algorithm.group_size=3", "actor.optimizer.betas=[0.8, 0.9]", "job.seed=7"]
    config = load_config(path, [*overrides, "rollout.temperature=0"], Algorithm)
    assert (config.actor.layout, config.algorithm.group_size, config.job.seed) == ("tp4-pp2", 3, 7)
    assert config.actor.optimizer.betas == (0.8, 0.9)
    assert (config.rollout.temperature, config.rollout.top_p) == (0, 1.0)


def test_load_config_partial_subsection_keeps_defaults_of_the_recipe(tmp_path):
    path = write_config(tmp_path, MINIMUM)
    kl = load_config(path, ["algorithm.kl.coefficient=0.1"], Algorithm).algorithm.kl
    assert (kl.coefficient, kl.placement) == (0.1, "reward")


def test_load_config_unknown_key_is_not_answered_with_its_section(tmp_path):
    recipe = load_recipe(ROOT / "recipes" / "reinforce.py")
    with pytest.raises(UserError, match=r"algorithm\.group_size: unknown key\. (?!Did you mean algorithm\?)"):
        load_config(write_config(tmp_path, MINIMUM), ["algorithm.group_size=2"], recipe.config)


def test_dump_config_output_reads_back_equal(tmp_path):
    config = load_config(write_config(tmp_path, MINIMUM), ["algorithm.kl.coefficient=0.1"], Algorithm)
    again = load_config(write_config(tmp_path, dump_config(config)), [], Algorithm)
    assert again.model_dump() == config.model_dump()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (" Write it behind ####.", " Write it behind ####."),
        ("try #1", "try #1"),
        ("Answer:", "Answer:"),
        ("a: b", "a: b"),
        ("  ", "  "),
        ("'it''s # 1'", "it's # 1"),
        ('"a\\n"', "a\n"),
        ("> 5", "> 5"),
        ("*a, b", "*a, b"),
        ("007", "007"),
        ("1:30", "1:30"),
        ("2026-01-02", "2026-01-02"),
        ("~x", "~x"),
        ("1e-5", 1e-5),
        ("-.5", -0.5),
        ("0x10", 16),
        (" 7 ", 7),
        ("yes", True),
        ("null", None),
        ("[010, 1e5, 'a # b', no]", ["010", 1e5, "a # b", False]),
        ("[a: b]", [{"a": "b"}]),
    ],
)
def test_apply_override_value_is_what_was_typed(text, value):
    tree: dict[str, Any] = {}
    apply_override(tree, f"a.b={text}")
    assert tree == {"a": {"b": value}} and type(tree["a"]["b"]) is type(value)


typed = st.one_of(
    st.text(alphabet="ab #:'\"[]{},~&*!|>%@`-?0129.e_\n", max_size=8),
    st.text(max_size=6),
    st.sampled_from(["true", "no", "null", "~", "12", "1.5", "#", " "]).flatmap(
        lambda t: st.just(t) | st.just(f"{t} #")
    ),
)


@settings(max_examples=400)
@given(typed)
def test_apply_override_uses_a_whole_value_or_refuses_it(text):
    tree: dict[str, Any] = {}
    try:
        apply_override(tree, f"a={text}")
    except UserError:
        return
    value = tree["a"]
    if text.strip()[:1] in ("'", '"', "[", "{"):  # in front of another value, a comment would swallow that one
        assert yaml.safe_load(f"[{text}, END]")[1:] == ["END"]
    elif isinstance(value, str):
        assert value == text
    else:  # a number, or a word of YAML
        assert re.fullmatch(r"\s*[\w.+-]+\s*", text)


def test_load_config_file_reads_numbers_as_people_write_them(tmp_path):
    path = write_config(tmp_path, "model: {path: m}\ndata: {train: d}\njob: {seed: 010}\ntracking: {name: 1:30}\n"
                        "actor: {optimizer: {lr: 1e-3}}\nmegatron: {transformer: {a: 1e5}}")  # fmt: skip
    config = load_config(path, ["tracking.project=2026-01-02", "tracking.name=007"], Algorithm)
    assert (config.job.seed, config.actor.optimizer.lr, config.megatron.transformer) == (10, 1e-3, {"a": 1e5})
    assert (config.tracking.name, config.tracking.project) == ("007", "2026-01-02")
    # A text that looks like such a number is written in quotes, so that it is read back as a text.
    texts = ["1e5", "010", "1:30", "0x1", "~", "no", ".5", "2026-01-02"]
    again = load_config(path, [f"rollout.stop={texts}"], Algorithm)
    assert load_config(write_config(tmp_path, dump_config(again)), [], Algorithm).rollout.stop == texts


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["job.output=[a] # b"],
            "'job.output=.a. # b': YAML drops what follows # there. Quote the text that ",
        ),
        (["data.instruction='a' # b"], "YAML drops what follows #"),
        (["data.instruction='a' b"], "the value is not valid YAML. Quote it."),
        (["job.output="], "'job.output=': not a value. Write null, \"''\" for an empty text, or a whole path."),
        (["job.output=~"], "'job.output=~': not a value. Write null"),
        (["job.output=~/runs"], "job.output: '~/runs' is not expanded, .* Write the whole path."),
        (["rollout.tools=[~me/t.py:f]"], "rollout.tools.0: '~me/t.py:f' is not expanded"),
        (
            ["tracking.name=7"],
            "tracking.name: 7 is invalid. Write a text, in quotes where it looks like",
        ),
        (["job.output=no"], "job.output: False is invalid. Write a text, in quotes"),
        (["rollout.sglang={a: 1, b: 2, a: 3}"], "the value is not valid YAML"),
        (["actor.layuot=tp2"], "actor.layuot: unknown key. Did you mean actor.layout?"),
        (["algorithm.groupsize=2"], "Did you mean algorithm.group_size?"),
        (["actor.lr=1"], "Did you mean actor.optimizer.lr?"),
        (["actor.lora.rnk=1"], "Did you mean actor.lora.rank?"),
        (["reward.mixture.mine.wieght=1"], "Did you mean reward.mixture.mine.weight?"),
        (["zzz=1"], "zzz: unknown key. The top level has the keys model, data, actor"),
        (["actor.layout=tp2-pq2"], "actor.layout: 'tp2-pq2' is invalid: .*pq2"),
        (
            ["actor.layout=pp2", "actor.pipeline_layers=[3]"],
            "actor.pipeline_layers: .* has length 1, and layout pp2 has 2",
        ),
        (["critic.pipeline_layers=[3]"], "critic.pipeline_layers: .*Leave the key out, or write pp2 or more"),
        (["rollout.temperature=-1"], "rollout.temperature: -1 is invalid. Write a value greater than or equal to 0."),
        (["job.iterations=many"], "job.iterations: 'many' is invalid. Write a valid integer."),
        (
            ["model.path=s3://b/c"],
            "model.path: 's3://b/c' is invalid: only job.output, status and view take object sto",
        ),
        (["data.train=gs://b/c"], "data.train: 'gs://b/c' is invalid: only job.output, status and view take object st"),
        (["rollout.engine=vlm"], "rollout.engine: 'vlm' is invalid. Write 'hf', 'sglang' or 'vllm'."),
        (["actor=3"], "actor: 3 is not a section. Write a mapping of keys."),
        (["model={}"], "model.path: missing. Write it in the file or as model.path=VALUE."),
        (["evaluation.samples=4"], "evaluation.temperature: 0.0 is invalid: greedy samples .* Write a temperature"),
        (["actor.recompute=[moe, mlpp]"], "actor.recompute: .* neither true, false nor a list of core_attn, layernorm"),
        (["novalue"], "'novalue': not an override. Write section.key=value"),
        (["job.seed.deep.er=1", "job.seed=1", "job.seed.x=2"], "'seed' is a value, not a section"),
        (["actor.optimizer={kind: muon, cpu_offload: true}"], "Write moments_dtype=bfloat16, or kind=adamw"),
        (["actor.optimizer.kind=muon", "actor.lora={}"], "Write optimizer.kind=adamw"),
        (["actor.optimizer.lr=.inf"], "actor.optimizer.lr: inf is invalid. Write a finite number."),
        (["actor.guard.max_kl=.inf"], "actor.guard.max_kl: inf is invalid. Write a finite number."),
        (["actor.optimizer.warmup_steps=9", "actor.optimizer.decay_steps=9"], "Must be larger than warmup_steps"),
        (["rollout.stop=[a, '']"], "rollout.stop: .* is invalid: an empty string would end every response immediately"),
        (["actor.optimizer.warmup_steps=9", "actor.optimizer.warmup_ratio=0.1"], "Leave one of them out"),
        (["teachers={a: {path: a, url: 'http://h:1'}}"], "teachers.a.url: .* Leave one of them out"),
        (["teachers={a: {path: a, weights: actor}}"], "teachers.a.weights: .* Leave them out"),
    ],
)
def test_load_config_invalid_override_names_key_and_remedy(tmp_path, overrides, message):
    with pytest.raises(UserError, match=message) as caught:
        load_config(write_config(tmp_path, MINIMUM), overrides, Algorithm)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("others", [["data.train=d"], ["rollout.temperature=-1"], []])
def test_load_config_unknown_key_is_reported_before_other_problems(others):
    with pytest.raises(UserError, match=r"model\.pth: unknown key\. Did you mean model\.path\?"):
        load_config(None, ["model.pth=x", *others], Algorithm)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "c.yaml:2?1?.*not valid YAML"),
        ("job: {seed: 1}\njob: {seed: 2}", "c.yaml:1: not valid YAML .the key job is written twice"),
        ("- 1", "not a mapping. Write sections"),
        ("", "model: missing"),
        (None, "c.yaml: cannot be read"),
    ],
)
def test_load_config_broken_or_missing_file_is_named(tmp_path, text, message):
    path = tmp_path / "c.yaml" if text is None else write_config(tmp_path, text)
    with pytest.raises(UserError, match=message):
        load_config(path, [], Algorithm)


RECIPE_WITHOUT_ROLES = "from verl_mg.config import RecipeConfig\nclass Config(RecipeConfig): ...\n"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import nothing_like_it", "cannot be imported \\(ModuleNotFoundError"),
        ("x = 1", "a recipe defines `class Config"),
        (RECIPE_WITHOUT_ROLES, "defines the function roles\\(cfg\\)"),
    ],
)
def test_load_recipe_broken_file_is_named(tmp_path, source, message):
    path = tmp_path / "mine.py"
    path.write_text(source)
    with pytest.raises(UserError, match=f"mine.py: .*{message}"):
        load_recipe(path)
    with pytest.raises(UserError, match="no such recipe"):
        load_recipe(tmp_path / "other.py")


def test_configuration_document_is_up_to_date():
    assert len(CONFIGS) >= 3
    assert DOCUMENT.read_text(encoding="utf-8") == document(), "run python -m tools.docs.write_configuration_doc"


def test_reference_every_key_of_the_tree_and_recipes_has_a_description():
    recipes = [tree_for(load_recipe(file).config) for file in sorted((ROOT / "recipes").glob("[!_]*.py"))]
    missing = {
        f"{s.names[0]}.{key.name}" for tree in recipes for s in sections(tree) for key in s.keys if not key.description
    }
    assert not missing


def test_reference_of_a_recipe_imported_under_two_names_has_descriptions(tmp_path, monkeypatch):
    copied = Path(shutil.copy(ROOT / "recipes" / "grpo.py", tmp_path / "copied_grpo.py"))
    monkeypatch.syspath_prepend(tmp_path)
    import_module("copied_grpo")
    inspect.getmodule((lambda: 0).__code__)  # fills the map from files to modules, in which a file has one module
    algorithm = load_recipe(copied).config
    assert all(key.description for section in sections(algorithm) for key in section.keys)


def test_reference_types_bounds_and_defaults_are_in_words():
    keys = {
        f"{name}.{key.name}": key
        for section in sections(tree_for(Algorithm))
        for name in section.names
        for key in section.keys
    }
    assert (keys["rollout.top_p"].type, keys["rollout.top_p"].default) == ("number > 0 and <= 1", "1.0")
    assert (keys["checkpoint.best"].type, keys["checkpoint.best"].default) == ("text or null", "null")
    assert keys["model.path"].default == "required"
    assert keys["tracking.services"].type == "list of (wandb or mlflow or swanlab)"
    assert keys["algorithm.kl.placement"].default == "reward"


def test_help_config_prints_every_key_of_the_recipe(capsys):
    main(["train", str(ROOT / "recipes" / "grpo.py"), "--help-config"])
    text = capsys.readouterr().out
    assert "\n  group_size: integer >= 2, default 8\n" in text
    assert "\n  path: path, required\n      Hugging Face directory" in text
