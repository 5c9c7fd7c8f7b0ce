"""What users install: the ranges of setup.py, the files of pinned versions, the wheel, and how a Python is found."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import zipfile
from collections.abc import Iterable
from distutils.core import run_setup  # that of setuptools
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.helpers.launched import ROOT
from tests.helpers.tiny_models import nightly
from tests.helpers.traces import needs_vllm
from tests.helpers.warm_start import VLLM_PYTHON

INSTALL = ROOT / "tools" / "install"
GPU_LOCK, CPU_LOCK = ROOT / "launch" / "requirements-gpu.txt", INSTALL / "requirements-cpu.txt"
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


@pytest.mark.nightly
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


def commands(document: str) -> str:
    """The shell commands that a document shows for Transformer Engine."""
    text = (ROOT / document).read_text()
    if document.endswith(".md"):
        (block,) = [part for part in text.split("\n\n") if "--no-build-isolation -r" in part]
        return textwrap.dedent(block)
    joined = text.replace("\\\n", " ").splitlines()
    (line,) = [line for line in joined if line.startswith("RUN ") and "--no-build-isolation -r" in line]
    return line.removeprefix("RUN ")


# The build of Transformer Engine prints the variable instead; nothing is installed.
INSTEAD = r"""
uv() { case "$*" in *--no-build-isolation\ -r*) printenv CPLUS_INCLUDE_PATH >"$OLDPWD/printed"; exit ;; esac; }
source() { :; }
"""


def include_path(document: str, folder: Path) -> str:
    """CPLUS_INCLUDE_PATH with which the commands of a document build Transformer Engine."""
    script = INSTEAD + commands(document).replace("/tmp/", f"{folder}/")
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OLDPWD": str(folder)}
    subprocess.run(["bash", "-c", script], cwd=ROOT, env=environment, check=False)
    return (folder / "printed").read_text().strip()


@pytest.fixture(scope="module")
def transformer_engine(tmp_path_factory) -> Path:
    """The source of Transformer Engine's torch part that is pinned, unpacked."""
    folder, name = tmp_path_factory.mktemp("te"), "transformer-engine-torch"
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-binary", name, "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, f"{name}=={pins(GPU_LOCK)[name]}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"Transformer Engine's source cannot be downloaded: {done.stderr.strip()[-200:]}")
    (archive,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(archive, folder, filter="data")
    return next(path for path in folder.iterdir() if path.is_dir())


def preprocessed(source: Path, include_path: str) -> str:
    """Errors of the compiler in the headers of Transformer Engine, with the folders of `build_tools/pytorch.py`."""
    purelib = Path(sysconfig.get_path("purelib"))
    # In place of a whole CUDA toolkit, which has neither NCCL nor cuDNN.
    toolkit = [
        Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include",
        purelib / "nvidia" / "cu13" / "include",
    ]
    headers = source / "common_headers"
    torch = purelib / "torch" / "include"
    folders = [*toolkit, headers, headers / "common", headers / "common" / "include", source / "csrc", torch]
    folders += [torch / "torch" / "csrc" / "api" / "include", Path(sysconfig.get_path("include"))]
    command = ["g++", "-std=c++20", "-E", "-x", "c++", *(f"-I{folder}" for folder in folders)]
    environment = os.environ | {"CPLUS_INCLUDE_PATH": include_path}
    done = subprocess.run(
        [*command, "-o", "/dev/null", source / "csrc" / "extensions.h"], env=environment, capture_output=True, text=True
    )
    return done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("document", ["docs/install_on_gpus.md", "launch/Dockerfile"])
def test_transformer_engine_finds_its_headers_with_the_commands_of_the_documents(
    transformer_engine, tmp_path, document
):
    if not shutil.which("g++") or not (Path(sysconfig.get_path("purelib")) / "nvidia" / "nccl" / "include").is_dir():
        pytest.skip("there is no g++, or this torch is not one for CUDA, which brings NCCL's headers")
    assert "nccl.h: No such file" in preprocessed(transformer_engine, "")
    assert preprocessed(transformer_engine, include_path(document, tmp_path)) == ""


def required(names: Iterable[str], found: set[str]) -> set[str]:
    """Adds the packages of the names, and those that they require here, torch's own excepted."""
    for name in map(canonicalize_name, names):
        if name not in found:
            found.add(name)
            own = map(Requirement, () if name == "torch" else requires(name) or ())
            required((each.name for each in own if each.marker is None or each.marker.evaluate({"extra": ""})), found)
    return found


def test_bare_machine_with_the_carried_wheels_has_what_the_project_requires():
    carried = re.search(r"names=\((.*?)\)", (INSTALL / "bare_wheels.sh").read_text(), re.S)[1].split()
    there = {*pins(INSTALL / "requirements-bare-machine.txt"), *carried}
    ours = map(Requirement, run_setup(str(ROOT / "setup.py"), stop_after="init").install_requires)
    wanted = [each.name for each in ours if each.marker is None or each.marker.evaluate()]
    # A system has time zones of its own, and the machine's python-dateutil requires nothing.
    absent = {"tzdata", "six"}
    assert required([*wanted, "pytest", "pytest-timeout", "hypothesis"], {*absent}) - there == absent
    assert not {*carried} - {"transformers"} & pins(INSTALL / "requirements-bare-machine.txt").keys()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of the checkout, built in a copy, as the build writes next to setup.py."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT / "recipes", source / "recipes", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "verl_mg", source / "verl_mg", symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "setup.py", source)
    build = ["-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    subprocess.run([sys.executable, *build], check=True, capture_output=True)
    (file,) = folder.glob("*.whl")
    return file


def test_wheel_has_the_recipes_their_configurations_and_the_page(wheel):
    packed = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    tracked = subprocess.run(["git", "ls-files", "verl_mg", "recipes"], cwd=ROOT, capture_output=True, text=True).stdout
    if not tracked:
        pytest.skip("not a checkout")
    files = [name for name in tracked.split() if not name.endswith(".md") and (ROOT / name).is_file()]
    assert set(packed) >= {f"verl_mg/{name}" if name.startswith("recipes/") else name for name in files}
    assert {name.split("/")[0] for name in packed} == {"verl_mg"}


def test_checkout_has_no_link_out_of_it():
    listed = subprocess.run(["git", "ls-files", "--stage"], cwd=ROOT, capture_output=True, text=True).stdout
    links = [line.partition("\t")[2] for line in listed.splitlines() if line.startswith("120000")]
    assert not [link for link in links if not (ROOT / link).resolve().is_relative_to(ROOT)]


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
    print(verl_mg.__file__, verl_mg.recipes.grpo.KLConfig.__module__, sep="\\n")
"""


@pytest.mark.parametrize("installed", [*nightly("checkout", "editable"), "wheel"])
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
    lines = done.stdout.splitlines()
    assert (done.stderr, lines) == ("", [f"{source}/verl_mg/__init__.py", "verl_mg.recipes.common.kl"])


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
    few = [
        "algorithm.prompts_per_iteration=2",
        "algorithm.group_size=2",
        "data.test=d/test.jsonl",
        "evaluation.every=0",
    ]
    done = run("-m", "verl_mg", "train", "grpo", "--config", "quickstart_grpo", *inputs, *few)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "empty" / "runs" / "x" / "metrics.jsonl").read_text().count("\n") == 1
    assert "no such recipe" in run("-m", "verl_mg", "train", "grpp").stderr


OF_ENGINE = """
import sys, msgspec, torch, verl_mg.engines.engine_host
absent = [name for name, module in sys.modules.items() if not module]
print(verl_mg.__file__, msgspec.__file__, torch.__file__, *absent, sep="\\n")
"""
START = """
import os, sys
from pathlib import Path
from verl_mg.engines.engine_options import inherited_environment
os.execve(sys.argv[1], [sys.argv[1], "-c", sys.argv[2]], inherited_environment(Path(sys.argv[1])))
"""


@needs_vllm
@pytest.mark.nightly
def test_engine_started_by_an_installed_wheel_imports_only_packages_of_its_interpreter(wheel, tmp_path):
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    (site / "msgspec.py").write_text("raise ImportError('built for another torch')")
    command = [sys.executable, "-c", START, str(VLLM_PYTHON), OF_ENGINE]
    variables = os.environ | {"PYTHONPATH": str(site)}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
    package, *of_vllm, megatron, _, _, _ = done.stdout.splitlines() or [done.stderr, *"0000"]
    assert (package, megatron) == (f"{site}/verl_mg/__init__.py", "megatron")
    assert all(Path(file).is_relative_to(VLLM_PYTHON.parents[1]) for file in of_vllm)


def found_python(path: Path, pyenv: Path, **variables: str) -> str:
    """What launch/environment.sh makes an environment with."""
    functions = ROOT / "launch" / "python.sh"
    done = subprocess.run(
        ["bash", "-c", 'set -euo pipefail; source "$1"; find_python', "bash", functions],
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
