"""Programs whose processes have a name, by which a test finds what is left of them."""

import psutil


def named(name: str, program: str) -> str:
    """Returns a program whose processes, forked ones included, have a name of up to 15 characters."""
    return f"import ctypes, os, time\nctypes.CDLL(None).prctl(15, b'{name}')\n{program}"


def processes_named(name: str) -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["name"]) if process.info["name"] == name]
