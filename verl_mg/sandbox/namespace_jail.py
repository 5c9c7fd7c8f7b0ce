"""Supervisor process of an untrusted program; started as a script and never imported.

    framework --starts--> supervisor (this file) --forks--> program, or bubblewrap and the program in it
        |                     |  _wait: SIGCHLD, or SIGTERM from the framework, which kills the program
        +<-- pipe `report` ---+  {"status": wait status}, or {"failed": reason} also from the forked process

    forked process: enter (root, user) -> end with the parent -> no new privileges -> session -> limits -> execve

Isolation "bubblewrap": bwrap builds the namespaces. "namespaces": this file builds the same ones by system calls, for
machines without bwrap; the program is process 1 of its namespace. In both, the kernel ends all processes of the
namespace when its process 1 ends. "none": the supervisor adopts the processes that the program leaves, and kills them.

Its argument is the descriptor of a file with the request, since every user of the machine can read arguments.
"""

import contextlib
import ctypes
import fcntl
import functools
import json
import os
import resource
import shutil
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
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

# User ids from here on are not in use; each program that root runs gets one.
FIRST_UNUSED_USER = 2_000_000_000
USER_INSIDE = 1000  # user id of a program inside of bubblewrap
SET_INTERFACE_FLAGS, INTERFACE_UP = 0x8914, 1
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
# Links that programs expect where there is a /proc.
LINKS = {"/dev/fd": "/proc/self/fd", "/dev/shm": "/tmp"}
SIGNALS = {signal.SIGTERM, signal.SIGCHLD}


def main(request: dict[str, Any]) -> None:
    """Runs the program and writes its wait status, or why it could not start, as a line of JSON into a pipe."""
    os.set_inheritable(request["report"], False)  # the program could report a status itself
    os.umask(0o022)  # libraries set another one for a moment, to read it: any thread that starts a program inherits it
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until `_wait` takes them: none is lost before
    _prctl(END_WITH_PARENT, signal.SIGKILL)
    with _failures_to(request["report"]):
        run = {"bubblewrap": _run_in_bubblewrap, "namespaces": _run_in_namespaces, "none": _run_without_namespaces}
        status = run[request["isolation"]](request)
        os.write(request["report"], json.dumps({"status": status}).encode())


def _run_in_bubblewrap(request: dict[str, Any]) -> int:
    _prctl(ADOPT_ORPHANS, 1)
    user_id = _unused_user()
    _give_folders(request, user_id)
    status, status_end = os.pipe()
    os.set_inheritable(status_end, True)
    bwrap: str = request["bubblewrap"]
    targets = [target for _, target, _ in request["visible"]]
    parents = {str(parent) for path in (*targets, *DEVICES) for parent in Path(path).parents} - {"/", "/tmp"}
    # Otherwise they would have the mode outside, with which only root may enter some of them.
    folders = [text for parent in sorted(parents) for text in ("--perms", "0755", "--dir", parent)]
    devices = [text for device in DEVICES for text in ("--dev-bind", device, device)]
    jail = [bwrap, "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--cap-drop", "ALL"]
    jail += ["--uid", str(USER_INSIDE), "--gid", str(USER_INSIDE), "--perms", "0700"]
    jail += ["--size", str(request["memory_mb"] << 20), "--tmpfs", "/tmp", *folders]
    jail += [*_bindings(request, again=user_id > 0), *devices]
    if request["proc"]:
        jail += ["--proc", "/proc", *(text for path, at in LINKS.items() for text in ("--symlink", at, path))]
    jail += ["--chdir", request["directory"], "--remount-ro", "/", "--json-status-fd", str(status_end)]
    # The limit of processes is set inside the user namespace: outside, all processes of this user would count.
    limit = [_tool("env"), "-u", "PWD", _tool("prlimit"), f"--nproc={request['processes']}:{request['processes']}"]
    command = [*jail, *limit, *request["command"]]
    if user_id:
        # root first makes all paths reachable, also those inside its home directory, and then drops its rights.
        user = [_tool("setpriv"), f"--reuid={user_id}", f"--regid={user_id}", "--clear-groups", "--pdeathsig=KILL"]
        visible = [*folders, *_bindings(request), *devices, "--dev-bind", "/proc", "/proc"]
        command = [bwrap, "--tmpfs", "/tmp", *visible, *user, *command]
    inside = {**request, "binary": bwrap, "command": command}
    try:
        ended = _wait(_start(inside, "/", None, lambda: None))
    finally:
        os.close(status_end)
        _end_descendants(user_id)
    with os.fdopen(status) as lines:
        codes = [code for line in lines if (code := json.loads(line).get("exit-code")) is not None]
    if codes:  # as in a shell: 128 + signal
        return codes[0] - 128 if codes[0] > 128 else codes[0] << 8
    if os.WIFSIGNALED(ended):
        return ended
    raise OSError("bubblewrap did not start the program")


def _bindings(request: dict[str, Any], again: bool = False) -> Iterator[str]:
    """Yields arguments of bubblewrap for the visible paths; `again`: within another bubblewrap that has them."""
    for source, target, writable in request["visible"]:
        if source == target and os.path.islink(source):
            yield from ("--symlink", os.readlink(source), target)
        else:
            yield from ("--bind" if writable else "--ro-bind", target if again else source, target)


def _run_in_namespaces(request: dict[str, Any]) -> int:
    proc = os.open("/proc", os.O_DIRECTORY)
    if user_id := _unused_user():
        _give_folders(request, user_id)
        _call(LIBC.unshare, NAMESPACES)
    else:
        user, group = os.geteuid(), os.getegid()
        _call(LIBC.unshare, NAMESPACES | NEW_USERS)
        _write(proc, "self/setgroups", "deny")
        _write(proc, "self/uid_map", f"{user} {user} 1")
        _write(proc, "self/gid_map", f"{group} {group} 1")
    if request["channel"] is not None:
        _enable_loopback()

    def enter() -> None:
        _build_root(request)  # in the process that is the first of its namespace, whose /proc it mounts
        if user_id:
            os.chown("/tmp", user_id, user_id)
            _become(user_id)
            # The kernel counts processes per user and user namespace.
            _call(LIBC.unshare, NEW_USERS)
        with contextlib.suppress(OSError):  # in further namespaces the program could mount tmpfs without a limit
            _write(proc, "sys/user/max_user_namespaces", "0")

    return _wait(_start(request, request["directory"], request["processes"], enter))


def _run_without_namespaces(request: dict[str, Any]) -> int:
    _prctl(ADOPT_ORPHANS, 1)
    user_id = _unused_user()
    processes: int = request["processes"] + (0 if user_id else _count_threads())

    def enter() -> None:
        if user_id:
            _give(request["folder"], user_id)
            _become(user_id)

    try:
        return _wait(_start(request, request["directory"], processes, enter))
    finally:
        _end_descendants(user_id)


def _start(request: dict[str, Any], folder: str, processes: int | None, enter: Callable[[], None]) -> int:
    """Forks the process that becomes the program, and returns its id."""
    program = os.fork()
    if program:
        return program
    with _failures_to(request["report"]):
        enter()
        _prctl(END_WITH_PARENT, signal.SIGKILL)  # after `enter`: a change of user revokes it
        _prctl(NO_NEW_PRIVILEGES, 1)
        os.setsid()  # otherwise signals to its group would reach the supervisor
        os.chdir(folder)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        limits = request["limits"] if processes is None else {**request["limits"], "NPROC": (processes, processes)}
        for name, limit in limits.items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), limit)
        os.execve(request["binary"], request["command"], request["environment"])
    os._exit(1)


def _wait(program: int) -> int:
    """Waits for SIGCHLD or SIGTERM until the program has ended, and kills it on SIGTERM; returns its wait status."""
    # All processes of a namespace have ended when its process 1 has been waited for.
    while True:
        if signal.sigwait(SIGNALS) == signal.SIGTERM:
            os.kill(program, signal.SIGKILL)
            return os.waitpid(program, 0)[1]
        ended, status = os.waitpid(program, os.WNOHANG)
        if ended:
            return status


def _unused_user() -> int:
    """Returns a user id without files or processes on this machine, where this process is root; otherwise 0."""
    return FIRST_UNUSED_USER + os.getpid() if os.geteuid() == 0 else 0


def _become(user: int) -> None:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _give_folders(request: dict[str, Any], user: int) -> None:
    for source, _, writable in request["visible"]:
        if user and writable:
            _give(source, user)


def _give(folder: str, user: int) -> None:
    """Makes a user the owner of a folder and of everything in it; follows no link."""
    for parent, folders, files in os.walk(folder):
        for path in (parent, *(os.path.join(parent, name) for name in (*folders, *files))):
            os.lchown(path, user, user)


def _build_root(request: dict[str, Any]) -> None:
    """Builds a root in memory: the visible paths of the machine, and an empty /tmp; nothing else is reachable."""
    root = request["folder"] + "/root"
    os.makedirs(root, exist_ok=True)
    _mount(None, "/", None, RECURSIVE | PRIVATE)  # no mount below may appear on the machine
    # The size counts only the contents of files, so their number is limited as well.
    _mount("tmpfs", root, "tmpfs", NO_SETUID | NO_DEVICES, f"size={request['memory_mb']}m,nr_inodes=20000,mode=755")
    os.makedirs(root + "/tmp", 0o700)
    for source, target, writable in request["visible"]:
        inside = root + target
        os.makedirs(os.path.dirname(inside), exist_ok=True)
        if source == target and os.path.islink(source):
            os.symlink(os.readlink(source), inside)
            continue
        if os.path.isdir(source):
            os.makedirs(inside, exist_ok=True)
        else:
            Path(inside).touch()
        _mount(source, inside, None, BIND | RECURSIVE)
        if not writable:
            _make_read_only(inside)
    os.mkdir(root + "/dev")
    for device in DEVICES:
        Path(root + device).touch()
        _mount(device, root + device, None, BIND)
    if request["proc"]:
        os.mkdir(root + "/proc")
        _mount("proc", root + "/proc", "proc", NO_SETUID | NO_DEVICES)
        for path, at in LINKS.items():
            os.symlink(at, root + path)
    # With both arguments "." no folder for the old root is needed, see pivot_root(2).
    os.chdir(root)
    _call(LIBC.pivot_root, b".", b".")
    _call(LIBC.umount2, b".", UNMOUNT_LATER)  # the old root, which covers the new one now
    os.chdir("/")


def _enable_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SET_INTERFACE_FLAGS, struct.pack("16sh14x", b"lo", INTERFACE_UP))


def _tool(name: str) -> str:
    return shutil.which(name, path=os.defpath) or name


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    texts = [text.encode() if text else None for text in (source, target, kind, options)]
    _call(LIBC.mount, *texts[:3], ctypes.c_ulong(flags), texts[3])


def _make_read_only(path: str) -> None:
    """Makes a mount and all mounts below it read-only; see mount_setattr(2) for the four words."""
    attributes = (ctypes.c_uint64 * 4)(READ_ONLY | NO_SETUID | NO_DEVICES, 0, 0, 0)
    _call(LIBC.syscall, MOUNT_SETATTR, HERE, path.encode(), BELOW_TOO, attributes, ctypes.c_size_t(32))


def _count_threads() -> int:
    """Counts the threads that this user runs: without a user namespace they count towards the limit."""
    total = 0
    for process in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it may have ended
            if os.stat(f"/proc/{process}").st_uid == os.geteuid():
                total += len(os.listdir(f"/proc/{process}/task"))
    return total


def _end_descendants(user_id: int) -> None:
    """Kills until there is none left, when `waitpid` finds no child."""
    # The children of a killed process become children of this one.
    while True:
        if user_id:
            _kill_user(user_id)
        _kill_children()
        try:
            # A child may be changing its user at the moment, and escape one of the two.
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.002)
        except ChildProcessError:
            return


def _kill_user(user: int) -> None:
    """Kills all processes of a user with one system call, so that none escapes by a fork."""
    # `kill(-1)` reaches all processes that the caller may signal, so a process of this user has to call it.
    if os.fork() == 0:
        _become(user)
        os.kill(-1, signal.SIGKILL)
        os._exit(0)
    os.waitpid(-1, 0)


def _kill_children() -> None:
    for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        with contextlib.suppress(ProcessLookupError):
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
    with open(name, "w", opener=functools.partial(os.open, dir_fd=proc)) as file:
        file.write(text)


if __name__ == "__main__":
    with os.fdopen(int(sys.argv[1])) as request_file:
        content = json.load(request_file)
    main(content)  # with the file closed, which the program would inherit
