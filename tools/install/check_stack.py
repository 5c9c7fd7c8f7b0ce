"""Checks an unpacked stack: every symbol of its libraries is defined, its packages can be imported; see unpack_stack.

The loader itself resolves all symbols of each library, with their versions, after what Python loads before it.
Where there is no driver, symbols of the driver may be undefined, and packages are imported over an empty one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from verl_mg.errors import UserError

LOADER = "/lib64/ld-linux-x86-64.so.2"
DRIVERS = ("libcuda.so.1", "libnvidia-ml.so.1")
OF_DRIVER = re.compile(r"cu(?!File)[A-Z]|nvml[A-Z]")
"""Beginnings of the names of functions of the driver; cuFile is a library of CUDA."""
NEVER_CALLED = {"cublasLtGroupedMatrixLayoutInit_internal"}
"""Functions of cuBLAS 13.3, called by Transformer Engine on Blackwell only; the pinned cuBLAS is older too."""
LOADED_BEFORE = {
    "torch/": ("torch/lib/libtorch_cuda.so",),
    "transformer_engine": ("nvidia/cu13/lib/libnvrtc.so.13", "transformer_engine/wheel_lib/libtransformer_engine.so"),
    "xgrammar/": ("tvm_ffi/lib/libtvm_ffi.so",),
}
"""Libraries that the packages of these paths load before others of theirs."""
IMPORTED = {
    "torch": """
        import torch, torchvision, torchaudio, triton, megatron.core, transformers, math_verify, pytest
        """,
    "transformer_engine": """
        import transformer_engine.pytorch, megatron.core.extensions.transformer_engine
        """,
    # An engine's process does not see the packages of training.
    "sglang": """
        import sys
        sys.modules["megatron"] = sys.modules["transformer_engine"] = None
        import sglang.srt.entrypoints.http_server, sglang.srt.managers.scheduler, sglang.srt.models.qwen3_moe
        """,
}
"""Programs of imports, each for another process, by the package that must be among the unpacked ones."""
# GPU: the modules see the real GPU and the real driver.
# GPU-TEST: tests/tools/test_bare_stack.py::test_stack_over_torch_2_11_imports_and_has_every_symbol
# GPU-RAN: not yet
PRETENDED = """
import torch
if not torch.cuda.is_available():
    from types import SimpleNamespace
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.get_device_name = lambda device=None: "NVIDIA H100"
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(
        major=9, minor=0, name="NVIDIA H100", total_memory=80 << 30, multi_processor_count=132, gcnArchName=""
    )
    torch.cuda._lazy_init = lambda: None
"""


def check(target: Path) -> None:
    """Prints what was checked; raises `UserError` with the first fault."""
    packages = (target / "packages").resolve()
    environment = _environment(target)
    undefined = undefined_symbols(packages, environment)
    for library, names in undefined.items():
        if rest := sorted(name for name in names - NEVER_CALLED if not OF_DRIVER.match(name)):
            listed = ", ".join(rest[:5])
            raise UserError(
                f"{library}: the loader does not find {listed}. Use a torch whose libraries of CUDA have it."
            )
    names = set().union(*undefined.values())
    driver = names - NEVER_CALLED
    print(f"{len(undefined)} libraries: no symbol is undefined but {len(driver)} of the driver")
    for name in names & NEVER_CALLED:
        print(f"{name} is undefined too, and never called")
    with TemporaryDirectory() as scratch:
        if driver:
            _write_driver(Path(scratch), driver)
            environment["LD_LIBRARY_PATH"] = f"{scratch}:{environment['LD_LIBRARY_PATH']}"
        for package, program in IMPORTED.items():
            if (packages / package).exists():
                _import(package, program, environment)


def _environment(target: Path) -> dict[str, str]:
    command = ["bash", "-c", 'source "$0" && env -0', str(target / "environment.sh")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return dict(line.split("=", 1) for line in printed.split("\0") if line)


def undefined_symbols(packages: Path, environment: Mapping[str, str]) -> dict[Path, set[str]]:
    """{library: names that the loader does not find} of all libraries below a folder that are not links."""
    libraries = list(_libraries(packages))
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        names = threads.map(lambda library: _undefined(packages, library, environment), libraries)
    return dict(zip(libraries, names, strict=True))


def _libraries(packages: Path) -> Iterator[Path]:
    for folder, _, names in os.walk(packages):
        for name in names:
            file = Path(folder, name)
            if ".so" in name and not file.is_symlink() and file.open("rb").read(4) == b"\x7fELF":
                yield file


def _undefined(packages: Path, library: Path, environment: Mapping[str, str]) -> set[str]:
    relative = str(library.relative_to(packages))
    before = [names for prefix, names in LOADED_BEFORE.items() if relative.startswith(prefix)]
    preloaded = [str(packages / name) for names in before for name in names if (packages / name).exists()]
    variables = {
        "LD_LIBRARY_PATH": f"{environment['LD_LIBRARY_PATH']}:{packages / 'torch' / 'lib'}",
        "LD_PRELOAD": ":".join([*preloaded, str(library)]),
        # What `ldd -r` sets, for Python as the program: its functions count as defined.
        **{"LD_TRACE_LOADED_OBJECTS": "1", "LD_WARN": "yes", "LD_BIND_NOW": "yes"},
    }
    command = [LOADER, os.path.realpath(sys.executable)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    printed = done.stdout + done.stderr
    name = re.escape(str(library))
    symbols = re.findall(rf"undefined symbol: ([^\s,]+).*\({name}\)", printed)
    versions = re.findall(rf"(version `.+?') not found \(required by {name}\)", printed)
    if f"object '{library}' from LD_PRELOAD cannot be preloaded" in printed:
        versions.append("a library for this machine in this file")
    return {*symbols, *versions, *re.findall(r"^\t(\S+) => not found", printed, re.M)} - {*DRIVERS}


def _write_driver(folder: Path, names: set[str]) -> None:
    """A driver that finds no device, so that libraries which need one are loaded."""
    (folder / "driver.c").write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name in sorted(names)))
    for library in DRIVERS:
        command = [
            "cc",
            "-shared",
            "-fPIC",
            f"-Wl,-soname,{library}",
            "-o",
            str(folder / library),
            str(folder / "driver.c"),
        ]
        subprocess.run(command, check=True)


def _import(package: str, program: str, environment: Mapping[str, str]) -> None:
    command = [sys.executable, "-W", "ignore", "-c", PRETENDED + textwrap.dedent(program)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        last = " ".join(done.stderr.strip().splitlines()[-1:])
        raise UserError(f"{package}: it cannot be imported: {last}. Install what is missing on this machine.")
    print(f"{package}: imported")
