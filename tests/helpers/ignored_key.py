"""Plugin of pytest: a key of the configuration reads as its default, so that the test that needs it has to fail.

    python -m pytest -p tests.helpers.ignored_key --ignored-key RolloutConfig.top_p tests/...

The ranks of the pool, which are forked later, ignore it too, and so do processes that a test starts: the environment
has the key, and PYTHONPATH a sitecustomize.py.
"""

import importlib
import os
from pathlib import Path

import pytest
from pydantic import BaseModel

from verl_mg.config import Config
from verl_mg.config.keys import subsection

HERE = Path(__file__).parent


def owned_keys(section: type[BaseModel] = Config) -> dict[str, type[BaseModel]]:
    """Each key as CLASS.NAME, by the class that declares it and all that inherit it, with that class."""
    found: dict[str, type[BaseModel]] = {}
    for name, field in section.model_fields.items():
        owner = next(base for base in reversed(section.__mro__) if name in getattr(base, "__annotations__", ()))
        found[f"{owner.__name__}.{name}"] = owner
        if inner := subsection(field.annotation):
            found |= owned_keys(inner[1])
    return found


def owner_of(key: str) -> type[BaseModel]:
    """The class that declares a key, which is that of a recipe in gigpo.gamma."""
    first, _, name = key.partition(".")
    if first[0].isupper():
        return owned_keys()[key]
    return owned_keys(importlib.import_module(f"verl_mg.recipes.{first}").Config)[f"Config.{name}"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ignored-key", required=True, help="CLASS.NAME or RECIPE.NAME that reads as its default")


def ignore(key: str) -> None:
    """Makes a key read as its default in this process."""
    owner, name = owner_of(key), key.partition(".")[2]
    # Validation still reads the value; only a descriptor of the class hides it from whoever reads the section.
    setattr(
        owner, name, property(lambda section: type(section).model_fields[name].get_default(call_default_factory=True))
    )


def pytest_configure(config: pytest.Config) -> None:
    key = config.getoption("--ignored-key")
    ignore(key)
    os.environ["IGNORED_KEY"] = key
    # In front: an environment has one sitecustomize.py.
    folders = [HERE / "ignoring", HERE.parents[1], *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, folders))
