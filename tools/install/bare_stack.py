"""Packs what travels to a GPU machine that has torch but no package registry; bare_stack.sh calls it.

python -m tools.install.bare_stack requirements             what is to be installed for it
python -m tools.install.bare_stack pack SITE_PACKAGES TREE OUTPUT
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from fnmatch import fnmatch
from importlib.metadata import distributions
from pathlib import Path

from tools.install import pieces
from tools.install.fat_binaries import blanked
from verl_mg.errors import EXIT_CODE, UserError

ROOT = Path(__file__).parents[2]
PINNED = (
    ROOT / "launch" / "requirements-gpu.txt",
    ROOT / "tools" / "install" / "requirements-cpu.txt",
    ROOT / "tools" / "install" / "requirements-liger.txt",
)
"""Versions of what travels; the second file has the tests' packages, the third a peer's."""
PARTS = {
    "torch": """
        torch triton nvidia-nccl-cu13 torchvision torchaudio megatron-core transformers tokenizers
        pydantic pydantic-core annotated-types typing-inspection starlette uvicorn tenacity
        math-verify latex2sympy2-extended antlr4-python3-runtime
        pytest pytest-timeout pluggy iniconfig hypothesis sortedcontainers
        """,
    "transformer-engine": """
        transformer-engine transformer-engine-cu13 transformer-engine-torch nvdlfw-inspect importlib-metadata
        """,
    "sglang": """
        sglang sglang-kernel sgl-deep-gemm torch-memory-saver xgrammar quack-kernels apache-tvm-ffi
        nvidia-cutlass-dsl nvidia-cutlass-dsl-libs-base nvidia-cutlass-dsl-libs-core nvidia-cutlass-dsl-libs-cu13
        compressed-tensors gguf fastapi python-multipart openai distro sniffio watchfiles pyzmq msgspec orjson
        opentelemetry-api opentelemetry-sdk opentelemetry-semantic-conventions ipython traitlets loguru dill
        pybase64 setproctitle zstandard partial-json-parser soundfile cffi pydantic-extra-types
        jsonschema jsonschema-specifications referencing rpds-py
        """,
    "liger": "liger-kernel liger-cute-kernels nvidia-cuda-runtime-cu12",
}
"""Packages that travel, by the part that needs them; what a machine with torch 2.11 has is left there."""
OPTIONAL = ("transformer-engine", "sglang", "liger")
COMPILED_HERE = "transformer-engine-torch"
"""Published as source; bare_stack.sh compiles it with the packages that follow and all of NVIDIA's."""
FOR_COMPILATION = """
    torch filelock typing-extensions sympy mpmath networkx jinja2 markupsafe fsspec setuptools ninja packaging numpy
    """
LEFT_OUT = """
    ../* *.pyc *.a torch/bin/protoc* torch/test/* nvidia/nccl/lib/*.bc
    triton/FileCheck triton/_C/libproton.so triton/plugins/* triton/instrumentation/*
    triton/backends/amd/lib/* triton/backends/amd/include/* triton/backends/nvidia/*/cupti*
    triton/backends/nvidia/bin/ptxas-blackwell triton/backends/nvidia/bin/nvdisasm triton/backends/nvidia/bin/cuobjdump
    sglang/multimodal_gen/* sgl_kernel/sm100/* sgl_kernel/infllm_ops.* nvidia_cutlass_dsl/cu13/lib/stubs/*
    torch_memory_saver_hook_mode_preload.* torch_memory_saver_hook_mode_preload_cu12.*
    torch_memory_saver_hook_mode_torch.* torch_memory_saver_hook_mode_torch_cu12.*
    """
"""Files that no program of this project loads on a GPU, by their paths in the folder of packages."""


def travelling(without: Sequence[str]) -> list[str]:
    """Names of the distributions that travel."""
    return [name for part, names in PARTS.items() if part not in without for name in names.split()]


def requirements(without: Sequence[str]) -> str:
    """Lines for pip: what travels, at the pinned versions, and what Transformer Engine's compilation needs."""
    pins = {name: line for file in reversed(PINNED) for name, line in _pins(file)}
    names = {*travelling(without)} - {COMPILED_HERE}
    if "transformer-engine" not in without:
        names |= {*FOR_COMPILATION.split(), *(name for name, _ in _pins(PINNED[0]) if name.startswith("nvidia-"))}
    if missing := sorted(names - pins.keys()):
        raise UserError(f"tools/install/bare_stack.py: {missing[0]} is not pinned. Name what {PINNED[0].name} has.")
    return "".join(f"{pins[name]}\n" for name in sorted(names))


def _pins(file: Path) -> Iterator[tuple[str, str]]:
    for line in file.read_text().splitlines():
        if pin := re.match(r"([a-z0-9-]+)==", line):
            yield pin[1], line


def pack(site: Path, tree: Path, output: Path, without: Sequence[str], architecture: int, piece_bytes: int) -> None:
    """Writes the pieces of the travelling packages in `site`; `tree` gets their files, blanked."""
    started = time.monotonic()
    shutil.rmtree(tree, ignore_errors=True)
    files = sorted({*_files(site, travelling(without))})
    with ProcessPoolExecutor() as processes:
        copies = [processes.submit(_copy, site / file, tree / file, architecture) for file in files]
        sizes = [each.result() for each in copies]
    seconds = time.monotonic() - started
    print(f"{len(sizes)} files of {sum(sizes) / 1e6:,.0f} MB copied and blanked in {seconds:.0f} s", flush=True)
    started = time.monotonic()
    manifest = pieces.pack(tree, output, piece_bytes)
    total = sum(piece.size for piece in manifest.pieces) / 1e6
    print(f"{len(manifest.pieces)} pieces of {total:,.0f} MB packed in {time.monotonic() - started:.0f} s")


def _files(site: Path, names: Sequence[str]) -> Iterator[Path]:
    installed = {_normal(each.name): each for each in distributions(path=[str(site)])}
    for name in names:
        if name not in installed:
            raise UserError(f"{site}: {name} is not installed there. Run bare_stack.sh again.")
        for file in installed[name].files or ():
            if not any(fnmatch(str(file), pattern) for pattern in LEFT_OUT.split()):
                yield Path(file)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _copy(source: Path, target: Path, architecture: int) -> int:
    target.parent.mkdir(parents=True, exist_ok=True)
    pieces.write_with_holes(target, blanked(source.read_bytes(), architecture))
    shutil.copymode(source, target)
    return target.stat().st_size


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    listing, packing = commands.add_parser("requirements"), commands.add_parser("pack")
    for each in (listing, packing):
        each.add_argument("--without", action="append", choices=OPTIONAL, default=[])
    for folder in ("site", "tree", "output"):
        packing.add_argument(folder, type=Path)
    packing.add_argument("--arch", type=int, required=True)
    packing.add_argument("--piece-megabytes", type=int, required=True)
    options = parser.parse_args(arguments)
    try:
        if options.command == "requirements":
            print(requirements(options.without), end="")
        else:
            size = options.piece_megabytes * 1_000_000
            pack(options.site, options.tree, options.output, options.without, options.arch, size)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CODE
    return 0


if __name__ == "__main__":
    sys.exit(main())
