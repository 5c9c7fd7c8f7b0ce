"""Versions of the packages that a job uses, and whether they fit together."""

from __future__ import annotations

import importlib
import platform
import re
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, requires, version

import torch
from packaging.requirements import Requirement

PACKAGES = ("megatron-core", "transformer-engine", "apex", "sglang", "transformers")
PINNED_BY_SGLANG = ("torch", "transformers", "tokenizers")
"""Packages of which SGLang and training share one version, because they share an environment."""
INSTALL = "Install launch/requirements-gpu.txt, in which all versions fit together"


def installed_versions() -> dict[str, str]:
    """Returns the versions of Python, torch, CUDA, NCCL and the packages, "none" for what is not there."""
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


def version_problems(on_gpus: bool) -> Iterator[str]:
    """Yields what does not fit together; GPUs need the packages of the extras gpu and sglang."""
    extras = ("", "gpu", "sglang") if on_gpus else ("",)
    yield from unmet(_requirements("verl-mg"), extras)
    shared = [each for each in _requirements("sglang") if each.name in PINNED_BY_SGLANG]
    yield from (f"SGLang needs {problem}" for problem in unmet(shared, ("",)))
    if on_gpus:
        yield from _import_problems()


def unmet(requirements: Iterable[Requirement], extras: Iterable[str]) -> Iterator[str]:
    """Yields a line for each requirement that the installed packages do not meet; "" is the extra of the others."""
    for wanted in requirements:
        if wanted.marker and not any(wanted.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        current = installed(wanted.name)
        if current is None or not wanted.specifier.contains(current, prereleases=True):
            state = f"{current} is installed" if current else "it is not installed"
            yield f"{wanted.name}{wanted.specifier}: {state}. {INSTALL}."


def _requirements(package: str) -> list[Requirement]:
    return [Requirement(line) for line in requires(package) or ()] if installed(package) else []


def _import_problems() -> Iterator[str]:
    # Metadata do not say for which CUDA a library was built; its import does.
    for module in ("transformer_engine.pytorch", "sglang"):
        try:
            importlib.import_module(module)
        except Exception as error:  # a library of another CUDA raises many kinds
            reason = re.sub(r"\s+", " ", str(error))
            yield f"{module}: cannot be imported ({type(error).__name__}: {reason}). {INSTALL}."
