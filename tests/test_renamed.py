"""Imports of former names, as documents of earlier versions show them: the error names the new one."""

import importlib
import importlib.util

import pytest

from verl_mg.errors import UserError
from verl_mg.import_function import load_function
from verl_mg.renamed import RENAMED_MODULES, RENAMED_NAMES, RENAMED_PACKAGES

DOCUMENTED = [
    ("from verl_mg.script import Job", "verl_mg.script: renamed to verl_mg.api. Import the new name."),
    ("from verl_mg.config import Section", "verl_mg.config.Section: renamed to verl_mg.config.RecipeConfig."),
    ("from verl_mg.megatron.microbatch import LossTokens", "renamed to verl_mg.training.loss_inputs.LossInputs."),
    ("from verl_mg.weights import read_config", "renamed to verl_mg.models.hf_config.read_config."),
    ("from verl_mg.weights import table", "verl_mg.weights.table: renamed to verl_mg.sharding.weight_table."),
    ("import verl_mg.weights.files", "verl_mg.weights.files: renamed to verl_mg.checkpoint.hf_safetensors."),
    ("from verl_mg.weights.dialects import sglang", "renamed to verl_mg.sharding.sglang"),
    ("from recipes.pieces import clipping", "recipes.pieces.clipping: moved to recipes.common."),
    ("from recipes.pieces.sampling import learn", "recipes.pieces.sampling: moved to recipes.common."),
    ("import verl_mg.paper.lengths", "verl_mg.paper.lengths: renamed to verl_mg.planner."),
]


@pytest.mark.parametrize(("statement", "message"), DOCUMENTED)
def test_import_of_former_name_names_the_new_one(statement, message):
    with pytest.raises(ImportError, match=message):
        exec(statement)


def test_load_function_of_former_module_names_the_new_one():
    with pytest.raises(UserError, match=r"verl_mg\.rollout\.tools\.ready: renamed to verl_mg\.rollout\.tools\.builtin"):
        load_function("verl_mg.agents.tools.ready:calculator", "tool")


def test_import_of_unknown_name_is_the_usual_error():
    with pytest.raises(ModuleNotFoundError, match="No module named 'verl_mg.nothing'"):
        importlib.import_module("verl_mg.nothing")
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec("from verl_mg.config import nothing")
    assert importlib.util.find_spec("nothing_like_it") is None


def test_renamed_names_of_today_exist():
    packages = [name for names in RENAMED_PACKAGES.values() for name in names.replace(" or ", ", ").split(", ")]
    modules = [name for name in RENAMED_MODULES.values() if name.count(".") < 2 or not _package_exists(name)]
    assert not [name for name in (*packages, *modules) if importlib.util.find_spec(name) is None]
    assert not [name for name in RENAMED_NAMES.values() if not _exists(name)]


def _package_exists(name: str) -> bool:
    return importlib.util.find_spec(name.rpartition(".")[0]) is not None


def _exists(name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    return hasattr(importlib.import_module(module), attribute) or importlib.util.find_spec(name) is not None
