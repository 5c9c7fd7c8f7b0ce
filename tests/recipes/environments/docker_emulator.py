"""Stands in for the docker command where there is no Docker: containers are folders, in which bubblewrap runs commands.

The arguments of each call are added to calls.jsonl in the folder $DOCKER_FOLDER. Only what the calls need is done; an
image consists of the system's /usr and an empty /app.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(os.environ["DOCKER_FOLDER"])


def container_path(text: str) -> Path | None:
    name, colon, path = text.partition(":")
    return FOLDER / name / path.lstrip("/") if colon else None


def copy(source: str, target: str) -> None:
    start, end = container_path(source) or Path(source), container_path(target) or Path(target)
    if start.is_dir() and (end.exists() or source.endswith("/.")) and not source.endswith("/."):
        end /= start.name  # as docker cp does for a folder that is there
    shutil.copytree(start, end, dirs_exist_ok=True)


def execute(arguments: list[str]) -> int:
    directory, variables = "/app", []
    while arguments[0].startswith("--"):
        option, _, value = arguments.pop(0).partition("=")
        if option == "--env":
            variables += [arguments.pop(0)]
        elif option == "--workdir":
            directory = value
    name, *command = arguments
    system = ["--ro-bind", "/usr", "/usr"]
    given = [text for variable in variables for text in ("--setenv", variable, os.environ[variable])]
    jail = ["bwrap", "--unshare-pid", "--bind", str(FOLDER / name), "/", *system, "--proc", "/proc", "--dev", "/dev"]
    path = ["--clearenv", "--setenv", "PATH", "/usr/bin:/bin"]
    return subprocess.run([*jail, *path, *given, "--chdir", directory, *command]).returncode


def main() -> int:
    kind, *arguments = sys.argv[1:]
    with (FOLDER / "calls.jsonl").open("a") as calls:
        calls.write(json.dumps(sys.argv[1:]) + "\n")
    if kind == "build":
        print("a notice that is no part of the result", file=sys.stderr)
        print("sha256:1234")
    elif kind == "run":
        (name,) = (text.removeprefix("--name=") for text in arguments if text.startswith("--name="))
        (FOLDER / name / "app").mkdir(parents=True)
        for at in ("bin", "lib", "lib64"):
            (FOLDER / name / at).symlink_to(f"usr/{at}")
        if "sha256:1234" in arguments:  # what the Dockerfile copies
            shutil.copy(Path(os.environ["DOCKER_TASK"]) / "environment" / "greeting.txt", FOLDER / name / "app")
        if "slow:1" in arguments:
            time.sleep(600)
        print("a long id")
    elif kind == "cp":
        copy(*arguments)
    elif kind == "exec":
        return execute(arguments)
    elif kind == "rm":
        shutil.rmtree(FOLDER / arguments[-1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
