"""No result depends on the instructions of the CPU: a selection of tests where libraries are held to fewer of them."""

import os
import subprocess
import sys

import pytest

SETTINGS = {
    "torch without vectors": {"ATEN_CPU_CAPABILITY": "default"},
    "torch with AVX2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "oneDNN and MKL with AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
}
SELECTION = (
    *("algorithms", "fsdp/test_training.py", "megatron/test_losses.py", "megatron/test_model_runner.py"),
    *("megatron/test_muon.py", "recipes/test_golden.py", "recipes/test_invariance.py", "engines/hf", "training"),
)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("setting", SETTINGS)
def test_tests_of_numbers_pass_where_libraries_are_held_to_fewer_instructions(setting):
    files = [f"{os.path.dirname(__file__)}/{name}" for name in SELECTION]
    command = [sys.executable, "-m", "pytest", *files, "-p", "no:xdist", "-p", "no:cacheprovider"]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")} | SETTINGS[
        setting
    ]
    run = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-5000:]
