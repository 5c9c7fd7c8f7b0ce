"""Stands where a test starts `python ARGUMENTS`: the program runs in a process that the server of `warm_start` forks.

Signals are handed to that process, and this one ends as it ends; if this one is killed, the server kills the other.
Run as a script, by the interpreter alone: it must start in milliseconds.
"""

import array
import contextlib
import json
import os
import resource
import signal
import socket
import sys
import time

START_TIMEOUT_S = 900
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGQUIT)


def inherited() -> list[int]:
    """The open files that this process was given."""
    open_files = []
    for number in sorted(map(int, os.listdir("/proc/self/fd"))):
        try:
            os.fstat(number)
        except OSError:  # the list itself
            continue
        open_files.append(number)
    return open_files


def start_server(folder: str) -> None:
    """Starts the server, unless another client has."""
    try:
        os.close(os.open(f"{folder}/started", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    with open(f"{folder}/server.json") as file:
        server = json.load(file)
    if child := os.fork():
        os.waitpid(child, 0)
        return
    # The server is no child of this process, which tests kill with all its children.
    os.setsid()
    if os.fork() == 0:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        log = os.open(f"{folder}/log", os.O_CREAT | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.closerange(3, 4096)
        os.execve(server["command"][0], server["command"], os.environ | server["environment"])
    os._exit(0)


def connect(folder: str) -> socket.socket:
    """The server, as soon as it has imported its modules."""
    until = time.monotonic() + START_TIMEOUT_S
    while True:
        server = socket.socket(socket.AF_UNIX)
        try:
            server.connect(f"{folder}/socket")
            return server
        except OSError:
            server.close()
        start_server(folder)
        if time.monotonic() > until:
            sys.exit(f"the server of warm_start does not start, see {folder}/log")
        time.sleep(0.05)


def forward(program: int, number: int) -> None:
    """Sends a signal to the program, which may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(program, number)


def main() -> None:
    files = inherited()
    server = connect(sys.argv[1])
    request = {
        "arguments": sys.argv[2:],
        "files": files,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "client": os.getpid(),
        "address_space": resource.getrlimit(resource.RLIMIT_AS),
    }
    descriptors = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
    text = json.dumps(request).encode()
    server.sendmsg([len(text).to_bytes(8, "little")], descriptors)
    server.sendall(text)
    answers = server.makefile("r")
    program = int(answers.readline())
    for number in FORWARDED:
        signal.signal(number, lambda number, _: forward(program, number))
    end = answers.readline()
    if not end:
        sys.exit("the server of warm_start has ended")
    code = int(end)
    if code < 0:  # ended by a signal: so does this process
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    os._exit(code)


main()
