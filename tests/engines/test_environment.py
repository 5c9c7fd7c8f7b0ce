"""What libraries change in a rank's environment only by being imported does not reach engines or training."""

import json
import os
import subprocess
import sys
import tempfile

import pytest
from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir

from tests.helpers.traces import needs_sglang
from verl_mg.engines.engine_options import CACHES, inherited_environment


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in CACHES:
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_inherited_environment_leaves_out_caches_that_torch_names(monkeypatch):
    cache_dir()  # as the first compiled function does
    monkeypatch.setenv("TRITON_CACHE_DIR", triton_cache_dir(0))
    assert set(CACHES) <= os.environ.keys() and not set(CACHES) & inherited_environment().keys()


def test_inherited_environment_keeps_caches_that_the_user_names(monkeypatch, folder):
    for name in CACHES:
        monkeypatch.setenv(name, str(folder / "mine"))
    cache_dir()
    assert {inherited_environment()[name] for name in CACHES} == {str(folder / "mine")}


@needs_sglang
def test_parsers_of_sglang_leave_the_environment_of_training_as_it_is():
    code = """
import json, os
from verl_mg.engines.sglang import internals
before = dict(os.environ)
parsers = internals.reply_parsers()
import sys
print(json.dumps([parsers is not None, "sglang" in sys.modules, dict(set(os.environ.items()) ^ set(before.items()))]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [True, True, {}]


def test_warnings_of_torch_are_shown_in_training():
    code = "import verl_mg.megatron, warnings\nwarnings.warn_explicit('beware', UserWarning, 'f.py', 1, 'torch.nn.f')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "UserWarning: beware" in done.stderr and "Apex" not in done.stderr
