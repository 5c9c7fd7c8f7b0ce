"""The algorithms of verl 0.9.1, if it is installed, for the tests that compare with them.

verl is no dependency of anything. tools/install/peers.sh puts it into a folder of the environment (2 MB), without what
it depends on, which is enough for these tests: its chain of imports names ray, tensordict, omegaconf and codetiming,
whose types are used in annotations only, so an absent one is replaced by an empty module while verl is
imported, and leaves with the import.
"""

import importlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import ModuleType
from unittest import mock

import pytest

from tests.helpers.machine import PEERS

VERSION = "0.9.1"
NAMED_IN_ANNOTATIONS = ("ray", "tensordict", "omegaconf", "codetiming")


class _Empty(ModuleType):
    """A module in which every name is a class without content."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, type(name, (), {"__init__": lambda self, *args, **kwargs: None}))
        return vars(self)[name]


class _EmptyFinder:
    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in self.names else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing in it."""


@contextmanager
def _stand_ins(names: Sequence[str]) -> Iterator[None]:
    finder = _EmptyFinder(names)
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, _Empty)]:
            del sys.modules[name]


def module_of_verl(name: str) -> ModuleType:
    """verl.trainer.ppo.NAME; skips the test where verl is absent or of another version."""
    if str(PEERS) not in sys.path:
        sys.path.append(str(PEERS))  # last: it has packages named tests and scripts as well
    try:
        found = version("verl")
    except PackageNotFoundError:
        pytest.skip("verl is not installed; run tools/install/peers.sh to compare with it")
    if found != VERSION:
        pytest.skip(f"verl {found} is installed; these tests know {VERSION}")
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    with mock.patch.dict(os.environ), _stand_ins([name for name in NAMED_IN_ANNOTATIONS if find_spec(name) is None]):
        module = importlib.import_module(f"verl.trainer.ppo.{name}")
    root.handlers[:], root.level = handlers, level  # verl sets up logging when imported
    return module
