"""What each command and each module of plans and recipes imports of other projects: seconds of torch are none of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.tiny_models import tiny_model
from verl_mg.lazy_import import lazy_import

PYDANTIC = {"annotated_types", "pydantic", "pydantic_core", "typing_extensions", "typing_inspection"}
CONFIGURATION, PLAN = PYDANTIC | {"yaml"}, PYDANTIC | {"yaml", "numpy"}
RECIPES = [f"recipes.{file.stem}" for file in sorted(Path("recipes").glob("[a-z]*.py"))]
COMMON = [f"recipes.common.{file.stem}" for file in sorted(Path("recipes/common").glob("[a-z]*.py"))]
MODULES: dict[str, set[str]] = {
    "layout models.hf_config algorithms.losses algorithms.advantages training.loss_inputs": set(),
    "sharding.weight_table sharding.module_table": PYDANTIC,
    "reshard reshard.encode": PYDANTIC | {"numpy"},
    " ".join(["config", "algorithms.divergence", "job.job", "job.recipe", *RECIPES, *COMMON]): CONFIGURATION,
}
"""Packages that the import of modules of `verl_mg` imports."""
ON_PAPER = ["--model", "tools/model_configs/qwen3_30b_a3b.json", "--ranks", "64"]
COMMANDS = {
    "--version": set(),
    "--help": set(),
    "plan --train tp2 --rollout tp2": PLAN | {"rich"},
    "plan dapo --config recipes/papers/dapo_qwen3_30b_a3b/config.yaml": PLAN | {"rich"},
    "train grpo --help-config": CONFIGURATION,
    "models MODEL": PLAN,
    "status RUN": PYDANTIC | {"tenacity"},
    "from-verl CONFIG.yaml": CONFIGURATION,
    "eval --compare A B": CONFIGURATION,
    "view RUN": PLAN | {"pyarrow", "cloudpickle", "tenacity"},
}
"""Packages that commands import, to their end or to the message that there is no such folder."""
LISTING = """\
import json, sys
sys.argv[0] = "verl-mg"
before = set(sys.modules)
try:
    {code}
except SystemExit:
    pass
names = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print("\\n" + json.dumps(sorted(names - sys.stdlib_module_names - {{"verl_mg"}})))
"""


def imported(code: str, *arguments: str) -> set[str]:
    """Returns the packages, except those of Python, that a process imports for the code."""
    command = [sys.executable, "-c", LISTING.format(code=code), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    # Without what compiled packages add, such as _cython_3_1_4.
    return {name for name in json.loads(done.stdout.splitlines()[-1]) if not name.startswith(("_", "cython"))}


@pytest.mark.parametrize("modules", MODULES, ids=lambda names: names.partition(" ")[0])
def test_modules_of_plans_and_recipes_import_only_what_is_listed(modules):
    assert imported(f"import {', '.join(f'verl_mg.{name}' for name in modules.split())}") == MODULES[modules]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_import_only_what_is_listed(command, tmp_path):
    arguments = command.split()
    if "MODEL" in arguments:
        arguments[1] = str(tiny_model(tmp_path / "model", "qwen3"))
    if arguments[0] == "plan":
        arguments += ON_PAPER
    assert imported("from verl_mg.cli import main; main()", *arguments) == COMMANDS[command]


def test_lazy_module_replaces_itself_and_is_no_module_before():
    assert lazy_import("json") is json
    code = """\
from verl_mg.lazy_import import lazy_import
    calendar = other = lazy_import("calendar")
    assert "calendar" not in sys.modules
    calendar.isleap(2024)
    assert calendar is other is sys.modules["calendar"]
    import xml.etree
    tree = lazy_import("xml.etree.ElementTree")
    assert "xml.etree.ElementTree" not in sys.modules and not hasattr(tree, "missing")
    assert tree is sys.modules["xml.etree.ElementTree"]"""
    assert imported(code) == set()
