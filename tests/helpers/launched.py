"""Jobs under a real launcher, whose ranks tests can signal, stop and kill."""

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from torch.distributed import TCPStore

from tests.helpers import warm_start
from tests.helpers.tiny_jobs import files_of, write_sums
from tests.helpers.tiny_models import tiny_model
from verl_mg.errors import EXIT_CODE

ROOT = Path(__file__).parents[2]
HELD = str(ROOT / "tests" / "run" / "held_sft.py")
"""Recipe of a job that waits in the iteration that a test names."""
LONG = 10**6
"""Iterations of a job that does not end by itself."""
PATIENCE_S = 600
"""Against hanging only, on a machine that is busy."""


def write_inputs(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    tiny_model(folder / "model", "qwen3")
    write_sums(folder)
    return folder


def train_command(inputs: Path, output: Path, *overrides: str, recipe: str = "recipes/sft.py") -> list[str]:
    """What each rank runs, after `python`."""
    common = [
        *files_of(inputs, output),
        f"job.iterations={LONG}",
        "job.save=false",
        "algorithm.examples_per_iteration=8",
    ]
    return ["-m", "verl_mg", "train", recipe, *common, *overrides]


def watched(
    code: str = "pass", heartbeat_timeout_s: float = 60, stall_timeout_s: float = 0, output: Path | str = ""
) -> list[str]:
    """The same of a job of collectives alone, see tests/distributed/watched.py."""
    timeouts = (str(heartbeat_timeout_s), str(stall_timeout_s))
    return [str(ROOT / "tests" / "distributed" / "watched.py"), *timeouts, code, str(output)]


def torchrun(ranks: int, *options: str) -> list[str]:
    return ["-m", "verl_mg.launch", "--nproc-per-node", str(ranks), *options]


class Ended(NamedTuple):
    """Exit code and output of a program that has ended."""

    code: int
    out: str
    err: str

    def completed(self) -> "Ended":
        """The same, of a program whose code is 0."""
        assert self.code == 0, self.err
        return self

    def refusal(self, code: int = EXIT_CODE) -> str:
        """The only line that says what was wrong, of a program without a traceback."""
        assert self.code == code and "Traceback" not in self.out + self.err, self.err
        (line,) = error_lines(self.err)
        return line


class Program(subprocess.Popen[str]):
    """A started program, such as a launcher."""

    def ended(self, patience: float = PATIENCE_S) -> Ended:
        out, err = self.communicate(timeout=patience)
        return Ended(self.returncode, out, err)

    def wait_for_steps(self) -> None:
        assert self.stdout.readline() == "steps done\n"

    def iterations_done(self, output: Path, count: int, patience: float = PATIENCE_S) -> None:
        """Waits until the job has logged so many."""
        metrics = output / "metrics.jsonl"
        deadline = time.monotonic() + patience
        while not metrics.exists() or metrics.read_text().count("\n") < count:
            assert self.poll() is None, self.communicate()[1]
            assert time.monotonic() < deadline, f"{metrics}: fewer than {count} iterations"
            time.sleep(0.1)

    def rank(self, number: int) -> psutil.Process:
        """The process of a rank."""
        (process,) = named(self.pid, f"rank {number}")
        return process


@contextmanager
def started(
    arguments: Sequence[str], before: Sequence[str] = (), warm: bool = True, cwd: Path = ROOT, **environment: str
) -> Iterator[Program]:
    """`BEFORE python ARGUMENTS` in the checkout, forked where it is warm; all its processes end with the test."""
    shared = warm_start.shared()
    variables = os.environ | {"OMP_NUM_THREADS": "1"} | (shared.environment if warm else {}) | environment
    process = Program(
        [*before, shared.python if warm else sys.executable, *arguments],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",  # libraries of GPUs write other bytes too
        env=variables,
    )
    found: list[psutil.Process] = []
    try:
        yield process
        found = descendants(process.pid)
    finally:
        for child in {*found, *descendants(process.pid)}:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        process.kill()
        process.communicate()


@contextmanager
def ranks_of(count: int, arguments: Sequence[str], **environment: str) -> Iterator[list[Program]]:
    """Ranks without a launcher; their store is in this process, as it is in the launcher's under torchrun."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    environment |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    with ExitStack() as stack:
        numbers = map(str, range(count))
        yield [stack.enter_context(started(arguments, RANK=n, LOCAL_RANK=n, **environment)) for n in numbers]


def finished(arguments: Sequence[str], before: Sequence[str] = (), **options: Any) -> Ended:
    """The same program once it has ended."""
    with started(arguments, before, **options) as program:
        return program.ended()


def hold(output: Path, iteration: int | None) -> None:
    """Makes a job with the recipe HELD wait in an iteration; None: in none."""
    file = output.with_suffix(".held")
    if iteration is None:
        file.unlink()
    else:
        written = file.with_suffix(".partial")
        written.write_text(str(iteration))
        written.rename(file)


def named(pid: int, start: str) -> set[psutil.Process]:
    """Processes below one whose names start like this."""
    result = set()
    for process in descendants(pid):
        with suppress(psutil.NoSuchProcess):  # it may have ended meanwhile
            if process.name().startswith(start):
                result.add(process)
    return result


def program_of(pid: int) -> int:
    """Pid of the process that runs the program of a started process, which is the same without `warm`."""
    return warm_start.shared().program_of(pid) or pid


def error_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("error: ")]


def alive(processes: Iterable[psutil.Process], patience: float = PATIENCE_S) -> list[psutil.Process]:
    """Those that have not ended after a while."""
    return psutil.wait_procs(processes, patience)[1]


def descendants(pid: int) -> list[psutil.Process]:
    """All processes below one, those that a warm start has forked included."""
    program = program_of(pid)
    result = [psutil.Process(program)] if program != pid and psutil.pid_exists(program) else []
    for parent in {pid, program}:
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(parent).children():
                result += [child, *descendants(child.pid)]
    return result
