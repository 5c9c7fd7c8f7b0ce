"""The process around an untrusted program: run as a script, by an interpreter of its own; nobody imports it.

    framework --starts--> warden (this file) --forks--> the program

In namespaces the program is process 1 of its own: when it ends, the kernel ends every process in there. Without them
the warden adopts what the program leaves behind and ends it. SIGTERM tells the warden to end everything now.
"""

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)

# From <sched.h>, <sys/mount.h>, <sys/prctl.h>; the number of mount_setattr is the same on every machine.
NEW_MOUNTS, NEW_HOSTNAME, NEW_IPC = 1 << 17, 1 << 26, 1 << 27
NEW_USERS, NEW_PROCESSES, NEW_NETWORK = 1 << 28, 1 << 29, 1 << 30
NAMESPACES = NEW_MOUNTS | NEW_HOSTNAME | NEW_IPC | NEW_PROCESSES | NEW_NETWORK
NO_SETUID, NO_DEVICES, BIND, RECURSIVE, PRIVATE = 2, 4, 1 << 12, 1 << 14, 1 << 18
UNMOUNT_LATER, MOUNT_SETATTR, BELOW_TOO, HERE, READ_ONLY = 2, 442, 0x8000, -100, 1
END_WITH_PARENT, ADOPT_ORPHANS, NO_NEW_PRIVILEGES = 1, 36, 38

STRANGERS = 2_000_000_000
"""User ids from here on belong to nobody; a program that root runs has one for itself."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
SIGNALS = {signal.SIGTERM, signal.SIGCHLD}


def main(order: dict[str, Any]) -> None:
    """Run the program and report its wait status, or why it could not start: one JSON line into a pipe."""
    os.set_inheritable(order["report"], False)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    _prctl(END_WITH_PARENT, signal.SIGKILL)
    with _failures_to(order["report"]):
        status = _in_namespaces(order) if order["isolated"] else _among_others(order)
        os.write(order["report"], json.dumps({"status": status}).encode())


def _in_namespaces(order: dict[str, Any]) -> int:
    code = (Path(order["folder"]) / "program.py").read_bytes()
    proc = os.open("/proc", os.O_DIRECTORY)
    if stranger := _stranger():
        _call(LIBC.unshare, NAMESPACES)
    else:
        user, group = os.geteuid(), os.getegid()
        _call(LIBC.unshare, NAMESPACES | NEW_USERS)
        _write(proc, "self/setgroups", "deny")
        _write(proc, "self/uid_map", f"{user} {user} 1")
        _write(proc, "self/gid_map", f"{group} {group} 1")
    _build_root(order["folder"], order["paths"], order["memory_mb"])
    Path("/tmp/program.py").write_bytes(code)

    def enter() -> None:
        if stranger:
            os.chown("/tmp", stranger, stranger)
            _become(stranger)
            # The number of processes is counted for each user in each namespace of users.
            _call(LIBC.unshare, NEW_USERS)
        with contextlib.suppress(OSError):  # in namespaces of its own the program could mount memory without a limit
            _write(proc, "sys/user/max_user_namespaces", "0")

    return _wait(_start(order, "/tmp", order["processes"], enter))


def _among_others(order: dict[str, Any]) -> int:
    _prctl(ADOPT_ORPHANS, 1)
    stranger = _stranger()
    processes: int = order["processes"] + (0 if stranger else _count_own())

    def enter() -> None:
        if stranger:
            os.chown(order["folder"], stranger, stranger)
            _become(stranger)

    try:
        return _wait(_start(order, order["folder"], processes, enter))
    finally:
        _end_descendants(stranger)


def _start(order: dict[str, Any], folder: str, processes: int, enter: Callable[[], None]) -> int:
    """The id of the process that becomes the program."""
    program = os.fork()
    if program:
        return program
    with _failures_to(order["report"]):
        enter()
        _prctl(END_WITH_PARENT, signal.SIGKILL)  # not before: a change of user revokes it
        _prctl(NO_NEW_PRIVILEGES, 1)
        os.setsid()  # or signals to its group would reach the warden
        os.chdir(folder)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        _limit(order, processes)
        os.execve(order["binary"], order["command"], {})
    os._exit(1)


def _wait(program: int) -> int:
    """Its wait status. Processes of a namespace are gone when its process 1 has been waited for."""
    while True:
        if signal.sigwait(SIGNALS) == signal.SIGTERM:
            os.kill(program, signal.SIGKILL)
            return os.waitpid(program, 0)[1]
        ended, status = os.waitpid(program, os.WNOHANG)
        if ended:
            return status


def _limit(order: dict[str, Any], processes: int) -> None:
    memory, file, cpu = order["memory_mb"] << 20, order["file_mb"] << 20, order["cpu_seconds"]
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file, file))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
    resource.setrlimit(resource.RLIMIT_NOFILE, (order["open_files"],) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))


def _stranger() -> int:
    """A user of whom there is nothing on this machine, where this process may choose; else 0."""
    return STRANGERS + os.getpid() if os.geteuid() == 0 else 0


def _become(user: int) -> None:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _build_root(folder: str, paths: list[str], memory_mb: int) -> None:
    """A root in memory with `paths` of the machine in it, read-only, and an empty /tmp; nothing else can be reached."""
    _mount(None, "/", None, RECURSIVE | PRIVATE)
    _mount("tmpfs", folder, "tmpfs", NO_SETUID | NO_DEVICES, f"size={memory_mb}m,nr_inodes=20000,mode=755")
    for path in paths:
        inside = folder + path
        os.makedirs(os.path.dirname(inside), exist_ok=True)
        if os.path.islink(path):
            os.symlink(os.readlink(path), inside)
        else:
            os.mkdir(inside)
            _mount(path, inside, None, BIND | RECURSIVE)
            _make_read_only(inside)
    os.mkdir(folder + "/dev")
    for device in DEVICES:
        Path(folder + device).touch()
        _mount(device, folder + device, None, BIND)
    os.makedirs(folder + "/tmp", 0o700, exist_ok=True)  # an interpreter may lie in there
    os.chdir(folder)
    _call(LIBC.pivot_root, b".", b".")
    _call(LIBC.umount2, b".", UNMOUNT_LATER)  # the old root, which now lies over the new one
    os.chdir("/")


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    texts = [text.encode() if text else None for text in (source, target, kind, options)]
    _call(LIBC.mount, *texts[:3], ctypes.c_ulong(flags), texts[3])


def _make_read_only(path: str) -> None:
    """With all that is mounted below; see mount_setattr(2) for the four words."""
    attributes = (ctypes.c_uint64 * 4)(READ_ONLY | NO_SETUID | NO_DEVICES, 0, 0, 0)
    _call(LIBC.syscall, MOUNT_SETATTR, HERE, path.encode(), BELOW_TOO, attributes, ctypes.c_size_t(32))


def _count_own() -> int:
    """How many threads this user runs already: without a namespace they count."""
    total = 0
    for process in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it may have ended
            if os.stat(f"/proc/{process}").st_uid == os.geteuid():
                total += len(os.listdir(f"/proc/{process}/task"))
    return total


def _end_descendants(stranger: int) -> None:
    """Kill until there is none: the children of a killed process become ours."""
    while True:
        _kill_all_of(stranger) if stranger else _kill_children()
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _kill_all_of(user: int) -> None:
    """At one stroke, which no fork escapes."""
    if os.fork() == 0:
        _become(user)
        os.kill(-1, signal.SIGKILL)
        os._exit(0)
    os.waitpid(-1, 0)


def _kill_children() -> None:
    for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        os.kill(int(child), signal.SIGKILL)


@contextlib.contextmanager
def _failures_to(report: int) -> Any:
    try:
        yield
    except OSError as error:
        os.write(report, json.dumps({"failed": str(error)}).encode() + b"\n")


def _prctl(option: int, value: int) -> None:
    _call(LIBC.prctl, option, ctypes.c_ulong(value), 0, 0, 0)


def _call(function: Any, *arguments: Any) -> None:
    if function(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function.__name__}: {os.strerror(number)}")


def _write(proc: int, name: str, text: str) -> None:
    file = os.open(name, os.O_WRONLY, dir_fd=proc)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
