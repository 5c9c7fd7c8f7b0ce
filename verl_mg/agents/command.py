"""An agent that is a command line, run in the sandbox.

    folder/          as /agent in the sandbox, where there are namespaces
        work/        working directory, with a copy of the task's folder
        user/        HOME
        sample.json  VERL_MG_SAMPLE: prompt, messages, record
        reward.json  VERL_MG_REWARD: a number or an object with "reward", if the command writes it

The endpoint is the only address that it can reach there, under the URLs in its environment. Everything that runs inside
can write the reward, also programs that the policy starts: an agent that runs them leaves the reward to the job's, or
is scored afterwards as `environments/harbor.py` does it.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import os
import shutil
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from verl_mg.agents.agent import AgentError, Result, Session, read_options
from verl_mg.errors import UserError
from verl_mg.rewards.reward import Sample
from verl_mg.sandbox import isolated
from verl_mg.sandbox.command import Limits
from verl_mg.sandbox.command import run_command as run_in_sandbox
from verl_mg.sandbox.supervisor import Visible, temporary_folder

INSIDE = "/agent"  # path of the command's folder in the sandbox
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# A program of the policy may have written these: each bounds the memory that its output takes.
REWARD_BYTES, ERROR_CHARACTERS, LINE_CHARACTERS = 1 << 20, 300, 1 << 16
HTTP_PORT = 80


@dataclass(frozen=True)
class CommandOptions:
    """Options of an agent that is a command line."""

    folder: str = ""
    """Folder whose content is copied into the working directory; one that the record names is copied over it."""
    paths: Sequence[str] = ()
    """Further files and folders that the command can read, such as the installation of a harness."""
    environment: Mapping[str, str | float] = field(default_factory=dict)
    """Further environment variables; PATH is put in front of the system's."""
    show_answer: bool = False
    """Whether sample.json contains the answer, for agents that compute the reward themselves; otherwise the fields of
    the record that contain it are left out, too."""
    memory_mb: int = Limits.memory_mb
    """Memory of each process in MiB."""
    processes: int = Limits.processes
    """Processes and threads."""

    def variables(self) -> dict[str, str]:
        """Returns the environment variables, with a PATH that has this interpreter."""
        path = [str(self.environment.get("PATH", "")), str(Path(sys.executable).parent), SYSTEM_PATH]
        given = {name: str(value) for name, value in self.environment.items()}
        return {"LANG": "C.UTF-8", **given, "PATH": ":".join(filter(None, path))}

    def readable(self) -> list[str]:
        """Returns `paths` as absolute paths."""
        return [os.path.abspath(os.path.expanduser(path)) for path in self.paths]


async def run_command(command: Sequence[str] | str, session: Session, sample: Sample, *, timeout: float) -> Result:
    """Runs a command line as the agent of a sample, with `session.options` as `CommandOptions`.

    After `timeout` seconds everything that it has started is killed and TimeoutError raised; AgentError where it fails
    or its reward cannot be read.
    """
    options = read_options(CommandOptions, session.options)
    async with temporary_folder("agent-") as temporary:
        folder = temporary / "agent"
        await asyncio.to_thread(_fill, folder, session, sample, options)
        inside = INSIDE if isolated() else str(folder)
        code, last_line = await run_logged(
            ["/bin/sh", "-c", command] if isinstance(command, str) else command,
            session,
            folder=temporary,
            directory=f"{inside}/work",
            environment={
                "HOME": f"{inside}/user",
                "VERL_MG_SAMPLE": f"{inside}/sample.json",
                "VERL_MG_REWARD": f"{inside}/reward.json",
            },
            visible=[Visible(str(folder), INSIDE, writable=True)],
            options=options,
            timeout=timeout,
        )
        if code:
            raise AgentError(f"the agent's command ended with exit code {code}: {last_line or 'no output'}")
        return read_reward(folder / "reward.json")


async def run_logged(
    command: Sequence[str],
    session: Session,
    *,
    folder: Path,
    directory: str,
    environment: Mapping[str, str],
    visible: Sequence[Visible],
    options: CommandOptions,
    timeout: float,
) -> tuple[int, str]:
    """Runs a command that can reach the policy, with its output in the sample's log.

    `directory` is its working directory as the command sees it. Returns the exit code and the last line of the output.
    """
    url = urlsplit(session.base_url)
    endpoint = (url.hostname or "127.0.0.1", url.port or HTTP_PORT)
    with OutputLog(session.log) as log:
        code = await run_in_sandbox(
            command,
            folder=folder,
            directory=directory,
            environment={
                # In the sandbox the relay listens at the same port of the loopback interface.
                **endpoint_variables(session, f"127.0.0.1:{endpoint[1]}" if isolated() else None),
                **environment,
                **options.variables(),
            },
            limits=Limits(timeout, options.memory_mb, options.processes),
            visible=visible,
            readable=options.readable(),
            endpoint=endpoint,
            output=log.add,
        )
    return code, log.last_line


def read_reward(file: Path) -> float | dict[str, Any] | None:
    """Reads a reward that a program wrote: a number, or an object with "reward"; None where there is no file.

    AgentError where the file has something else.
    """
    content = read_untrusted_file(file)
    if content is None:
        return None
    try:
        reward = json.loads(content)
    except (ValueError, RecursionError):
        reward = None
    if isinstance(reward, dict) and "reward" in reward:
        return reward
    if isinstance(reward, int | float) and not isinstance(reward, bool):
        return float(reward)
    raise AgentError(f"{file.name} is neither a number nor an object with a reward: {content[:60]!r}")


def read_untrusted_file(file: Path) -> bytes | None:
    """Reads a file that a program wrote, up to REWARD_BYTES of it; None where there is none."""
    # In place of the file a program may have left a link to any file of this machine, or a pipe, which blocks `open`.
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise AgentError(f"{file.name} cannot be read: {error.strerror}") from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise AgentError(f"{file.name} is not a file")
        return os.read(descriptor, REWARD_BYTES)
    finally:
        os.close(descriptor)


def write_sample(file: Path, session: Session, sample: Sample, show_answer: bool) -> None:
    """Writes the sample as JSON for a command: prompt, messages, record, and the answer only if it may show it."""
    content: dict[str, Any] = {"prompt": sample.prompt, "messages": session.messages}
    if show_answer:
        content |= {"answer": sample.answer, "record": sample.record}
    else:
        content["record"] = {key: value for key, value in sample.record.items() if not _shows(value, sample.answer)}
    file.write_text(json.dumps(content, default=str))  # records of Parquet may have dates


def _fill(folder: Path, session: Session, sample: Sample, options: CommandOptions) -> None:
    for name in ("user", "work"):
        (folder / name).mkdir(parents=True)
    for source in filter(None, (options.folder, sample.record.get("folder"))):
        if not Path(source).is_dir():
            raise UserError(f"folder {source}: it does not exist. Correct rollout.agent_options.folder or the record.")
        shutil.copytree(source, folder / "work", symlinks=True, dirs_exist_ok=True)
    write_sample(folder / "sample.json", session, sample, options.show_answer)


def _shows(value: Any, answer: str | None) -> bool:
    if isinstance(value, dict | list):
        return any(_shows(item, answer) for item in (value.values() if isinstance(value, dict) else value))
    return answer is not None and str(value) == answer


def endpoint_variables(session: Session, address: str | None = None) -> dict[str, str]:
    """Returns the variables by which clients of both APIs find the policy; `address` replaces host and port."""
    urls = (urlsplit(url) for url in (session.base_url, session.anthropic_base_url))
    openai, anthropic = ((url._replace(netloc=address) if address else url).geturl() for url in urls)
    return {
        "OPENAI_BASE_URL": openai,
        "OPENAI_API_BASE": openai,
        "OPENAI_API_KEY": session.api_key,
        "OPENAI_MODEL": session.model,
        "ANTHROPIC_BASE_URL": anthropic,
        "ANTHROPIC_API_KEY": session.api_key,
        "ANTHROPIC_MODEL": session.model,
    }


class OutputLog:
    """Adds output of a program to the session's log, line by line, as long as the `with` block lasts."""

    last_line = ""  # the last line that is not empty, at the end of the block

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._line, self._end = "", ""

    def add(self, piece: bytes) -> None:
        """Adds a piece of the output, which may end within a line or a character."""
        # Whole lines, since the log ends each text that it is given with a line break.
        text = self._decoder.decode(piece)
        self._end = (self._end + text)[-4 * ERROR_CHARACTERS :]
        lines, newline, self._line = (self._line + text).rpartition("\n")
        if newline:
            self._write(lines + newline)
        if len(self._line) > LINE_CHARACTERS:  # a program may write without line breaks
            self._write(self._line)
            self._line = ""

    def __enter__(self) -> OutputLog:
        return self

    def __exit__(self, *_: object) -> None:
        """Writes an unfinished line."""
        if self._line:
            self._write(self._line)
        self.last_line = self._end.strip().rpartition("\n")[2][:ERROR_CHARACTERS]
