"""Hostile programs end with an outcome; nothing of them survives or escapes, with any kind of isolation."""

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.isolation import isolate_by
from tests.helpers.named_processes import named, processes_named
from verl_mg.errors import UserError
from verl_mg.sandbox import Outcome, isolated, run_python
from verl_mg.sandbox import supervisor as module

TIMEOUT = 600  # seconds for programs that are to end by themselves, on a machine that is busy


@pytest.fixture(params=["bubblewrap", "namespaces", "none"])
def run(request, monkeypatch) -> Callable[..., Outcome]:
    """`run_python` with each kind of isolation that this machine has."""
    isolate_by(request.param, monkeypatch)
    return run_python


@pytest.fixture
def run_isolated(run) -> Callable[..., Outcome]:
    """`run_python` with each kind of namespaces that this machine has."""
    if module.isolation() == "none":
        pytest.skip("a test of namespaces")
    return run


def fresh_name() -> str:
    return uuid.uuid4().hex[:12]


def test_run_python_returns_output_and_status(run):
    program = "import sys\nprint('ä', 6 * 7)\nsys.stderr.write('two\\nlines')"
    assert run(program, seconds=TIMEOUT) == Outcome("ä 42\n", "two\nlines", "ok")


def test_run_python_passes_stdin(run):
    text = "line\n" * 100_000
    program = "import sys\nprint(input(), len(sys.stdin.read()))"
    assert run(program, stdin=text, seconds=TIMEOUT) == Outcome(f"line {len(text) - 5}\n", "", "ok")


@pytest.mark.parametrize(
    ("program", "error"),
    [("1/0", "ZeroDivisionError"), ("x = (", "SyntaxError"), ("raise SystemExit(3)", ""), ("a\0b", "")],
)
def test_run_python_failing_program_is_an_error(run, program, error):
    outcome = run(program, seconds=TIMEOUT)
    assert outcome.ended == "error"
    assert error in outcome.stderr


@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize("text", ["'\ud800'", "print('\ud800')"])
def test_run_python_invalid_unicode_is_replaced(text):
    assert run_python(text, stdin="\ud800", seconds=TIMEOUT).ended == "ok"


def seconds_for(run: Callable[..., Outcome], seconds: float) -> float:
    """So many seconds for a program that is to do something before its time is up; more where a start takes long."""
    begin = time.monotonic()
    assert run("", seconds=TIMEOUT).ended == "ok"
    return max(seconds, 12 * (time.monotonic() - begin))


def test_run_python_endless_loop_and_its_daemon_end_at_the_timeout_and_keep_output(run):
    name = fresh_name()
    daemon = "if os.fork() == 0:\n os.setsid()\n if os.fork(): os._exit(0)\n time.sleep(600)"
    program = named(name, f"print('before', flush=True)\n{daemon}\nos.close(1)\nos.close(2)\nwhile True: pass")
    assert run(program, seconds=seconds_for(run, 1)) == Outcome("before\n", "", "timeout")
    assert processes_named(name) == []


def test_run_python_memory_is_limited(run):
    outcome = run("hoard = []\nwhile True: hoard.append(bytearray(1 << 20))", seconds=TIMEOUT, memory_mb=100)
    assert outcome.ended == "memory"


def test_run_python_total_file_size_is_limited(run_isolated):
    program = "for i in range(100): open(f'{i}', 'wb').write(bytes(10 << 20))"
    outcome = run_isolated(program, seconds=TIMEOUT, memory_mb=100)
    assert (outcome.ended, "No space left" in outcome.stderr) == ("error", True)


def test_run_python_output_is_limited(run):
    outcome = run("while True: print('x' * 100_000)", seconds=TIMEOUT, output_bytes=1000)
    assert outcome == Outcome("x" * 1000, "", "output")
    assert run("print('x' * 999)", seconds=TIMEOUT, output_bytes=1000).ended == "ok"


def test_run_python_processes_are_limited(run):
    name = fresh_name()
    bomb = "for _ in range(1000):\n try: os.fork()\n except OSError: print('no more'); break\ntime.sleep(600)"
    outcome = run(named(name, bomb), seconds=seconds_for(run, 1.5))
    assert outcome.ended == "timeout"
    assert "no more" in outcome.stdout
    assert processes_named(name) == []


def test_run_python_daemon_ends_with_its_program(run):
    name = fresh_name()
    free = "print('free', flush=True); os.close(end); time.sleep(600)"
    escape = f"read, end = os.pipe()\nif os.fork() == 0:\n os.setsid()\n if os.fork() == 0: {free}\n os._exit(0)"
    waits = "os.close(end)\nos.wait()\nos.read(read, 1)"  # until no process has the other end
    outcome = run(named(name, f"{escape}\n{waits}"), seconds=TIMEOUT)
    assert outcome == Outcome("free\n", "", "ok")
    assert processes_named(name) == []


@pytest.mark.skipif(os.geteuid() != 0 and not isolated(), reason="the program has this user's rights")
def test_run_python_program_cannot_kill_other_processes(run):
    with subprocess.Popen(["sleep", "600"]) as victim:
        program = f"""
import os
for target in ({victim.pid}, {os.getpid()}, -1, os.getppid()):
    try: os.kill(target, 9)
    except OSError: pass
print("tried")
"""
        try:
            assert run(program, seconds=TIMEOUT).stdout in ("tried\n", "")  # it may end itself
            assert victim.poll() is None
        finally:
            victim.kill()


def test_run_python_outside_files_are_invisible(run_isolated, tmp_path):
    file = tmp_path / "precious"
    file.write_text("kept")
    for folder in (tmp_path, tmp_path.parent):
        folder.chmod(0o777)
    program = f"""
import os, shutil
for attempt in (lambda: os.remove({str(file)!r}), lambda: open({str(file)!r}).read(), lambda: os.listdir('/home')):
    try: print(attempt())
    except OSError as error: print(type(error).__name__)
shutil.rmtree('/usr/bin', ignore_errors=True)
print(os.path.exists('/etc'), os.path.exists('/proc'))
"""
    outcome = run_isolated(program, seconds=TIMEOUT)
    assert outcome.stdout.split() == ["FileNotFoundError"] * 3 + ["False", "False"]
    assert file.read_text() == "kept"
    assert Path(sys.executable).exists()


CONNECT = """
import socket
try: socket.create_connection(("127.0.0.1", {port}), timeout=600); print("connected")
except OSError: print("no way")
"""


def test_run_python_has_no_network(run_isolated):
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = CONNECT.format(port=server.getsockname()[1])
        assert run_isolated(program, seconds=TIMEOUT).stdout == "no way\n"
        exec(program)  # outside it does connect
        assert server.accept()


def test_run_python_environment_is_empty(run, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    names = run("import os\nprint(*os.environ)", seconds=TIMEOUT).stdout.split()
    assert set(names) <= {"LC_CTYPE"}  # which the interpreter sets


def test_run_python_leaves_no_files(run_isolated, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = "import os\nos.makedirs('a/b')\nopen('a/b/c', 'w').write('x')\nos.chmod('a', 0)\nprint(os.listdir('.'))"
    assert "'a'" in run_isolated(program, seconds=TIMEOUT).stdout
    assert list(tmp_path.iterdir()) == []


def test_run_python_started_under_another_umask_can_use_its_folders(run, monkeypatch):
    """As where another thread changes it for a moment, to read it."""
    start, mask = asyncio.create_subprocess_exec, os.umask(0o022)

    async def start_under_another(*arguments: Any, **options: Any) -> asyncio.subprocess.Process:
        os.umask(0o666)
        return await start(*arguments, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_under_another)
    try:
        assert run("import os\nos.makedirs('a/b')\nprint('made')", seconds=TIMEOUT).stdout == "made\n"
    finally:
        os.umask(mask)


def test_run_python_packages_can_be_imported(run_isolated):
    program = "import numpy\nprint(int(numpy.arange(4).sum()))"
    assert run_isolated(program, seconds=TIMEOUT, memory_mb=2048) == Outcome("6\n", "", "ok")


@pytest.mark.parametrize("limit", ["seconds", "memory_mb", "output_bytes"])
def test_run_python_limit_of_zero_raises(limit):
    with pytest.raises(UserError, match=f"{limit}=0"):
        run_python("", **{limit: 0})
