"""What users install: the ranges of setup.py, the files of pinned versions, the wheel, and how a Python is found."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from distutils.core import run_setup  # that of setuptools
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.helpers.launched import ROOT

GPU_LOCK, CPU_LOCK = ROOT / "launch" / "requirements-gpu.txt", ROOT / "tools" / "install" / "requirements-cpu.txt"
UV = Path(sys.prefix) / "bin" / "uv"
OF_EXTRAS = ["--extra", "gpu", "--extra", "sglang", "--extra", "mcp", "--extra", "trackers"]
COMPILE = ["pip", "compile", "--quiet", "--no-header", "--no-annotate", "--python-version", "3.12", "setup.py"]


def pins(file: Path) -> dict[str, str]:
    lines = [line.partition(";")[0].strip() for line in file.read_text().splitlines() if "==" in line]
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def extra(name: str) -> list[Requirement]:
    wanted = map(Requirement, run_setup(str(ROOT / "setup.py"), stop_after="init").extras_require[name])
    return [each for each in wanted if each.marker is None or each.marker.evaluate()]


def uv(*arguments: str) -> str:
    if not UV.exists():
        pytest.skip("uv is not installed")
    done = subprocess.run([UV, *arguments], cwd=ROOT, capture_output=True, text=True)
    if "error sending request" in done.stderr:
        pytest.skip("the package index cannot be reached")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_extras_for_gpus_resolve_to_the_pinned_versions(tmp_path):
    lock = shutil.copy(GPU_LOCK, tmp_path)
    platform = ["--python-platform", "x86_64-manylinux_2_39"]
    uv(*COMPILE, *OF_EXTRAS, *platform, "--output-file", lock)
    assert pins(Path(lock)) == pins(GPU_LOCK)


def test_transformer_engine_has_range_and_extras_of_megatron_core():
    (ours,) = extra("gpu")
    named = [Requirement(line) for line in requires("megatron-core") or ()]
    (theirs,) = [each for each in named if each.name == ours.name]
    assert ours.extras == theirs.extras
    assert str(theirs.specifier) in ("", str(ours.specifier))


def test_pins_are_those_that_sglang_shares_with_training():
    try:
        version("sglang")
    except PackageNotFoundError:
        pytest.skip("SGLang is installed by tools/install/sglang_cpu.sh")
    shared = [
        each for each in map(Requirement, requires("sglang")) if each.name in ("torch", "transformers", "tokenizers")
    ]
    assert len(shared) == 3
    for lock in (GPU_LOCK, CPU_LOCK):
        for each in shared:
            assert each.specifier.contains(pins(lock)[each.name]), (lock, each)
    assert pins(GPU_LOCK)["megatron-core"] == pins(CPU_LOCK)["megatron-core"]


@pytest.fixture
def wheel(tmp_path) -> Path:
    """The wheel of the checkout, built in a copy, as the build writes next to setup.py."""
    source = tmp_path / "source"
    shutil.copytree(ROOT / "recipes", source / "recipes", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "verl_mg", source / "verl_mg", symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "setup.py", source)
    build = ["-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run([sys.executable, *build], check=True, capture_output=True)
    (file,) = tmp_path.glob("*.whl")
    return file


def test_wheel_has_the_recipes_their_configurations_and_the_page(wheel):
    packed = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    tracked = subprocess.run(["git", "ls-files", "verl_mg", "recipes"], cwd=ROOT, capture_output=True, text=True).stdout
    if not tracked:
        pytest.skip("not a checkout")
    files = [name for name in tracked.split() if not name.endswith(".md") and (ROOT / name).is_file()]
    assert set(packed) >= {f"verl_mg/{name}" if name.startswith("recipes/") else name for name in files}
    assert {name.split("/")[0] for name in packed} == {"verl_mg"}


NAMES = """
import site, sys
site.addsitedir(sys.argv[1])
sys.path.append(sys.argv[2])
import verl_mg.recipes.common.kl, verl_mg.recipes.grpo
from verl_mg.job.recipe import load_recipe
from verl_mg.config.roles import RolloutConfig
from verl_mg.job.build_agents import load_agent
assert load_recipe("grpo").config is verl_mg.recipes.grpo.Config is load_recipe("recipes/grpo.py").config
assert load_recipe("mine.py").config.__module__ == "recipe_mine"
assert load_agent(RolloutConfig(agent="harbor")).__module__ == "verl_mg.recipes.environments.harbor"
try:
    import recipes.grpo
except ImportError:
    print(verl_mg.__file__, verl_mg.recipes.grpo.KLConfig.__module__)
"""


@pytest.mark.parametrize("installed", ["checkout", "editable", "wheel"])
def test_recipes_have_one_name_however_the_package_is_installed(installed, tmp_path, request):
    site = source = ROOT
    if installed == "wheel":
        site = source = tmp_path / "site"
        zipfile.ZipFile(request.getfixturevalue("wheel")).extractall(site)
    elif installed == "editable":
        site, source = tmp_path / "site", tmp_path / "checkout"
        shutil.copytree(ROOT, source, symlinks=True, ignore=shutil.ignore_patterns(".*", "docs", "tests"))
        options = ["--no-deps", "--no-build-isolation", "--target", str(site)]
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", *options, "-e", str(source)], check=True)
    shutil.copy(ROOT / "recipes" / "grpo.py", tmp_path / "mine.py")
    done = subprocess.run(
        # Without the hooks of this environment, which may have the checkout installed already.
        [sys.executable, "-S", "-c", NAMES, str(site), sysconfig.get_path("purelib")],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
    )
    assert (done.stderr, done.stdout.split()) == ("", [f"{source}/verl_mg/__init__.py", "verl_mg.recipes.common.kl"])


@pytest.mark.nightly
def test_installed_wheel_in_an_empty_folder_trains_by_names_of_recipes(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    (tmp_path / "empty").mkdir()
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site"), "OMP_NUM_THREADS": "1"}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=tmp_path / "empty", env=environment, capture_output=True, text=True)

    program = "from verl_mg.quickstart import *; from pathlib import Path; make_model(Path('m')); write_sums(Path('d'))"
    assert run("-c", program).returncode == 0
    inputs = ["model.path=m", "data.train=d/train.jsonl", "job.output=runs/x", "job.iterations=1"]
    few = ["algorithm.prompts_per_iteration=2", "algorithm.group_size=2", "data.test=null"]
    done = run("-m", "verl_mg", "train", "grpo", "--config", "quickstart_grpo", *inputs, *few)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "empty" / "runs" / "x" / "metrics.jsonl").read_text().count("\n") == 1
    assert "no such recipe" in run("-m", "verl_mg", "train", "grpp").stderr


def found_python(path: Path, pyenv: Path, **variables: str) -> str:
    """What launch/environment.sh makes an environment with."""
    functions = ROOT / "launch" / "python.sh"
    done = subprocess.run(
        ["bash", "-c", f"set -euo pipefail; source {functions}; find_python"],
        env={"PATH": f"{path}:/usr/bin:/bin", "PYENV_ROOT": str(pyenv), "HOME": str(path)} | variables,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip() or done.stderr


def pretend_python(file: Path, answer: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{answer}\n")
    file.chmod(0o755)
    return file


def test_python_of_pyenv_is_found_behind_a_shim_that_does_not_run(tmp_path):
    pretend_python(tmp_path / "bin" / "python3.12", "echo command not found >&2; exit 127")
    pretend_python(tmp_path / "bin" / "python3", "echo 3.11")
    pretend_python(tmp_path / "pyenv/versions/3.11.9/bin/python3", "echo 3.11")
    of_pyenv = pretend_python(tmp_path / "pyenv/versions/3.12.4/bin/python3", "echo 3.12")
    assert found_python(tmp_path / "bin", tmp_path / "pyenv") == str(of_pyenv)


def test_python_311_is_taken_where_no_newer_one_is_found(tmp_path):
    pretend_python(tmp_path / "bin" / "python3.12", "exit 127")
    pretend_python(tmp_path / "bin" / "python3", "echo 3.14")
    pretend_python(tmp_path / "bin" / "python3.13", "exit 127")
    old = pretend_python(tmp_path / "bin" / "python3.11", "echo 3.11")
    assert found_python(tmp_path / "bin", tmp_path / "pyenv") == str(old)


def test_python_of_the_variable_comes_before_a_newer_one(tmp_path):
    pretend_python(tmp_path / "bin" / "python3.12", "echo 3.12")
    chosen = pretend_python(tmp_path / "python", "echo 3.11")
    assert found_python(tmp_path / "bin", tmp_path / "pyenv", PYTHON=str(chosen)) == str(chosen)
    assert found_python(tmp_path / "bin", tmp_path / "pyenv", PYTHON="none").startswith("error: no Python 3.11, 3.12")


def test_dockerfile_has_no_findings_of_the_linter():
    linter = Path(sys.prefix) / "bin" / "hadolint"
    if not linter.exists():
        pytest.skip("hadolint is not installed")
    done = subprocess.run([linter, ROOT / "launch" / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_dockerfile_copies_what_the_build_reads():
    lines = (ROOT / "launch" / "Dockerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert {"setup.py", "verl_mg", "recipes", "launch/requirements-gpu.txt"} == set(copied)
    assert all((ROOT / name).exists() for name in copied)


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_fallback_environment_of_python_311_is_made_and_trains(tmp_path):
    python = shutil.which("python3.11") or pytest.skip("there is no Python 3.11")
    checkout = tmp_path / "checkout"
    subprocess.run(["git", "clone", "--quiet", "--local", ROOT, checkout], check=True)
    selected = ["tests/megatron/test_cpu_shim.py", "tests/megatron/test_model_runner.py", "tests/test_quickstart.py"]
    script = f"source launch/environment.sh; python --version; python -m pytest -q {' '.join(selected)}"
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        ["bash", "-c", f"set -euo pipefail; {script}"],
        cwd=checkout, env=environment | {"PYTHON": python}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "Python 3.11" in done.stdout and "megatron-core==0.16.1" in done.stdout
