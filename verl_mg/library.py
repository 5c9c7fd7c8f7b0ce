"""Installed packages, and libraries whose internals this project uses and replaces, for the versions it knows."""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from verl_mg.errors import UserError

PACKAGES = ("megatron-core", "transformer-engine", "apex", "sglang", "transformers")


def is_installed(package: str) -> bool:
    """Returns whether a package can be imported; a folder of its name on the path without Python's files is none."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


@dataclass(frozen=True)
class Library:
    """A library, of which other versions are refused: what is used of it may have another place or meaning there.

    Library("SGLang", "0.5.30", ("0.5.23",), "Install SGLang 0.5.23.").check()
    UserError: SGLang 0.5.30: not supported. Install SGLang 0.5.23.
    """

    name: str
    version: str  # version that is installed
    supported: tuple[str, ...]  # beginnings of the versions that the project is tested with
    remedy: str  # what to install instead

    def check(self) -> None:
        """Raises UserError where another version is installed."""
        if not self.version.startswith(self.supported):
            raise UserError(f"{self.name} {self.version}: not supported. {self.remedy}")

    def replace(self, owner: Any, **values: Any) -> None:
        """Replaces attributes of a module, class or object; UserError where it has none of that name."""
        for name, value in values.items():
            if not hasattr(owner, name):
                raise UserError(f"{self.name} {self.version}: {owner!r:.99} has no {name}. {self.remedy}")
            setattr(owner, name, value)

    @contextmanager
    def replaced(self, owner: Any, **values: Any) -> Iterator[None]:
        """Context manager: attributes of a module or class are replaced, and restored at the end."""
        previous = {name: vars(owner)[name] for name in values if name in vars(owner)}
        self.replace(owner, **values)
        try:
            yield
        finally:
            for name in values:
                if name in previous:
                    setattr(owner, name, previous[name])
                else:  # a class had it from its base
                    delattr(owner, name)


def installed_versions() -> dict[str, str]:
    """Returns the versions of Python, torch, CUDA, NCCL and the packages, "none" for what is not there."""
    import torch  # engines' processes read this module before their own libraries

    # GPU: NCCL's version as it runs; on the CPU that of the installed package.
    # GPU-TEST: tests/test_doctor.py::test_doctor_of_one_process_in_the_tested_environment_finds_nothing
    # GPU-RAN: not yet
    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else ()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or "none",
        "NCCL": ".".join(map(str, nccl)) or installed("nvidia-nccl-cu13") or "none",
        **{package: installed(package) or "none" for package in PACKAGES},
    }


def installed(package: str) -> str | None:
    """Returns the version of an installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
