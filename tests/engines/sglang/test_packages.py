"""An engine's processes leave alone what is installed beside SGLang for training."""

import contextlib
import importlib.metadata
import os
import re
import sys

import pytest

from tests.helpers import warm_start
from tests.helpers.internals import printed
from tests.helpers.launched import ROOT
from tests.helpers.traces import needs_sglang
from verl_mg.engines.engine_options import IMPORT_PATH, inherited_environment
from verl_mg.engines.import_path.verl_mg import HIDDEN, hide_training_packages
from verl_mg.engines.kinds import SGLANG
from verl_mg.engines.sglang.arguments import ON_CPU

pytestmark = needs_sglang


def probe(python: str, work: str) -> dict[str, list[str]]:
    environment = inherited_environment(None) | {"PYTHONPATH": os.pathsep.join([IMPORT_PATH, str(ROOT)])} | ON_CPU
    return printed(python, "tests.engines.sglang.packages_probe", SGLANG.host, work, env=environment)


@pytest.fixture(scope="module", params=["forked", pytest.param("spawned", marks=pytest.mark.nightly)])
def scheduler(request) -> dict[str, list[str]]:
    """What a scheduler has imported: as a fork of the server of the tests' engines, or spawned as SGLang does it.

    The server hides the same packages before it imports the same modules, and more of SGLang's, once for all tests.
    """
    return probe(warm_start.sglang().python if request.param == "forked" else sys.executable, "import")


def required(distribution: str, extras: bool = False) -> set[str]:
    lines = importlib.metadata.requires(distribution) or ()
    return {re.split(r"[^\w-]", line)[0].lower() for line in lines if extras or "extra ==" not in line}


def with_all_they_require(distributions: set[str]) -> set[str]:
    found, unread = set(distributions), list(distributions)
    while unread:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            new = required(unread.pop()) - found
            found |= new
            unread += new
    return found


def test_scheduler_imports_no_package_that_only_training_requires(scheduler):
    of_training = required("verl-mg", extras=True) - with_all_they_require({"sglang"})
    packages_of = importlib.metadata.packages_distributions()
    found = {
        package
        for package in scheduler["packages"]
        if of_training & {distribution.lower() for distribution in packages_of.get(package, ())}
    }
    assert {"megatron-core", "transformer-engine", "mpi4py", "wandb"} <= of_training
    assert "sglang" in scheduler["packages"] and not found


def test_scheduler_keeps_the_hook_that_releases_cuda_graphs(scheduler):
    assert not scheduler["memory_saver"] and not set(HIDDEN) & set(scheduler["packages"])


def test_spawned_process_hides_packages_before_it_imports_sglang():
    begun = probe(sys.executable, "begin")
    assert set(HIDDEN) <= set(begun["hidden"]) and not {*HIDDEN, "sglang"} & set(begun["packages"])


def test_hide_after_an_import_raises(monkeypatch):
    monkeypatch.setitem(sys.modules, HIDDEN[0], sys)
    with pytest.raises(RuntimeError, match=HIDDEN[0]):
        hide_training_packages()
