"""Works on a task folder of Harbor, whose tests give the reward.

    data.train=harbor:FOLDER --> records {"prompt": content of instruction.md, "task": path of the folder}
    agent (a loop with the tool `bash`, or a command) --> machine --> tests/test.sh --> /logs/verifier/reward.*

A task that consists of files runs in the sandbox: the files of environment/ in its working directory (/app, or
`environment.workdir`), this machine's programs, no network. A task with an image or a Dockerfile runs in Docker. Tests
and what they write are not there while the agent works. They also run where the agent's command has failed or its time
is up. Each call of `bash` is a separate process: files remain, variables do not, in the sandbox background processes
neither.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from verl_mg.agents.agent import AgentError, Result, Session, read_options
from verl_mg.agents.command import CommandOptions, OutputLog, read_untrusted_file, write_sample
from verl_mg.errors import UserError
from verl_mg.recipes.environments.harbor_machines import DockerMachine, HarborMachine, SandboxMachine
from verl_mg.recipes.environments.harbor_tasks import HarborTask, read_task
from verl_mg.recipes.environments.policy_client import Message, policy_of
from verl_mg.rewards.reward import Sample
from verl_mg.sandbox.supervisor import temporary_folder

BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Runs a command in the working directory of the task and returns its output.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The command."}},
            "required": ["command"],
        },
    },
}
COMMAND_BYTES = 100_000  # an argument of a program has at most 128 KiB


@dataclass(frozen=True)
class HarborOptions:
    """Options of work on a task folder."""

    machine: Literal["auto", "sandbox", "docker"] = "auto"
    """Machine of the tasks. "auto": the sandbox for tasks without an image and a Dockerfile, Docker for the others."""
    command: str = ""
    """Command of bash that is the agent, such as a harness; "" for the loop with the tool `bash`."""
    reward_name: str = "reward"
    """Entry of reward.json that is the reward, where it has several."""
    max_turns: int = 32
    """Replies of the loop."""
    max_tokens: int | None = None
    """Largest number of tokens of a reply in the loop; null for no limit but that of the sample."""
    command_seconds: float = 120.0
    """Time limit of a call of `bash`."""
    output_characters: int = 10_000
    """Largest output of a call of `bash` that the policy reads; the middle of a longer one is left out."""
    paths: Sequence[str] = ()
    """Further files and folders that programs in the sandbox can read."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables of the agent's programs."""


async def run(session: Session, sample: Sample) -> Result:
    """Lets the agent work on the task folder `task` of the record, and runs the tests; see `HarborOptions`."""
    options = read_options(HarborOptions, session.options)
    if "task" not in sample.record:
        raise UserError(f"record of {sample.prompt[:60]!r}: it has no `task`. Add the path of its task folder.")
    task = read_task(Path(sample.record["task"]))
    async with temporary_folder("agent-") as folder:
        machine = _machine(task, folder, options)
        (folder / "agent").mkdir()
        write_sample(folder / "agent" / "sample.json", session, sample, show_answer=False)
        try:
            await machine.start()
            return await _reward(machine, session, options)
        finally:
            await machine.close()


async def _reward(machine: HarborMachine, session: Session, options: HarborOptions) -> Result:
    task = machine.task
    # The task's own limit, not the job's: the tests run after it.
    try:
        async with asyncio.timeout(task.agent_seconds):
            await _work(machine, session, options)
    except TimeoutError:  # its work until then counts
        session.log(f"\nthe agent's time of {task.agent_seconds:g} s is up\n")
    session.log("\ntests:\n")
    try:
        with OutputLog(session.log) as log:
            written = await machine.verify(log.add)
    except TimeoutError:  # nothing is known about the work, so the attempt has failed
        raise AgentError(f"the tests of {task.folder} took longer than {task.verifier_seconds:g} s") from None
    return read_rewards(written, options.reward_name)


def read_rewards(folder: Path, name: str) -> float | dict[str, Any]:
    """Reads the reward that tests have written.

    Of several entries of reward.json, `name` is the reward and the others are its parts. AgentError where there is no
    reward, or it is no finite number.
    """
    # Untrusted, since the task's programs can write there as well.
    content = read_untrusted_file(folder / "reward.json")
    file = "reward.json"
    if content is None:
        content, file = read_untrusted_file(folder / "reward.txt"), "reward.txt"
    if content is None:
        raise AgentError("the tests of the task have written neither reward.json nor reward.txt")
    try:
        rewards = json.loads(content) if file == "reward.json" else float(content)
        entries = rewards if isinstance(rewards, dict) else {name: rewards}
        numbers = {key: float(value) for key, value in entries.items() if isinstance(value, int | float)}
    except (ValueError, OverflowError, RecursionError):
        numbers, entries = {}, {"": None}
    if len(numbers) < len(entries) or not all(map(math.isfinite, numbers.values())):
        raise AgentError(f"{file} of the task's tests has no finite numbers: {content[:60]!r}")
    if len(numbers) == 1:
        return next(iter(numbers.values()))
    if name not in numbers:
        raise AgentError(
            f"reward.json of the task's tests has no {name}; set reward_name to one of {', '.join(numbers)}"
        )
    return {**{key: value for key, value in numbers.items() if key != name}, "reward": numbers[name]}


def _machine(task: HarborTask, folder: Path, options: HarborOptions) -> HarborMachine:
    if options.machine == "docker" or (options.machine == "auto" and task.needs_docker):
        return DockerMachine(task, folder, options.environment, host_network=bool(options.command))
    return SandboxMachine(task, folder, CommandOptions(paths=options.paths, environment=options.environment))


async def _work(machine: HarborMachine, session: Session, options: HarborOptions) -> None:
    if options.command:
        code, last_line = await machine.run_agent(options.command, session)
        if code:  # its work until then counts, as in Harbor
            session.log(f"\nthe agent's command ended with exit code {code}: {last_line or 'no output'}\n")
        return
    async with policy_of(session, options.max_tokens) as policy:
        for _ in range(options.max_turns):
            reply = await policy.reply([BASH])
            if reply is None or not reply.get("tool_calls"):
                return
            for call in reply["tool_calls"]:
                policy.add_result(call, await _called(machine, call, options))


async def _called(machine: HarborMachine, call: Message, options: HarborOptions) -> str:
    """Performs a call of `bash` and returns its output, or an error, as the policy reads it."""
    try:
        arguments: Any = json.loads(call["function"]["arguments"])
        command = arguments["command"]
    except (ValueError, TypeError, KeyError):
        command = None
    if not isinstance(command, str) or call["function"]["name"] != "bash":
        return 'error: the only tool is bash, with the argument "command"'
    # An argument of a program has neither zero bytes nor halves of surrogate pairs, which JSON can have.
    command = command.encode(errors="replace").decode().replace("\0", "")
    if len(command.encode()) > COMMAND_BYTES:
        return f"error: a command has at most {COMMAND_BYTES} bytes"
    output, size = _Middle(options.output_characters), options.command_seconds
    try:
        code = await machine.run(command, size, output.add)
    except TimeoutError:
        return f"{output.text()}\nerror: stopped after {size:g} s"
    return output.text() if code == 0 else f"{output.text()}\nexit code {code}"


class _Middle:
    """The beginning and the end of an output, which may be larger than the memory."""

    def __init__(self, characters: int) -> None:
        self._half = math.ceil(characters / 2)
        self._head, self._tail, self._length = b"", b"", 0

    def add(self, piece: bytes) -> None:
        self._length += len(piece)
        free = self._half - len(self._head)
        self._head, rest = self._head + piece[:free], piece[free:]
        self._tail = (self._tail + rest)[-self._half :]

    def text(self) -> str:
        omitted = self._length - len(self._head) - len(self._tail)
        middle = f"\n... {omitted} bytes left out ...\n" if omitted else ""
        return self._head.decode(errors="replace") + middle + self._tail.decode(errors="replace")
