"""What a package offers: the functions and classes that its modules define and it imports."""

from inspect import isclass, isfunction
from types import ModuleType


def offered(package: ModuleType) -> set[str]:
    """Names of the functions and classes of a package."""
    named = {name: value for name, value in vars(package).items() if isfunction(value) or isclass(value)}
    return {name for name, value in named.items() if value.__module__.startswith(f"{package.__name__}.")}
