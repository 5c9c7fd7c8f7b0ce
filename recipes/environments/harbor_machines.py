"""Machines of Harbor's tasks: a sandbox for tasks that consist of files, a Docker container for tasks with an image.

start --> run, run, ... or run_agent --> verify --> close        `close` also after a failure of any of them

path       files                                      the agent sees it   the tests see it
directory  the task's files, where both work          yes                 yes
/agent     sample.json, HOME of the sandbox           yes                 yes
/tests     copy of the task's tests                   no                  yes
/logs      agent, artifacts; verifier for the reward  without verifier    yes
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import shutil
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path

from verl_mg.agents.agent import AgentError, Session
from verl_mg.agents.command import CommandOptions, OutputLog, endpoint_variables, run_logged
from verl_mg.errors import UserError
from verl_mg.recipes.environments.harbor_tasks import DEFAULT_FOLDER, DEFINITIONS, HarborTask
from verl_mg.sandbox import isolated
from verl_mg.sandbox.command import Limits
from verl_mg.sandbox.command import run_command as run_in_sandbox
from verl_mg.sandbox.supervisor import Visible

logger = logging.getLogger(__name__)

AGENT, TESTS, LOGS = "/agent", "/tests", "/logs"
SHORT_SECONDS = 120.0  # time limit of commands of docker that do little
# Seconds between SIGTERM and SIGKILL of the program `timeout`, and its exit code after the time limit.
KILL_SECONDS, TIMED_OUT = 5, 124
Output = Callable[[bytes], None]


class HarborMachine(ABC):
    """A machine with the task's files, in which the agent's commands and then the tests run.

    `folder` is the temporary folder of the sample; its `agent/` is /agent in the machine.
    """

    def __init__(self, task: HarborTask, folder: Path) -> None:
        self.task, self.folder = task, folder

    @abstractmethod
    async def start(self) -> None:
        """Makes the machine with the task's files."""

    @abstractmethod
    async def run(self, command: str, seconds: float, output: Output) -> int:
        """Runs a command of bash without the endpoint; returns its exit code, or raises TimeoutError."""

    @abstractmethod
    async def run_agent(self, command: str, session: Session) -> tuple[int, str]:
        """Runs a command that can reach the policy, with its output in the log; returns exit code and last line."""

    @abstractmethod
    async def verify(self, output: Output) -> Path:
        """Runs the tests, whose folder is added for them; returns that of their results, or raises TimeoutError."""

    @abstractmethod
    async def close(self) -> None:
        """Removes the machine and its files."""


class SandboxMachine(HarborMachine):
    """The sandbox: programs and libraries of this machine, no network, the task's files in its working directory."""

    def __init__(self, task: HarborTask, folder: Path, options: CommandOptions) -> None:
        super().__init__(task, folder)
        self._options, self._directory = options, task.directory or DEFAULT_FOLDER
        self._environment = {"HOME": f"{AGENT}/user", **task.environment, **options.variables()}

    async def start(self) -> None:
        """Copies the files of the task; UserError where the kernel permits no namespaces."""
        if not isolated():
            raise UserError(
                f"{self.task.folder}: the task needs namespaces, which the kernel does not permit. Permit them, or "
                "set rollout.agent_options.machine=docker."
            )
        await asyncio.to_thread(self._make_folders)

    def _make_folders(self) -> None:
        for name in ("work", "agent/user", "logs/agent", "logs/artifacts", "logs/verifier"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        files = self.task.folder / "environment"
        if files.is_dir():
            # Definitions of containers are not files of the task.
            hidden = shutil.ignore_patterns(*DEFINITIONS)
            shutil.copytree(files, self.folder / "work", symlinks=True, dirs_exist_ok=True, ignore=hidden)

    async def run(self, command: str, seconds: float, output: Output) -> int:
        return await self._run(command, seconds, output, self._environment, self._visible("agent", "artifacts"))

    async def run_agent(self, command: str, session: Session) -> tuple[int, str]:
        return await run_logged(
            ["bash", "-c", command],
            session,
            folder=self.folder,
            directory=self._directory,
            environment={**self._environment, "VERL_MG_SAMPLE": f"{AGENT}/sample.json"},
            visible=self._visible("agent", "artifacts"),
            options=self._options,
            timeout=math.inf,  # the caller has the task's limit
        )

    async def verify(self, output: Output) -> Path:
        environment = {**self._environment, **self.task.verifier_environment}
        # A copy, which the tests may change, and whose files the sandbox's user can read.
        tests = self.folder / "tests"
        await asyncio.to_thread(shutil.copytree, self.task.folder / "tests", tests, symlinks=True)
        visible = [*self._visible("agent", "artifacts", "verifier"), Visible(str(tests), TESTS, writable=True)]
        await self._run(f"bash {TESTS}/test.sh", self.task.verifier_seconds, output, environment, visible)
        return self.folder / "logs" / "verifier"

    async def close(self) -> None:
        """Does nothing: no process runs between the commands, and the folder is the caller's."""

    def _visible(self, *logs: str) -> list[Visible]:
        return [
            Visible(str(self.folder / "work"), self._directory, writable=True),
            Visible(str(self.folder / "agent"), AGENT, writable=True),
            *(Visible(str(self.folder / "logs" / name), f"{LOGS}/{name}", writable=True) for name in logs),
        ]

    async def _run(
        self, command: str, seconds: float, output: Output, environment: Mapping[str, str], visible: list[Visible]
    ) -> int:
        return await run_in_sandbox(
            ["bash", "-c", command],
            folder=self.folder,
            directory=self._directory,
            environment=environment,
            limits=Limits(seconds, self.task.memory_mb or self._options.memory_mb, self._options.processes),
            visible=visible,
            readable=self._options.readable(),
            output=output,
        )


class DockerMachine(HarborMachine):
    """A Docker container, by the docker command.

    A command that is the agent reaches the endpoint through the network of the host, so its container has that network.
    `environment` has further variables of the agent's commands.
    """

    def __init__(self, task: HarborTask, folder: Path, environment: Mapping[str, str], host_network: bool) -> None:
        super().__init__(task, folder)
        self._environment = {**task.environment, **environment}
        self._network = "host" if host_network else "bridge" if task.network else "none"
        # Chosen here, so that a container whose start is interrupted can be removed.
        self._container = f"verl-mg-{uuid.uuid4().hex}"
        self._has_begun = False

    async def start(self) -> None:
        """Starts the container, whose image is built if the task has a Dockerfile."""
        task, files = self.task, self.task.folder / "environment"
        image = task.image
        if image is None:
            image = (await self._docker("build", "--quiet", str(files), seconds=task.build_seconds)).strip()
        limits = [f"--cpus={task.cpus}"] if task.cpus else []
        limits += [f"--memory={task.memory_mb}m"] if task.memory_mb else []
        start = ["run", "--detach", "--rm", "--init", f"--name={self._container}", f"--network={self._network}"]
        start += [*limits, "--entrypoint=sh", image, "-c", "sleep infinity"]
        self._has_begun = True
        await self._docker(*start, seconds=task.build_seconds)
        await self._docker("cp", f"{self.folder}/agent/.", f"{self._container}:{AGENT}")
        # root makes them, and the task's user of the agent writes there.
        await self._inside(f"mkdir -p {LOGS}/agent {LOGS}/artifacts && chmod 777 {LOGS}/* && chmod -R a+rwX {AGENT}")
        if task.image is not None and files.is_dir():
            directory = task.directory or (await self._inside("pwd")).strip()
            await self._docker("cp", f"{files}/.", f"{self._container}:{directory}")

    async def run(self, command: str, seconds: float, output: Output) -> int:
        return await self._exec(command, seconds, output, self._environment, self.task.agent_user)

    async def run_agent(self, command: str, session: Session) -> tuple[int, str]:
        variables = {"VERL_MG_SAMPLE": f"{AGENT}/sample.json", **endpoint_variables(session), **self._environment}
        with OutputLog(session.log) as log:
            code = await self._exec(command, math.inf, log.add, variables, self.task.agent_user)
        return code, log.last_line

    async def verify(self, output: Output) -> Path:
        # The agent may have made both folders, with a reward in one and other tests in the other.
        await self._inside(f"rm -rf {TESTS} {LOGS}/verifier && mkdir -p {LOGS}/verifier && chmod 777 {LOGS}/verifier")
        await self._docker("cp", str(self.task.folder / "tests"), f"{self._container}:{TESTS}")
        await self._inside(f"chmod -R a+rX {TESTS}")
        environment = {**self.task.environment, **self.task.verifier_environment}
        command, user = f"bash {TESTS}/test.sh", self.task.verifier_user
        await self._exec(command, self.task.verifier_seconds, output, environment, user)
        await self._docker("cp", f"{self._container}:{LOGS}/verifier", f"{self.folder}/verifier")
        return self.folder / "verifier"

    async def close(self) -> None:
        """Removes the container with its files, also one whose start was interrupted."""
        if not self._has_begun:
            return
        try:
            await self._docker("rm", "--force", self._container)
        except (AgentError, TimeoutError) as error:  # the reward is there, or the error that ended the work
            logger.warning("container %s: %s", self._container, error)

    async def _inside(self, command: str) -> str:
        output = bytearray()
        if await self._exec(command, SHORT_SECONDS, output.extend, {}, "root"):
            raise AgentError(f"{self.task.folder}: {command}: {output[-300:].decode(errors='replace')}")
        return output.decode(errors="replace")

    async def _exec(
        self, command: str, seconds: float, output: Output, environment: Mapping[str, str], user: str | None
    ) -> int:
        place = [f"--workdir={self.task.directory}"] if self.task.directory else []
        place += [f"--user={user}"] if user is not None else []
        # Without their values, which every user of the machine could read in the arguments.
        names = [text for name in environment for text in ("--env", name)]
        # The end of `docker exec` does not end the command, so `timeout` does it in the container; the limit of the
        # call below is later, for a docker that does not respond.
        limit = [] if math.isinf(seconds) else ["timeout", "-k", str(KILL_SECONDS), str(math.ceil(seconds))]
        arguments = ["exec", *place, *names, self._container, *limit, "bash", "-c", command]
        code = await _communicate(arguments, environment, output, output, seconds + 2 * KILL_SECONDS)
        if limit and code == TIMED_OUT:
            raise TimeoutError(f"not done within {seconds:g} s")
        return code

    async def _docker(self, *arguments: str, seconds: float = SHORT_SECONDS) -> str:
        output, messages = bytearray(), bytearray()
        if code := await _communicate(list(arguments), {}, output.extend, messages.extend, seconds):
            text = messages[-500:].decode(errors="replace")
            raise AgentError(f"{self.task.folder}: docker {arguments[0]} ended with exit code {code}: {text}")
        return output.decode(errors="replace")


async def _communicate(
    arguments: list[str], environment: Mapping[str, str], output: Output, messages: Output, seconds: float
) -> int:
    """Runs docker with its stdout and stderr as `output` and `messages`; returns its exit code."""
    try:
        docker = await asyncio.create_subprocess_exec(
            "docker",
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **environment},
        )
    except FileNotFoundError:
        raise UserError("rollout.agent: this task of Harbor needs Docker. Install docker, or leave it out.") from None
    assert docker.stdout is not None and docker.stderr is not None
    try:
        async with asyncio.timeout(None if math.isinf(seconds) else seconds):
            await asyncio.gather(_pass_on(docker.stdout, output), _pass_on(docker.stderr, messages))
            return await docker.wait()
    finally:
        if docker.returncode is None:
            docker.kill()
            await docker.wait()


async def _pass_on(stream: asyncio.StreamReader, output: Output) -> None:
    while piece := await stream.read(1 << 16):
        output(piece)
