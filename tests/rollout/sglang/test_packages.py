"""An engine's processes leave alone what is installed beside SGLang for training."""

import contextlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys

import pytest

from tests.traces import needs_sglang
from verl_mg.rollout.hidden_packages import HIDDEN, hide_training_packages
from verl_mg.rollout.sglang.arguments import ON_CPU
from verl_mg.rollout.sglang.engine import HOST

pytestmark = needs_sglang


@pytest.fixture(scope="module")
def spawned() -> dict[str, list[str]]:
    """See tests/rollout/sglang/packages_probe.py."""
    probe = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.rollout.sglang.packages_probe", HOST],
        env=os.environ | ON_CPU, capture_output=True, text=True,
    )  # fmt: skip
    assert probe.returncode == 0, probe.stderr[-3000:]
    return json.loads(probe.stdout.splitlines()[-1])


def required(distribution: str, extras: bool = False) -> set[str]:
    """Names of the distributions that one requires."""
    lines = importlib.metadata.requires(distribution) or ()
    return {re.split(r"[^\w-]", line)[0].lower() for line in lines if extras or "extra ==" not in line}


def with_all_they_require(distributions: set[str]) -> set[str]:
    """The distributions and all that they require, as far as they are installed."""
    found, unread = set(distributions), list(distributions)
    while unread:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            new = required(unread.pop()) - found
            found |= new
            unread += new
    return found


def test_scheduler_imports_no_package_that_only_training_requires(spawned):
    of_training = required("verl-mg", extras=True) - with_all_they_require({"sglang"})
    packages_of = importlib.metadata.packages_distributions()
    found = {
        package
        for package in spawned["packages"]
        if of_training & {distribution.lower() for distribution in packages_of.get(package, ())}
    }
    assert {"megatron-core", "transformer-engine", "mpi4py", "wandb"} <= of_training
    assert "sglang" in spawned["packages"] and not found


def test_scheduler_keeps_the_hook_that_releases_cuda_graphs(spawned):
    assert not spawned["memory_saver"] and not set(HIDDEN) & set(spawned["packages"])


def test_hide_after_an_import_raises(monkeypatch):
    monkeypatch.setitem(sys.modules, HIDDEN[0], sys)
    with pytest.raises(RuntimeError, match=HIDDEN[0]):
        hide_training_packages()
