"""On the path of processes that a test starts, so that they ignore the key of tests/helpers/ignored_key.py too."""

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

CONFIG = "verl_mg.config"


class AfterConfig:
    """A finder of modules that ignores the key as soon as the configuration is imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != CONFIG:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        loader, run = spec.loader, spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            from tests.helpers.ignored_key import ignore

            ignore(os.environ["IGNORED_KEY"])

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if "IGNORED_KEY" in os.environ:
    sys.meta_path.insert(0, AfterConfig())  # type: ignore[arg-type]
