"""Import of a module at its first use: configuration, plans and recipes are read without the seconds that torch takes.

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")
"""

import importlib
import sys
from typing import Any


def lazy_import(name: str) -> Any:
    """Returns a module, or a placeholder that imports it and gives it its own variables in the caller's module."""
    module = sys.modules.get(name)
    # In a rank torch is there first, so that compiled functions see it and no placeholder. A module that another thread
    # is importing has only some of its contents.
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        return module
    return _Placeholder(name, sys._getframe(1).f_globals)


class _Placeholder:
    """A module that is not imported yet; it is not in `sys.modules`, where libraries look for what is installed."""

    def __init__(self, name: str, variables: dict[str, Any]) -> None:
        self._name, self._variables = name, variables

    def __getattr__(self, attribute: str) -> Any:
        module = importlib.import_module(self._name)
        for variable, value in list(self._variables.items()):
            if value is self:
                self._variables[variable] = module
        return getattr(module, attribute)
