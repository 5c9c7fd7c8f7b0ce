"""Two hosts, each a network of its own with a cable between: the cable is cut in the middle of training."""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers.engines import SGLANG, VLLM
from tests.helpers.launched import (
    LONG,
    Program,
    descendants,
    error_lines,
    started,
    torchrun,
    train_command,
    write_inputs,
)
from tests.helpers.machine import VLLM_PYTHON
from tests.helpers.tiny_jobs import RECIPES, logged
from tests.rollout.engine_jobs import inputs as engine_inputs
from tests.rollout.engine_jobs import settings
from verl_mg.distributed.watchdog import EXIT_RANK_LOST
from verl_mg.run.checkpointer import checkpoints_in
from verl_mg.run.job_state import read_state
from verl_mg.stores.folders import LocalFolders

PORT = 29400
"""Of the first host; nothing else listens in its network."""
LOST_AFTER = 6
OWN_MEMORY = ("sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh")
"""Hosts share no memory; SGLang finds out by it which of its processes are on one node."""


class Hosts:
    def __init__(self, name: str) -> None:
        self.names = [f"{name}-{i}" for i in range(2)]
        # Interfaces are in the machine's network for a moment, and have names of at most 15 characters.
        self.interfaces = [f"v{i}{name}"[-15:] for i in range(2)]
        self.addresses = ["10.77.0.1", "10.77.0.2"]

    def make(self) -> None:
        for name in self.names:
            run("netns", "add", name)
        first, second = self.interfaces
        run("link", "add", first, "netns", self.names[0], "type", "veth", "peer", second, "netns", self.names[1])
        for name, interface, address in zip(self.names, self.interfaces, self.addresses, strict=True):
            run("-n", name, "address", "add", f"{address}/24", "dev", interface)
            run("-n", name, "link", "set", "lo", "up")
            run("-n", name, "link", "set", interface, "up")

    def remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)

    def set_cable(self, state: str) -> None:
        run("-n", self.names[0], "link", "set", self.interfaces[0], state)


def run(*words: str) -> None:
    result = subprocess.run(["ip", *words], capture_output=True, text=True)
    if result.returncode:
        raise OSError(f"ip {' '.join(words)}: {result.stderr.strip()}")


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if shutil.which("ip") is None:
        pytest.skip("there is no ip (iproute2)")
    made = Hosts(f"vmg{os.getpid()}")
    try:
        made.make()
    except OSError as error:
        made.remove()
        pytest.skip(f"no networks of one's own here: {error}")
    yield made
    made.remove()


def start(stack: ExitStack, hosts: Hosts, job: str, command: list[str], **options: Any) -> list[Program]:
    return [start_on(stack, hosts, i, job, command, **options) for i in range(2)]


def start_on(
    stack: ExitStack,
    hosts: Hosts,
    host: int,
    job: str,
    command: list[str],
    ranks: int = 2,
    own_memory: bool = False,
    nodes: tuple[str, ...] = ("--nnodes", "2"),
    settings: str = "read_timeout=20",
) -> Program:
    """So many ranks on a host, which imports everything itself where it has memory of its own."""
    rendezvous = [
        *(*nodes, "--rdzv-backend", "c10d", "--rdzv-id", job, "--local-addr", hosts.addresses[host]),
        *("--rdzv-endpoint", f"{hosts.addresses[0]}:{PORT}", "--rdzv-conf", f"is_host={host == 0},{settings}"),
        *("--shutdown-timeout", "5"),
    ]
    launcher, inside = torchrun(ranks, *rendezvous), ["ip", "netns", "exec", hosts.names[host]]
    inside += OWN_MEMORY if own_memory else ()
    variables = {"GLOO_SOCKET_IFNAME": hosts.interfaces[host]}
    return stack.enter_context(started([*launcher, *command], inside, not own_memory, **variables))


def steps(output: Path) -> list[int]:
    return [line["step"] for line in logged(output)]


def test_job_on_two_hosts_with_cut_cable_ends_and_resumes(hosts, tmp_path):
    inputs, output = write_inputs(tmp_path / "inputs"), tmp_path / "run"
    command = train_command(
        inputs, output, f"job.heartbeat_timeout_s={LOST_AFTER}", "actor.layout=tp2", "checkpoint.every=2"
    )
    with ExitStack() as stack:
        first, second = start(stack, hosts, "first", command)
        first.iterations_done(output, 5)
        hosts.set_cable("down")
        (code, _, err), (other_code, _, other_err) = first.ended(), second.ended()
    assert code == EXIT_RANK_LOST, err
    (line,) = error_lines(err)
    reported = re.match(r"error: rank (\d) \(host .*\): no heartbeat for \d+ s, nor from rank (\d). It was", line)
    assert reported and set(reported.groups()) == {"2", "3"}, line
    assert other_code == EXIT_RANK_LOST, other_err
    line = error_lines(other_err)[0]
    assert line.startswith("error: rank 2: the job's store at 10.77.0.1:") and "has not answered for" in line
    assert "Traceback" not in err + other_err

    done = max(int(folder.name) for folder in (output / "checkpoints").iterdir() if folder.name.isdigit())
    hosts.set_cable("up")
    again = [word.replace(str(LONG), str(done + 4)) for word in command]
    with ExitStack() as stack:
        for process in start(stack, hosts, "second", again):
            process.ended().completed()
    assert steps(output) == list(range(1, done + 5))


def lose(launcher: Program) -> None:
    """Ends the processes of a host at once, as a loss of power does."""
    launcher.kill()
    for process in descendants(launcher.pid):
        with suppress(psutil.NoSuchProcess):
            process.kill()


def ranks_of_checkpoint(output: Path) -> list[int]:
    folders = LocalFolders(output / "checkpoints")
    return [read_state(folders.open(name)).ranks for name in checkpoints_in(folders)]


@pytest.mark.nightly
@pytest.mark.parametrize(("nodes", "ranks"), [("1:2", [2, 1, 2]), ("2 --spares 1", [2])], ids=["fewer", "spare"])
def test_job_that_loses_a_host_trains_on(hosts, tmp_path, nodes, ranks):
    inputs, output = write_inputs(tmp_path / "inputs"), tmp_path / "run"
    command = train_command(
        inputs, output, f"job.heartbeat_timeout_s={LOST_AFTER}", "checkpoint.every=1", "checkpoint.keep=1000"
    )
    settings = "read_timeout=20,last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"

    def launcher(stack: ExitStack, host: int) -> Program:
        options = ("--nnodes", *nodes.split())
        return start_on(stack, hosts, host, "changing", command, 1, nodes=options, settings=settings)

    with ExitStack() as stack:
        first, second = launcher(stack, 0), launcher(stack, 1)
        first.iterations_done(output, 3)
        if "--spares" in nodes:
            launcher(stack, 1)
        lose(second)
        first.iterations_done(output, len(steps(output)) + 3)
        if "--spares" not in nodes:
            launcher(stack, 1)
            while ranks_of_checkpoint(output)[-1] != 2:
                assert first.poll() is None, first.communicate()[1]
        first.iterations_done(output, len(steps(output)) + 2)
        first.terminate()
        code, _, err = first.ended()
    assert code == 128 + signal.SIGTERM, err
    assert steps(output) == list(range(1, len(steps(output)) + 1))
    assert [count for count, _ in groupby(ranks_of_checkpoint(output))] == ranks


@pytest.mark.nightly
def test_job_on_two_hosts_given_a_signal_ends_both(hosts, tmp_path):
    inputs, output = write_inputs(tmp_path / "inputs"), tmp_path / "run"
    with ExitStack() as stack:
        first, second = start(stack, hosts, "first", train_command(inputs, output))
        first.iterations_done(output, 2)
        second.send_signal(signal.SIGTERM)
        for process in (second, first):
            code, _, err = process.ended()
            assert code == 128 + signal.SIGTERM, err
    assert [int(folder.name) for folder in (output / "checkpoints").iterdir()] == [steps(output)[-1]]


@pytest.mark.nightly
@pytest.mark.parametrize("engine", [SGLANG, VLLM])
def test_engine_over_two_hosts_is_updated_and_resumes_after_a_cut(hosts, tmp_path, engine):
    inputs, output = engine_inputs(tmp_path, "qwen3"), tmp_path / "run"
    command = [
        *("-m", "verl_mg", "train", str(RECIPES / "grpo.py"), *settings(inputs, engine)),
        *(f"job.output={output}", f"job.iterations={LONG}", f"job.heartbeat_timeout_s={LOST_AFTER}"),
        # A process that is forked by the server of tests would have the server's memory, not that of its host.
        *([f"rollout.python={VLLM_PYTHON}"] if engine == "vllm" else []),
        *("actor.layout=tp2", "rollout.layout=tp2", "checkpoint.every=2", "job.save=false", "job.console=false"),
    ]
    with ExitStack() as stack:
        first, second = start(stack, hosts, "first", command, ranks=1, own_memory=True)
        first.iterations_done(output, 3)
        parts = sorted(log.name for log in (output / "engines").iterdir())
        hosts.set_cable("down")
        (code, _, err), (other_code, _, other_err) = first.ended(), second.ended()
    assert parts == ["0-node0.log", "0-node1.log"]
    assert code == other_code == EXIT_RANK_LOST, err + other_err
    assert re.match(r"error: rank 0 \(host .*\): no heartbeat for \d+ s, nor from|error: rank 1", error_lines(err)[0])
    done = max(int(folder.name) for folder in (output / "checkpoints").iterdir() if folder.name.isdigit())
    hosts.set_cable("up")
    again = [word.replace(str(LONG), str(done + 2)) for word in command]
    with ExitStack() as stack:
        for process in start(stack, hosts, "second", again, ranks=1, own_memory=True):
            process.ended().completed()
    assert steps(output) == list(range(1, done + 3))
    for line in logged(output):
        assert line["actor/grad_norm"] > 0 and line["mismatch/max_abs"] < 1e-4
        assert line["weight_sync/bytes_received"] == line["weight_sync/bytes_lower_bound"]
