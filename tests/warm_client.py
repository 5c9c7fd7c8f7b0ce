"""Stands where a test starts `python ARGUMENTS`: the program runs in a process that the server of `warm_start` forks.

Signals are handed to that process, and this one ends as it ends; if this one is killed, the server kills the other.
Run as a script, by the interpreter alone: it must start in milliseconds.
"""

import array
import json
import os
import resource
import signal
import socket
import sys

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGQUIT)


def main() -> None:
    server = socket.socket(socket.AF_UNIX)
    server.connect(os.environ["WARM_START_SOCKET"])
    request = {
        "arguments": sys.argv[1:],
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "client": os.getpid(),
        "address_space": resource.getrlimit(resource.RLIMIT_AS),
    }
    descriptors = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))]
    text = json.dumps(request).encode()
    server.sendmsg([len(text).to_bytes(8, "little")], descriptors)
    server.sendall(text)
    answers = server.makefile("r")
    program = int(answers.readline())
    for number in FORWARDED:
        signal.signal(number, lambda number, _: os.kill(program, number))
    end = answers.readline()
    if not end:
        sys.exit("the server of warm_start has ended")
    code = int(end)
    if code < 0:  # ended by a signal: so does this process
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    os._exit(code)


main()
