"""Programs whose processes have a name, by which a test finds what is left of them."""

from pathlib import Path


def named(name: str, program: str) -> str:
    """Returns a program whose processes, forked ones included, have a name of up to 15 characters."""
    return f"import ctypes, os, time\nctypes.CDLL(None).prctl(15, b'{name}')\n{program}"


def processes_named(name: str) -> list[str]:
    pids = []
    for file in Path("/proc").glob("[0-9]*/comm"):
        try:
            pids += [file.parent.name] if file.read_text().strip() == name else []
        except OSError:  # it has ended
            continue
    return pids
