"""The stack for a machine without a registry: blanked libraries, pieces, and what is made of them there."""

import ctypes
import hashlib
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tools.install import bare_stack, check_stack, pieces, unpack_stack
from tools.install.fat_binaries import blanked

ROOT = Path(__file__).parents[2]
PTX, PROGRAM = 1, 2
HOLES = b"head" + bytes(8 << 20) + b"code" + bytes(4 << 20)


def fat_binary(*entries: tuple[int, int, bytes]) -> bytes:
    """A container of (kind, architecture, payload)."""
    body = b"".join(
        struct.pack("<HHIQ12xI32x", kind, 0x101, 64, len(payload), architecture) + payload
        for kind, architecture, payload in entries
    )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def compiled(folder: Path, name: str, source: str, *options: str, content: bytes = b"") -> Path:
    """A library of C, with `content` in its section of fat binaries."""
    (folder / f"{name}.c").write_text(source)
    (folder / f"{name}.fatbin").write_bytes(content)
    (folder / f"{name}.s").write_text(f'.section .nv_fatbin,"a"\n.balign 8\n.incbin "{folder / name}.fatbin"\n')
    sources = [folder / f"{name}.c", folder / f"{name}.s"]
    subprocess.run(["cc", "-g", "-shared", "-fPIC", "-o", folder / f"lib{name}.so", *sources, *options], check=True)
    return folder / f"lib{name}.so"


def test_blanked_library_keeps_programs_of_its_architecture_and_all_else(tmp_path):
    programs = {architecture: bytes([architecture]) * 256 for architecture in (80, 90, 100)}
    old, new = b"o" * 64, b"n" * 64
    content = fat_binary(
        *((PROGRAM, architecture, program) for architecture, program in programs.items()), (PTX, 80, old)
    )
    # Nothing compiled for Hopper: the driver would take the newest PTX up to it. Between the containers is padding.
    content += bytes(24) + fat_binary(
        (PROGRAM, 80, programs[80]), (PTX, 80, old), (PTX, 90, new), (PTX, 100, b"x" * 64)
    )
    library = compiled(tmp_path, "kernels", "int seven(void) { return 7; }\n", content=content).read_bytes()
    expected = content
    for absent in (programs[80], programs[100], old, b"x" * 64):
        expected = expected.replace(absent, bytes(len(absent)))
    result = blanked(library, 90)
    at = library.index(content)
    assert result[at : at + len(content)] == expected
    assert programs[90] in result and new in result
    # Outside, only what debuggers read is gone, and the library is loaded as before.
    (tmp_path / "libblanked.so").write_bytes(result)
    assert ctypes.CDLL(str(tmp_path / "libblanked.so")).seven() == 7
    stripped = [tmp_path / "before.so", tmp_path / "after.so"]
    for file, data in zip(stripped, (library.replace(content, expected), result), strict=True):
        file.write_bytes(data)
        subprocess.run(["objcopy", "--strip-all", file], check=True)
    assert stripped[0].read_bytes() == stripped[1].read_bytes()
    assert (
        len(result) == len(library)
        and b"int seven" not in result
        and library.count(b"kernels.c") > result.count(b"kernels.c")
    )


def test_blanked_file_that_is_no_library_stays():
    for content in (b"", b"\x7fELF", b"import torch\n", fat_binary((PROGRAM, 80, b"code" * 9))):
        assert blanked(content, 90) == content


@pytest.mark.nightly
def test_blanked_output_of_the_cuda_compiler_keeps_what_its_tools_extract(tmp_path):
    nvcc = shutil.which("nvcc") or pytest.skip("there is no nvcc")
    triton = pytest.importorskip("triton")
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    (tmp_path / "k.cu").write_text("__global__ void fill(float *to) { to[threadIdx.x] = 1; }\n")
    targets = [f"-gencode=arch=compute_{each},code=sm_{each}" for each in (80, 90)]
    subprocess.run([nvcc, "-shared", "-Xcompiler", "-fPIC", *targets, "-o", "k.so", "k.cu"], cwd=tmp_path, check=True)

    def extracted(name: str) -> dict[str, bytes]:
        folder = tmp_path / f"{name}.d"
        folder.mkdir()
        subprocess.run([tool, "-xelf", "all", tmp_path / name], cwd=folder, capture_output=True)
        return {file.name.partition(".sm_")[2]: file.read_bytes() for file in folder.iterdir()}

    (tmp_path / "blanked.so").write_bytes(blanked((tmp_path / "k.so").read_bytes(), 90))
    before, after = extracted("k.so"), extracted("blanked.so")
    assert {*before} == {"80.cubin", "90.cubin"}
    assert after["90.cubin"] == before["90.cubin"] and not any(after.get("80.cubin", b""))


@pytest.fixture
def tree(tmp_path) -> Path:
    """A folder with what packages have: code that does not compress, holes, links, programs, an empty folder."""
    tree = tmp_path / "tree"
    (tree / "package" / "lib").mkdir(parents=True)
    (tree / "empty").mkdir()
    (tree / "package" / "random").write_bytes(hashlib.shake_256(b"seed").digest(50_000))
    (tree / "package" / "program").write_text("#!/bin/sh\n")
    (tree / "package" / "program").chmod(0o755)
    pieces.write_with_holes(tree / "package" / "lib" / "lib.so.1", HOLES)
    (tree / "package" / "lib" / "lib.so").symlink_to("lib.so.1")
    return tree


def contents(tree: Path) -> dict[str, object]:
    def content(path: Path) -> object:
        if path.is_symlink():
            return path.readlink()
        return (path.read_bytes(), path.stat().st_mode & 0o111) if path.is_file() else "folder"

    return {str(path.relative_to(tree)): content(path) for path in tree.rglob("*")}


def test_unpacked_pieces_are_the_tree_without_its_holes(tree, tmp_path, monkeypatch):
    # Archives begin and end within pieces.
    monkeypatch.setattr(pieces, "ARCHIVE_BYTES", 20_000)
    manifest = pieces.pack(tree, tmp_path / "pieces", 4_000)
    files = sorted((tmp_path / "pieces").glob("piece-*"))
    assert len(manifest.archives) > 1 and len(files) > 12
    assert {file.stat().st_size for file in files[:-1]} == {4_000}
    pieces.unpack(tmp_path / "pieces", tmp_path / "target")
    assert contents(tmp_path / "target") == contents(tree)
    assert (tree / "package" / "lib" / "lib.so.1").read_bytes() == HOLES
    assert (tmp_path / "target" / "package" / "lib" / "lib.so.1").stat().st_blocks * 512 < 1 << 20
    # Each archive can be read by other programs.
    joined = b"".join(file.read_bytes() for file in files)
    listed = subprocess.run(
        ["tar", "-tJ"], input=joined[: manifest.archives[0]], capture_output=True, check=True
    ).stdout
    assert listed.decode().split() == ["package/lib/lib.so.1"]


@pytest.mark.parametrize("fault", ["damaged", "shorter", "missing", "without manifest", "half a manifest"])
def test_unpacking_pieces_that_are_not_whole_names_one_and_writes_nothing(fault, tree, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "pieces"
    pieces.pack(tree, folder, 20_000)
    piece = folder / "piece-001"
    content = piece.read_bytes()
    if fault == "damaged":
        piece.write_bytes(content[:99] + bytes([content[99] ^ 1]) + content[100:])
    elif fault == "shorter":
        piece.write_bytes(content[:-1])
    elif fault == "half a manifest":
        piece = folder / "manifest.json"
        piece.write_bytes(piece.read_bytes()[:200])
    else:
        piece = piece if fault == "missing" else folder / "manifest.json"
        piece.unlink()
    pretend_libraries(tmp_path, monkeypatch)
    assert unpack_stack.main([str(folder), str(tmp_path / "target")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    said = "cannot be read" if piece.name == "manifest.json" else "is not that of manifest.json"
    said = "is missing" if fault == "missing" else said
    assert line.startswith(f"error: {piece}: ") and said in line and "Copy" in line
    assert not (tmp_path / "target").exists()


def pretend_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes a folder of NVIDIA's libraries one of this Python's."""
    own = tmp_path / "site" / "nvidia"
    for name in ("cu13", "cudnn", "nccl"):
        (own / name / "lib").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(own.parent)])
    return own


def test_unpacked_stack_comes_before_packages_of_the_machine_and_has_its_libraries(tmp_path, monkeypatch, capsys):
    tree, target = tmp_path / "tree", tmp_path / "a target"
    for folder in ("nvidia/nccl/lib", "dsl/packages", "torch"):
        (tree / folder).mkdir(parents=True)
    (tree / "torch" / "__init__.py").write_text("")
    (tree / "dsl.pth").write_text("dsl/packages\nimport something\n")
    own = pretend_libraries(tmp_path, monkeypatch)
    pieces.pack(tree, tmp_path / "pieces", 1_000_000)
    assert unpack_stack.main([str(tmp_path / "pieces"), str(target)]) == 0
    nvidia = target / "packages" / "nvidia"
    assert (nvidia / "cudnn").readlink() == own / "cudnn" and not (nvidia / "nccl").is_symlink()
    script = (
        'source "$0" && python -c "import os, torch; print(torch.__file__); print(os.environ[\'LD_LIBRARY_PATH\'])"'
    )
    command = ["bash", "-c", f"{script}; echo $PYTHONPATH ${{LD_BIND_NOW-unset}}", target / "environment.sh"]
    variables = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONPATH": "/before", "LD_BIND_NOW": "1"}
    printed = subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout.splitlines()
    packages = target.resolve() / "packages"
    assert printed[0] == str(packages / "torch" / "__init__.py")
    assert printed[1].split(":") == [str(packages / "nvidia" / name / "lib") for name in ("cu13", "cudnn", "nccl")]
    assert printed[2] == f"{packages}:{packages}/dsl/packages:/before unset"
    # Again, with the variables of the first time in effect: nothing is done, or the same.
    (packages / "torch" / "mark").touch()
    assert unpack_stack.main([str(tmp_path / "pieces"), str(target)]) == 0
    assert "already" in capsys.readouterr().out and (packages / "torch" / "mark").exists()
    monkeypatch.setattr(sys, "path", [str(packages), str(own.parent)])
    (target / "environment.sh").unlink()
    assert unpack_stack.main([str(tmp_path / "pieces"), str(target)]) == 0
    assert (nvidia / "cudnn").readlink() == own / "cudnn" and not (packages / "torch" / "mark").exists()


def test_unpacking_without_libraries_of_cuda_is_refused_in_one_line(tree, tmp_path, monkeypatch, capsys):
    pieces.pack(tree, tmp_path / "pieces", 20_000)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert unpack_stack.main([str(tmp_path / "pieces"), str(tmp_path / "target")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no libraries of CUDA 13" in line and not (tmp_path / "target").exists()


def test_check_names_symbols_and_versions_that_the_loader_does_not_find(tmp_path):
    packages = tmp_path / "packages"
    packages.mkdir()
    (tmp_path / "versions").write_text("V2 { global: versioned; };\n")
    compiled(tmp_path, "other", "int versioned(void) { return 1; }\n", f"-Wl,--version-script={tmp_path / 'versions'}")
    calls = "int Py_IsInitialized(void), cuInit(int), cuFileRead(void), versioned(void);\n"
    calls += "int f(void) { return Py_IsInitialized() + cuInit(0) + cuFileRead() + versioned(); }\n"
    library = compiled(tmp_path, "user", calls, f"-L{tmp_path}", "-lother", "-Wl,--allow-shlib-undefined")
    library = shutil.move(library, packages / "libuser.so")
    (packages / "notes.so.txt").write_text("text")
    variables = {"LD_LIBRARY_PATH": str(tmp_path)}
    undefined = check_stack.undefined_symbols(packages, variables)
    # Python's own functions are there, since Python is the program.
    assert undefined == {Path(library): {"cuInit", "cuFileRead"}}
    (tmp_path / "versions").write_text("V1 { global: versioned; };\n")
    compiled(tmp_path, "other", "int versioned(void) { return 1; }\n", f"-Wl,--version-script={tmp_path / 'versions'}")
    (undefined,) = check_stack.undefined_symbols(packages, variables).values()
    assert {"versioned", "version `V2"} <= {name.rstrip("'") for name in undefined}
    (tmp_path / "libother.so").unlink()
    (undefined,) = check_stack.undefined_symbols(packages, variables).values()
    assert "libother.so" in undefined


def test_packages_that_travel_are_pinned():
    pinned = (ROOT / "launch" / "requirements-gpu.txt").read_text().splitlines()
    lines = {
        without: bare_stack.requirements((*without, "liger")).splitlines()
        for without in ((), ("sglang",), ("transformer-engine",))
    }
    assert any(line.startswith("liger-kernel==") for line in bare_stack.requirements(()).splitlines())
    of_tests = [line for line in lines[()] if line not in pinned]
    assert {line.partition("==")[0] for line in of_tests} <= {
        *("pytest", "pytest-timeout", "pluggy", "iniconfig", "hypothesis", "sortedcontainers"),
    }
    assert any(line.startswith("sglang==") for line in lines["transformer-engine",])
    assert not any(line.startswith(("sglang", "nvidia-cutlass")) for line in lines["sglang",] if "cutlass" not in line)
    assert not any(line.startswith("transformer-engine") for line in lines["transformer-engine",])
    # Compiled by the script, with the compiler and headers of NVIDIA's packages.
    assert not any(line.startswith("transformer-engine-torch") for line in lines[()])
    assert {"nvidia-cuda-nvcc", "nvidia-cudnn-cu13"} <= {line.partition("==")[0] for line in lines[()]}


@pytest.mark.parametrize("options", [("--piece-megabytes", "0"), ("--piece-megabytes",), ("--arch", "90a")])
def test_stack_with_a_wrong_number_is_refused_before_anything_is_made(tmp_path, options):
    command = ["bash", str(ROOT / "tools" / "install" / "bare_stack.sh"), str(tmp_path / "folder"), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and not (tmp_path / "folder").exists()
    assert done.stderr.startswith(f"error: {options[0]}: '{''.join(options[1:])}' is no number above 0. ")


@pytest.mark.nightly
@pytest.mark.timeout(4 * 3600)
def test_stack_over_torch_2_11_imports_and_has_every_symbol(tmp_path):
    # The compiled wheel, an hour of one core, stays there from night to night.
    carried = Path(tempfile.gettempdir()) / f"bare-stack-{os.getuid()}"
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def run(*command: object) -> str:
        done = subprocess.run(["bash", *map(str, command)], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    install = ROOT / "tools" / "install"
    run(install / "bare_stack.sh", carried)
    assert all(piece.stat().st_size <= 47_000_000 for piece in (carried / "pieces").glob("piece-*"))
    # With more of what the machine had on which the stack has run.
    machine = tmp_path / "machine"
    run(install / "bare_machine.sh", machine)
    more = (
        "aiohttp aiohappyeyeballs aiosignal attrs frozenlist multidict propcache yarl cloudpickle cuda-core ml-dtypes"
    )
    more += " scipy timm uvloop onnx onnx-ir onnxscript ninja"
    subprocess.run([machine / "bin" / "python", "-m", "pip", "install", "-q", "--no-deps", *more.split()], check=True)
    environment["PATH"] = f"{machine / 'bin'}:{environment['PATH']}"
    printed = run(install / "unpack_stack.sh", carried / "pieces", tmp_path / "target", "--check")
    assert "no symbol is undefined" in printed
    assert all(f"{name}: imported" in printed for name in ("torch", "transformer_engine", "sglang"))
