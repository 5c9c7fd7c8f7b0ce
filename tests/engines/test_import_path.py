"""What the processes of engines find: this package, their own packages, and nothing of training."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import warm_start
from tests.helpers.traces import needs_vllm
from verl_mg.engines.engine_options import inherited_environment
from verl_mg.engines.import_path.verl_mg import HIDDEN

PROGRAM = """
import importlib.util, json, sys, torch, verl_mg.engines.engine_host, verl_mg.recipes
print(json.dumps({
    "found": [name for name in sys.argv[1:] if importlib.util.find_spec(name)],
    "torch": torch.__file__,
    "package": verl_mg.__file__,
    "recipes": list(verl_mg.recipes.__path__),
}))
"""
NAMES = (*HIDDEN, "tests", "carried", "working_directory")


@pytest.fixture
def folders(tmp_path, monkeypatch) -> Path:
    """A working directory and a folder of PYTHONPATH, each with a module."""
    for name in ("carried", "working_directory"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.py").touch()
    checkout = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([checkout, str(tmp_path / "carried")]))
    monkeypatch.setenv("PYTHONHOME", str(tmp_path))
    return tmp_path


def seen(python: str | Path, environment: dict[str, str], folder: Path) -> dict[str, Any]:
    command = [str(python), "-c", PROGRAM, *NAMES]
    done = subprocess.run(command, cwd=folder / "working_directory", env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_vllm
@pytest.mark.nightly
def test_process_in_another_interpreter_finds_packages_of_it_and_no_other(folders):
    (folders / "carried" / "torch.py").write_text("raise ImportError('of the trainer')")
    (folders / "working_directory" / "torch.py").write_text("raise ImportError('of the working directory')")
    python = warm_start.VLLM_PYTHON
    found = seen(python, inherited_environment(python), folders)
    assert found["found"] == [] and Path(found["torch"]).is_relative_to(python.parents[1])
    root = Path(__file__).parents[2]
    assert (found["package"], found["recipes"]) == (f"{root}/verl_mg/__init__.py", [f"{root}/verl_mg/recipes"])


@pytest.mark.nightly
def test_process_in_this_interpreter_finds_folders_of_pythonpath_but_not_training(folders, monkeypatch):
    monkeypatch.delenv("PYTHONHOME")
    found = seen(sys.executable, inherited_environment(None), folders)
    assert found["found"] == ["tests", "carried"]
