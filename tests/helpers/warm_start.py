"""Python programs in processes that need not import torch, megatron-core, SGLang and verl_mg first.

    warm = warm_start.shared()
    subprocess.run([warm.python, "-m", "verl_mg", "train", ...], env=os.environ | warm.environment)

`warm.python` takes `-m MODULE`, `-c CODE` or a script, each with arguments. A server has imported everything once and
forks the program: it is a process with its own pid, environment, working directory, open files, limits, network
namespace and exit code, and it gets the signals that are sent to the process that was started. torchrun starts its
ranks this way too, since the environment names `warm.python` as PYTHON_EXEC. The processes that SGLang starts are
forks of the program. A start takes a tenth of a second instead of the ten seconds of the imports. `program_of(pid)` is
the pid of the program itself.
"""

import array
import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import multiprocessing
import os
import resource
import runpy
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import psutil
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from tests.helpers.machine import VLLM_PYTHON
from verl_mg.engines.engine_options import IMPORT_PATH
from verl_mg.engines.sglang.arguments import ON_CPU as SGLANG_ON_CPU
from verl_mg.engines.vllm.arguments import ON_CPU as VLLM_ON_CPU

IMPORTED_IN_FUNCTIONS = (
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "pyarrow.parquet",
    # pyarrow imports it, where it is, to convert the first list: a second or more.
    *(["pandas"] if find_spec("pandas") else []),
    "megatron.core.models.mimo",
    "transformers.models.qwen3.modeling_qwen3",
    "verl_mg.recipes.common.kl",
)
"""Modules that every job imports late: in a function of the project or of a package."""
IMPORTED_BY_JOBS = (
    "verl_mg.cli",
    "torch.distributed.run",
    "verl_mg.run.main",
    "verl_mg.run.loop",
    *IMPORTED_IN_FUNCTIONS,
    "torch.utils.tensorboard",
    "transformers.models.qwen2.tokenization_qwen2",
)
IMPORTED_BY_SGLANG = (
    "sglang.srt.entrypoints.engine",
    "sglang.srt.managers.scheduler",
    "verl_mg.engines.sglang.host",
    "verl_mg.tracing.trace_rank",
    "sglang.srt.models.registry",
    "sglang.srt.entrypoints.http_server",
)
IMPORTED_BY_VLLM = (
    "verl_mg.engines.vllm.host",
    "verl_mg.engines.vllm.worker",
    "verl_mg.tracing.trace_rank",
    "verl_mg.engines.vllm.internals",
    "vllm.v1.engine.async_llm",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen3_moe",
)
MAX_FILES = 64
ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
OWNER = "WARM_START_OWNER"
"""Variable with the pid of the first process of the test session; the servers end with it."""
_PATH = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
"""Packages may be carried in further folders; read at the import, since tests set the variable for their programs."""
_OF_ENGINES = {"PYTHONPATH": os.pathsep.join([IMPORT_PATH, _PATH]), "PYTHONSAFEPATH": "1"}


class WarmStart:
    """A server for the programs of a test session; it starts with the first of them."""

    def __init__(
        self,
        name: str,
        imported: Sequence[str],
        environment: Mapping[str, str] | None = None,
        python: str | Path = sys.executable,
    ) -> None:
        """Writes the executable, whose programs need not import the modules `imported`."""
        owner = os.environ.setdefault(OWNER, str(os.getpid()))
        # Folders of former sessions may remain, and process ids come again.
        started = int(psutil.Process(int(owner)).create_time() * 100)
        self._folder = Path(tempfile.gettempdir()) / f"warm-{name}-{owner}-{started}"
        self.python = str(self._folder / "python")
        """Path of an executable that runs Python programs in forks of the server."""
        with contextlib.suppress(FileExistsError):  # by another process of the session
            self._folder.mkdir()
            command = [str(python), "-m", __name__, str(self._folder), owner, *imported]
            environment = {"PYTHONPATH": _PATH, **(environment or {})}
            (self._folder / "server.json").write_text(json.dumps({"command": command, "environment": environment}))
            client = Path(__file__).with_name("warm_client.py")
            script = self._folder / "script"
            script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "{client}" "{self._folder}" "$@"\n')
            script.chmod(0o755)
            script.rename(self.python)

    @property
    def environment(self) -> dict[str, str]:
        """Variables for the started process."""
        return {"PYTHON_EXEC": self.python}

    def program_of(self, pid: int) -> int | None:
        """Pid of the program behind a started process; None if it is no such process."""
        file = self._folder / str(pid)
        return int(file.read_text()) if file.exists() else None


@cache
def shared() -> WarmStart:
    """The server of this test session for jobs."""
    return WarmStart("jobs", IMPORTED_BY_JOBS)


@cache
def sglang() -> WarmStart:
    """The server of this test session for engines, servers and traces of SGLang."""
    return WarmStart("sglang", IMPORTED_BY_SGLANG, SGLANG_ON_CPU | ON_CPU | _OF_ENGINES)


@cache
def vllm() -> WarmStart:
    """The server of this test session for engines and traces of vLLM, in vLLM's environment."""
    return WarmStart("vllm", IMPORTED_BY_VLLM, VLLM_ON_CPU | ON_CPU | _OF_ENGINES, VLLM_PYTHON)


class _Server:
    """Forks a process for each request and reports how it ended."""

    def __init__(self, folder: Path, owner: int) -> None:
        self._folder, self._owner = folder, os.pidfd_open(owner)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / "socket"))
        self._listener.listen(64)
        self._selector = selectors.DefaultSelector()
        self._programs: dict[socket.socket, tuple[int, int, Path]] = {}  # connection: pid, pidfd, file with the pid

    def serve(self) -> dict[str, Any]:
        """Serves requests for ever; returns the request in each forked process."""
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._owner, selectors.EVENT_READ, "owner")
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    request = self._fork(self._listener.accept()[0])
                    if request is not None:
                        return request
                elif key.data == "owner":
                    for pid, _, _ in self._programs.values():
                        os.kill(pid, signal.SIGKILL)
                    shutil.rmtree(self._folder)
                    sys.exit()
                elif key.data == "client":
                    self._client_ended(key.fileobj)  # type: ignore[arg-type]
                else:
                    self._program_ended(key.data)

    def _fork(self, connection: socket.socket) -> dict[str, Any] | None:
        received = _receive(connection)
        if received is None:
            return None
        request, files = received
        pid = os.fork()
        if pid == 0:
            self._close()
            connection.close()
            _place(files, request["files"])
            return request
        for file in files:
            os.close(file)
        pid_file = self._folder / str(request["client"])
        pid_file.write_text(str(pid))
        with contextlib.suppress(OSError):
            connection.sendall(f"{pid}\n".encode())
        descriptor = os.pidfd_open(pid)
        self._programs[connection] = pid, descriptor, pid_file
        self._selector.register(connection, selectors.EVENT_READ, "client")
        self._selector.register(descriptor, selectors.EVENT_READ, connection)
        return None

    def _client_ended(self, connection: socket.socket) -> None:
        if connection not in self._programs:  # the program has ended, too, and was handled first
            return
        self._selector.unregister(connection)
        os.kill(self._programs[connection][0], signal.SIGKILL)

    def _program_ended(self, connection: socket.socket) -> None:
        pid, descriptor, file = self._programs.pop(connection)
        file.unlink()
        _, status = os.waitpid(pid, 0)
        self._selector.unregister(descriptor)
        os.close(descriptor)
        with contextlib.suppress(OSError):
            connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
        with contextlib.suppress(KeyError):
            self._selector.unregister(connection)
        connection.close()

    def _close(self) -> None:
        for connection, (_, descriptor, _) in self._programs.items():
            connection.close()
            os.close(descriptor)
        os.close(self._owner)
        self._selector.close()
        self._listener.close()


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    head, ancillary, _, _ = connection.recvmsg(8, socket.CMSG_SPACE(MAX_FILES * 4))
    if len(head) < 8:
        connection.close()
        return None
    files = array.array("i")
    for _, _, data in ancillary:
        files.frombytes(data)
    left, parts = int.from_bytes(head, "little"), []
    while left:
        parts.append(connection.recv(left))
        left -= len(parts[-1])
    return json.loads(b"".join(parts)), list(files)


def _place(files: list[int], numbers: list[int]) -> None:
    """Gives the received files the numbers that they have in the process that was started."""
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, max(numbers) + 1) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(moved, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


def _run(request: dict[str, Any]) -> None:
    """The program, as the interpreter would run it."""
    _enter_network(request["client"])
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in paths if path and path not in sys.path]
    resource.setrlimit(resource.RLIMIT_AS, tuple(request["address_space"]))
    # SGLang and vLLM choose "spawn"; with "fork" their processes import nothing either.
    multiprocessing.set_start_method = lambda *_, **__: None  # type: ignore[assignment]
    context_of = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: context_of("fork" if method == "spawn" else method)
    first, *rest = request["arguments"]
    while first in ("-u", "-B"):
        if first == "-u":
            sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
        first, *rest = rest
    if first == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif first == "-m":
        sys.argv = rest
        if not os.environ.get("PYTHONSAFEPATH"):
            sys.path[0] = os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = [first, *rest], str(Path(first).resolve().parent)
        runpy.run_path(first, run_name="__main__")


def _end(code: int) -> NoReturn:
    """Ends the process as the interpreter does, but for taking apart all that was imported, which takes a second."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _enter_network(client: int) -> None:
    """Joins the network namespace of the process that was started, where it has another one."""
    with contextlib.suppress(OSError):
        other, here = f"/proc/{client}/ns/net", "/proc/self/ns/net"
        if os.readlink(other) == os.readlink(here):
            return
        descriptor = os.open(other, os.O_RDONLY)
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, 0x40000000):  # CLONE_NEWNET
            raise OSError(ctypes.get_errno(), "setns")
        os.close(descriptor)


def _main(folder: Path, owner: int, imported: Sequence[str]) -> None:
    for name in imported:
        importlib.import_module(name)
    with contextlib.suppress(ImportError):  # it comes with SGLang
        import setproctitle

        setproctitle.getproctitle()  # finds its place in memory only before the environment is replaced
    # torchrun asks inspect.stack() for names of its own functions, which goes through all modules each time: seconds.
    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name
    gc.collect()
    gc.freeze()  # what is imported need not be looked through, and copied, in each process
    request = _Server(folder, owner).serve()
    try:
        _run(request)
    except SystemExit as error:
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
        _end(error.code if isinstance(error.code, int) else int(error.code is not None))
    except KeyboardInterrupt:
        raise
    except BaseException:
        sys.excepthook(*sys.exc_info())
        _end(1)
    _end(0)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
