"""Unpacks the pieces of bare_stack.sh on a GPU machine; see unpack_stack.sh.

TARGET/packages gets the packages, and links to the libraries of CUDA that the machine's own torch came with;
TARGET/environment.sh sets the variables that put both before what the machine has.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.install import pieces
from tools.install.check_stack import check
from verl_mg.errors import EXIT_CODE, UserError

ENVIRONMENT = "environment.sh"


def unpack(folder: Path, target: Path) -> None:
    """Makes TARGET/packages and TARGET/environment.sh; what is of the same pieces already stays."""
    manifest, packages = target / pieces.MANIFEST, target / "packages"
    if _same(folder / pieces.MANIFEST, manifest) and (target / ENVIRONMENT).exists():
        print(f"{target}: these pieces are unpacked there already")
        return
    started = time.monotonic()
    libraries = dict(_libraries(target))
    for leftover in (manifest, target / ENVIRONMENT):
        leftover.unlink(missing_ok=True)
    shutil.rmtree(packages, ignore_errors=True)
    pieces.unpack(folder, packages)
    for name, library in libraries.items():
        # What travels, such as NCCL, comes before the machine's.
        if not (packages / "nvidia" / name).exists():
            (packages / "nvidia" / name).symlink_to(library)
    shutil.copy(folder / pieces.MANIFEST, manifest)
    # Last, so that an interrupted unpacking is done again.
    (target / ENVIRONMENT).write_text("".join(f"{line}\n" for line in environment(packages)))
    print(f"{target}: unpacked in {time.monotonic() - started:.0f} s; source {target / ENVIRONMENT}")


def _same(first: Path, second: Path) -> bool:
    return first.is_file() and second.is_file() and first.read_bytes() == second.read_bytes()


def _libraries(target: Path) -> Iterator[tuple[str, Path]]:
    """Folders of NVIDIA's libraries in this Python's packages; what it prefers comes last."""
    roots = [Path(path, "nvidia").resolve() for path in reversed(sys.path)]
    # With TARGET/environment.sh in effect, what an earlier unpacking linked is found too.
    roots = [root for root in roots if root.is_dir() and not root.is_relative_to(target.resolve())]
    if not any((root / "cu13").is_dir() for root in roots):
        raise UserError(
            f"{sys.executable}: it has no libraries of CUDA 13. Use the Python that has torch 2.11 for CUDA 13."
        )
    return ((folder.name, folder) for root in roots for folder in root.iterdir() if folder.is_dir())


def environment(packages: Path) -> Iterator[str]:
    """Lines of a shell script that puts the packages, and the libraries below them, before the machine's."""
    packages = packages.resolve()
    yield "# To be sourced: the stack that unpack_stack.sh unpacked, before the packages of this machine."
    # Python reads .pth files in its own folders only; they name further folders, or are programs that do.
    program = (
        "import sys; at = {*sys.path}; import site; site.addsitedir(sys.argv[1]); print(*{*sys.path} - at, sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-IS", "-c", program, packages], capture_output=True, text=True, check=True)
    yield _before("PYTHONPATH", sorted(map(Path, done.stdout.splitlines())))
    yield _before("LD_LIBRARY_PATH", sorted(packages.glob("nvidia/*/lib")))
    # torch was built with a newer cuDNN than the machine has.
    yield "export PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK=1"
    # Transformer Engine compiles kernels of norms when they first run.
    yield f"export NVTE_CUDA_INCLUDE_DIR={shlex.quote(str(_cuda_headers(packages)))}"
    # A function of cuBLAS 13.3 is missing in the machine's, and is never called.
    yield "unset LD_BIND_NOW"


def _before(variable: str, folders: Sequence[Path]) -> str:
    joined = ":".join(map(str, folders))
    return f'export {variable}={shlex.quote(joined)}"${{{variable}:+:${variable}}}"'


def _cuda_headers(packages: Path) -> Path:
    """The complete headers of a toolkit with nvcc if there is one, otherwise of torch's packages."""
    toolkits = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    if nvcc := shutil.which("nvcc"):
        toolkits.insert(1, str(Path(nvcc).resolve().parents[1]))
    folders = (Path(toolkit, "include") for toolkit in toolkits if toolkit)
    complete = (headers for headers in folders if (headers / "cuda_runtime.h").exists())
    return next(complete, packages / "nvidia" / "cu13" / "include")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="unpack_stack.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="with the pieces and manifest.json")
    parser.add_argument("target", type=Path, help="folder that is made")
    parser.add_argument("--check", action="store_true", help="import the packages, and look for undefined symbols")
    options = parser.parse_args(arguments)
    try:
        unpack(options.folder, options.target)
        if options.check:
            check(options.target)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CODE
    return 0


if __name__ == "__main__":
    sys.exit(main())
