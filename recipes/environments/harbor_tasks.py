"""Task folders of Harbor (harbor 0.24): as records, and what they say about the machine and the time limits."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_mg.data.records import HARBOR
from verl_mg.errors import UserError

# Lines at the beginning of an instruction that mark it as part of a benchmark; agents do not read them.
CANARY = re.compile(r"\A(?:[ \t]*(?:<!--.*canary.*-->|#.*canary.*)[ \t]*(?:\n|\Z))+\s*", re.IGNORECASE)
SIZE = re.compile(r"([0-9.]+)([KMG])", re.IGNORECASE)
MEBIBYTES = {"K": 1 / 1024, "M": 1, "G": 1024}
VARIABLE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")
DEFINITIONS = ("Dockerfile", "docker-compose.yaml")
DEFAULT_FOLDER = "/app"
VERIFIER_SECONDS, BUILD_SECONDS = 600.0, 600.0  # defaults of the format


@dataclass(frozen=True)
class HarborTask:
    """A task folder with one step."""

    folder: Path  # the folder: instruction.md, task.toml, environment/, tests/test.sh
    image: str | None
    builds: bool  # whether it has a Dockerfile
    directory: str | None
    network: bool  # whether programs may use the network
    environment: Mapping[str, str]  # environment variables of all programs
    verifier_environment: Mapping[str, str]  # further environment variables of the tests
    agent_seconds: float | None  # time limit of the agent; None for the job's limit
    verifier_seconds: float  # time limit of the tests
    build_seconds: float  # time limit of building the image
    cpus: int | None  # number of processors; None for all
    memory_mb: int | None  # memory in MiB; None for no limit
    agent_user: str | None  # user of the agent's programs in a container; None for the image's user
    verifier_user: str | None  # user of the tests

    @property
    def needs_docker(self) -> bool:
        """Whether it is defined by an image, and not only by files."""
        return self.builds or self.image is not None


def harbor_records(path: str) -> list[tuple[str, dict[str, Any]]]:
    """Returns a record of `prompt`, the instruction, and `task`, the folder, for each task folder, with its place.

    UserError for a task that is not supported.
    """
    root = Path(path.removeprefix(HARBOR)).expanduser()
    folders = [root] if (root / "task.toml").exists() else sorted(file.parent for file in root.glob("*/task.toml"))
    if not folders:
        raise UserError(f"{path}: no task.toml is in it. Name a task folder of Harbor, or a folder of them.")
    return [(f"{folder}/instruction.md:1", _record(folder)) for folder in folders]


def _record(folder: Path) -> dict[str, Any]:
    read_task(folder)  # a task that is not supported is found before the job begins
    try:
        instruction = (folder / "instruction.md").read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}/instruction.md: {error}. Write the instruction of the task.") from None
    return {"prompt": CANARY.sub("", instruction), "task": str(folder.resolve())}


def read_task(folder: Path) -> HarborTask:
    """Reads the configuration of a task folder; UserError for parts of the format that are not supported."""
    try:
        content = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}/task.toml: {error}. Name a task folder of Harbor in the record's `task`.") from None
    agent, verifier, machine = (content.get(name, {}) for name in ("agent", "verifier", "environment"))
    mode = machine.get("network_mode") or ("public" if machine.get("allow_internet", True) else "no-network")
    if reason := _unsupported(folder, content, mode):
        raise UserError(f"{folder}/task.toml: {reason}, which is not supported. Leave this task out of the data.")
    return HarborTask(
        folder=folder,
        image=machine.get("docker_image"),
        builds=(folder / "environment" / "Dockerfile").exists(),
        directory=machine.get("workdir"),
        network=mode == "public",
        environment=_resolved(folder, machine.get("env", {})),
        verifier_environment=_resolved(folder, verifier.get("env", {})),
        agent_seconds=agent.get("timeout_sec"),
        verifier_seconds=verifier.get("timeout_sec", VERIFIER_SECONDS),
        build_seconds=machine.get("build_timeout_sec", BUILD_SECONDS),
        cpus=machine.get("cpus"),
        memory_mb=machine.get("memory_mb", _mebibytes(folder, machine.get("memory"))),
        agent_user=_text(agent.get("user")),
        verifier_user=_text(verifier.get("user")),
    )


def _unsupported(folder: Path, content: Mapping[str, Any], mode: str) -> str | None:
    # What a task needs and does not get here is an error: silence would change the task.
    agent, verifier, machine = (content.get(name, {}) for name in ("agent", "verifier", "environment"))
    conditions = {
        "it has several steps": content.get("steps"),
        "it has a separate machine for its tests": verifier.get("environment")
        or verifier.get("environment_mode") == "separate",
        "it allows the network for some hosts": mode == "allowlist",
        "its agent or tests have another network than its environment": any(
            phase.get("network_mode", mode) != mode for phase in (agent, verifier)
        ),
        "it runs commands between the agent and the tests": verifier.get("collect"),
        "it waits for a health check": machine.get("healthcheck"),
        "its agent begins with a trajectory": (folder / "trajectory.json").exists(),
        "it is for Windows": str(machine.get("os")).lower() == "windows",
        "it has MCP servers": machine.get("mcp_servers"),
        "it needs GPUs or TPUs": machine.get("gpus") or machine.get("tpu"),
        "it has several containers": (folder / "environment" / "docker-compose.yaml").exists(),
        "it has no tests/test.sh": not (folder / "tests" / "test.sh").exists(),
    }
    return next((reason for reason, present in conditions.items() if present), None)


def _mebibytes(folder: Path, size: str | None) -> int | None:
    # A text such as "2G", in tasks of before version 1.0 of the format.
    if size is None:
        return None
    match = SIZE.fullmatch(size.strip())
    if match is None:
        raise UserError(f"{folder}/task.toml: memory={size} is no size. Write memory_mb = and the number of MiB.")
    return int(float(match[1]) * MEBIBYTES[match[2].upper()])


def _text(user: str | int | None) -> str | None:
    return None if user is None else str(user)


def _resolved(folder: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Replaces values `${NAME}` and `${NAME:-default}` by variables of this process."""
    resolved = {}
    for name, value in environment.items():
        match = VARIABLE.fullmatch(value)
        if match is None:
            resolved[name] = value
        elif (given := os.environ.get(match[1], match[2])) is not None:
            resolved[name] = given
        else:
            raise UserError(
                f"{folder}/task.toml: {name} needs the environment variable {match[1]}. Set it for the job."
            )
    return resolved
