"""Which attributes of loaded packages a statement replaces: compares modules and classes before and after it.

Runs as `python -m tests.helpers.replaced PACKAGES IMPORTS STATEMENT`, and prints a JSON list of names.
"""

import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

Attributes = dict[tuple[str, str], Any]


def attributes(packages: Sequence[str], inherited: bool) -> Attributes:
    """Attributes of the loaded modules of packages and of their classes, by owner and name."""
    found: Attributes = {}
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and module.__name__.partition(".")[0] in packages:
            for name, value in list(vars(module).items()):
                found[module.__name__, name] = value
                if isinstance(value, type) and value.__module__ == module.__name__:
                    owner = f"{value.__module__}.{value.__qualname__}"
                    classes = reversed(value.__mro__) if inherited else [value]
                    found |= {(owner, part): each for kind in classes for part, each in vars(kind).items()}
    return found


def replaced(before: Attributes, after: Attributes) -> Iterator[str]:
    """Names of functions, classes and flags that are others than before."""
    for (owner, name), value in after.items():
        old = before.get((owner, name), value)
        if old is not value and (callable(old) or isinstance(old, bool | int)):
            yield f"{owner}.{name}"


def main() -> None:
    """Imports the modules of IMPORTS, runs the statement and prints what it replaces in PACKAGES, and hides of them."""
    packages, imports, statement = sys.argv[1].split(","), sys.argv[2].split(","), sys.argv[3]
    for name in imports:
        importlib.import_module(name)
    before, hidden = attributes(packages, inherited=True), _hidden()
    variables: dict[str, Any] = {}
    exec(statement, variables)
    names = sorted(set(replaced(before, attributes(packages, inherited=False))))
    print(json.dumps([*names, *sorted(_hidden() - hidden)]))


def _hidden() -> set[str]:
    return {name for name, module in sys.modules.items() if module is None}


if __name__ == "__main__":
    main()
