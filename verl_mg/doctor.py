"""`verl-mg doctor`: whether installed packages, machines and network can run a job, and what to fix."""

from __future__ import annotations

import importlib
import os
import re
import resource
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import requires
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from packaging.requirements import Requirement

from verl_mg import device
from verl_mg.distributed.collectives import all_gather_json, broadcast_json
from verl_mg.distributed.world import World
from verl_mg.library import installed, installed_versions
from verl_mg.run.fetch_models import with_fetched_models
from verl_mg.run.main import on_all_ranks

if TYPE_CHECKING:
    from verl_mg.config import Config
    from verl_mg.job.recipe import Recipe

EXIT_PROBLEMS = 1  # exit code where there is something to fix
PINNED_BY_SGLANG = ("torch", "transformers", "tokenizers")
"""Packages of which SGLang and training share one version, because they share an environment."""
INSTALL = "Install launch/requirements-gpu.txt, in which all versions fit together"
FILES_OF_A_RANK, FILES_PER_RANK = 512, 4
"""Open files that a rank needs by itself, and for each rank of the job, to which it is connected."""
SHARED_MEMORY = 2**30  # free bytes of /dev/shm that the ranks of a machine need: NCCL's buffers and the engines' queues
BUSY_SHARE = 0.05  # share of a GPU's memory above which other processes are reported
REPEATS = 5
CONNECT_SECONDS = 5
SLOW_GPUS_OF_A_NODE, SLOW_NODES = 10e9, 2e9
"""Bytes per second of a rank below which GPUs do not use NVLink or PCIe peers, and nodes do not use RDMA."""


def check(folder: Path, load: Callable[[], tuple[Recipe, Config]] | None = None) -> int:
    """Checks this rank and, under a launcher, all others; rank 0 prints the report, and all return the same code.

    `load` returns recipe and configuration of a job, whose roles are then built to show what they compute with.
    """
    codes = []

    def work(world: World) -> None:
        loaded = load() if load else None  # first, so that no one waits for the checks to read of a typing error
        codes.append(_check(world, folder))
        if loaded:
            _show_job(world, *loaded)

    on_all_ranks(work, resumable=False)
    return codes[0]


def _check(world: World, folder: Path) -> int:
    machine, versions = describe_machine(), installed_versions()
    problems = [*version_problems(bool(machine["gpus"])), *machine_problems(machine, world.size)]
    problems += [*port_problems(), *folder_problems(folder)]
    # Collectives of all ranks, whatever the problems so far: the report names them together.
    bandwidth = measure_bandwidth()
    ranks = all_gather_json({"machine": machine, "versions": versions, "problems": problems})
    hosts = {rank["machine"]["host"]: rank for rank in reversed(ranks)}  # the first rank of each
    of_hosts = [f"{rank['machine']['host']}: {problem}" for rank in ranks for problem in rank["problems"]]
    # A problem that several ranks of a host have is reported once.
    all_problems = list(dict.fromkeys([*bandwidth_problems(bandwidth, len(hosts)), *_differences(ranks), *of_hosts]))
    if world.rank == 0:
        print("\n".join(_report(ranks, hosts, bandwidth, all_problems)), flush=True)
    return EXIT_PROBLEMS if all_problems else 0


def _show_job(world: World, recipe: Recipe, config: Config) -> None:
    """Builds a job as its start does, without weights that are trained and without engines, and prints its table."""
    # They import megatron-core, which takes seconds.
    from verl_mg.job.job import RunningJob
    from verl_mg.job.recipe import requested_roles
    from verl_mg.run.start_table import start_table

    config = with_fetched_models(config, world)
    if config.job.deterministic:
        device.compute_deterministically()
    roles = requested_roles(recipe, config)
    job = RunningJob(config, roles, world.store, recipe=recipe.name, from_checkpoint=True, starts_engines=False)
    table = start_table(job)
    if world.rank == 0:
        warnings = table.warnings
        # GPU: the table is that of a GPU, and warnings are known.
        # GPU-TEST: tests/test_doctor.py::test_doctor_of_a_job_prints_its_table_on_all_ranks_without_training
        # GPU-RAN: not yet
        count = len(warnings) if torch.cuda.is_available() else "known on a GPU only"
        print("\n".join(["", *table.lines(), f"warnings: {count}", *(f"  {line}" for line in warnings)]), flush=True)
    job.close()


def _differences(ranks: Sequence[dict[str, Any]]) -> list[str]:
    first = ranks[0]
    return [
        f"{rank['machine']['host']}: {name} {version} differs from {first['versions'][name]} of "
        f"{first['machine']['host']}. Install the same environment on all nodes."
        for rank in ranks
        for name, version in rank["versions"].items()
        if version != first["versions"][name]
    ]


def _report(
    ranks: Sequence[dict[str, Any]], hosts: dict[str, Any], bandwidth: dict[str, float], problems: Sequence[str]
) -> list[str]:
    lines = [_counted(len(ranks), "rank") + (f" on {_counted(len(hosts), 'node')}" if len(ranks) > 1 else "")]
    lines.append("versions: " + ", ".join(f"{name} {version}" for name, version in ranks[0]["versions"].items()))
    lines += [f"{host}: {_described(rank['machine'])}" for host, rank in hosts.items()]
    if bandwidth:
        measured = ", ".join(f"{name} {speed / 1e9:.2f} GB/s" for name, speed in bandwidth.items())
        lines.append(f"slowest rank: {measured}")
    if not problems:
        return [*lines, "all is well"]
    return [*lines, f"to fix: {len(problems)}", *(f"  {problem}" for problem in problems)]


def _counted(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' * (number > 1)}"


def _described(machine: dict[str, Any]) -> str:
    gpus, shared = machine["gpus"], machine["shared_memory"]
    kinds = ", ".join(f"{gpus.count(kind)} x {kind}" for kind in dict.fromkeys(gpus)) or "no GPU"
    driver = f", driver {machine['driver']}" if machine["driver"] else ""
    free = f", /dev/shm {shared / 2**30:.1f} GiB free" if shared is not None else ""
    return f"{kinds}{driver}, open files {machine['open_files']}{free}"


def version_problems(on_gpus: bool) -> Iterator[str]:
    """Yields what does not fit together; GPUs need the packages of the extras gpu and sglang."""
    extras = ("", "gpu", "sglang") if on_gpus else ("",)
    yield from unmet(_requirements("verl-mg"), extras)
    shared = [each for each in _requirements("sglang") if each.name in PINNED_BY_SGLANG]
    yield from (f"SGLang needs {problem}" for problem in unmet(shared, ("",)))
    if on_gpus:
        yield from _import_problems()


def unmet(requirements: Iterable[Requirement], extras: Iterable[str]) -> Iterator[str]:
    """Yields a line for each requirement that the installed packages do not meet; "" is the extra of the others."""
    for wanted in requirements:
        if wanted.marker and not any(wanted.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        current = installed(wanted.name)
        if current is None or not wanted.specifier.contains(current, prereleases=True):
            state = f"{current} is installed" if current else "it is not installed"
            yield f"{wanted.name}{wanted.specifier}: {state}. {INSTALL}."


def _requirements(package: str) -> list[Requirement]:
    return [Requirement(line) for line in requires(package) or ()] if installed(package) else []


def _import_problems() -> Iterator[str]:
    # Metadata do not say for which CUDA a library was built; its import does.
    for module in ("transformer_engine.pytorch", "sglang"):
        try:
            importlib.import_module(module)
        except Exception as error:  # a library of another CUDA raises many kinds
            reason = re.sub(r"\s+", " ", str(error))
            yield f"{module}: cannot be imported ({type(error).__name__}: {reason}). {INSTALL}."


def describe_machine() -> dict[str, Any]:
    """Returns host name, GPUs, driver, limit of open files and free shared memory (bytes)."""
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        "host": socket.gethostname(),
        "gpus": [f"{gpu.name} {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus],
        "driver": _driver(),
        # The hard limit, up to which a job raises the soft one itself.
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        "shared_memory": shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else None,
    }


def machine_problems(machine: dict[str, Any], ranks: int) -> Iterator[str]:
    """Yields what the machine of `describe_machine` has too little of, for a job of so many ranks."""
    needed = FILES_OF_A_RANK + FILES_PER_RANK * ranks
    if machine["open_files"] != resource.RLIM_INFINITY and machine["open_files"] < needed:
        yield (
            f"open files: the hard limit {machine['open_files']} is below {needed}, for {ranks} ranks. "
            "Raise it: nofile in /etc/security/limits.conf, or --ulimit nofile of the container."
        )
    free = machine["shared_memory"]
    if free is not None and free < SHARED_MEMORY:
        yield (
            f"/dev/shm: {free / 2**20:.0f} MiB are free, 1024 are needed. "
            "Start the container with --shm-size=16g or --ipc=host, or mount an emptyDir of medium Memory there."
        )
    # RLIM_INFINITY is -1.
    if os.path.isdir("/sys/class/infiniband") and resource.getrlimit(resource.RLIMIT_MEMLOCK)[1] >= 0:
        yield (
            "locked memory: RDMA needs it without a limit. "
            "Set memlock to unlimited, or --ulimit memlock=-1 of the container."
        )
    yield from _gpu_problems(machine)


def _gpu_problems(machine: dict[str, Any]) -> Iterator[str]:
    if machine["driver"] and not machine["gpus"]:
        yield (
            f"GPUs: there is driver {machine['driver']}, but torch {torch.__version__} for CUDA {torch.version.cuda} "
            "finds no GPU. Update the driver, start the container with --gpus all, or check CUDA_VISIBLE_DEVICES."
        )
    for index in range(len(machine["gpus"])):
        free, total = torch.cuda.mem_get_info(index)
        # Reported by one rank of the node, since all of them see all GPUs.
        if total - free > BUSY_SHARE * total and int(os.environ.get("LOCAL_RANK", "0")) == 0:
            yield (
                f"GPU {index}: {(total - free) / 2**30:.1f} GiB are in use. "
                "End the processes that nvidia-smi lists, or choose other GPUs by CUDA_VISIBLE_DEVICES."
            )


def _driver() -> str | None:
    """Returns the version of NVIDIA's driver, None without one."""
    if not shutil.which("nvidia-smi"):
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    printed = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False).stdout.split()
    return printed[0] if printed else None


def measure_bandwidth() -> dict[str, float]:
    """Returns bytes/s of the slowest rank: nccl-tests' bus bandwidth of all-reduce, "p2p" to the next; collective."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    if ranks == 1:
        return {}
    place = device.current_device()
    # GPU: transfers of 256 MiB over NCCL.
    # GPU-TEST: tests/test_doctor.py::test_doctor_of_two_ranks_measures_their_transfers
    # GPU-RAN: not yet
    # 256 MiB between GPUs, 4 MiB on the CPU.
    sent = torch.ones((256 if place.type == "cuda" else 4) * 2**18, device=place)
    received = torch.empty_like(sent)

    def pass_on() -> None:
        operations = [
            dist.P2POp(dist.isend, sent, (rank + 1) % ranks),
            dist.P2POp(dist.irecv, received, (rank - 1) % ranks),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    # A rank of a ring sends 2 (n - 1) / n of the tensor:
    # https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    reduced = 2 * (ranks - 1) / ranks * sent.nbytes / _seconds(lambda: dist.all_reduce(received.fill_(1)))
    passed = sent.nbytes / _seconds(pass_on)
    slowest = torch.tensor([reduced, passed], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MIN)
    return {"all_reduce": float(slowest[0]), "p2p": float(slowest[1])}


def _seconds(work: Callable[[], object]) -> float:
    work()  # the first one makes connections
    seconds = []
    for _ in range(REPEATS):
        device.synchronize()
        dist.barrier()
        started = time.perf_counter()
        work()
        device.synchronize()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def bandwidth_problems(measured: dict[str, float], nodes: int) -> Iterator[str]:
    """Yields the results of `measure_bandwidth` so low that the hardware for transfers between GPUs is not used."""
    least = SLOW_GPUS_OF_A_NODE if nodes == 1 else SLOW_NODES
    remedy = "whether peers are allowed: nvidia-smi topo -p2p r" if nodes == 1 else "RDMA: NCCL_IB_HCA, /dev/infiniband"
    for name, speed in measured.items():
        # GPU: slow transfers are a finding.
        # GPU-TEST: tests/test_doctor.py::test_slow_transfers_are_reported_between_gpus_alone
        # GPU-RAN: not yet
        if torch.cuda.is_available() and speed < least:
            yield f"{name}: {speed / 1e9:.2f} GB/s. Run with NCCL_DEBUG=INFO to see the transport, and check {remedy}."


def folder_problems(folder: Path) -> list[str]:
    """Creates the folder, and returns a problem if this rank does not see it as rank 0 does; a collective."""
    problem = None
    mark = folder / f".doctor-{broadcast_json(uuid.uuid4().hex if dist.get_rank() == 0 else None)}"
    if dist.get_rank() == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            mark.write_text(mark.name, encoding="utf-8")
        except OSError as error:
            problem = str(error)
    if problem := broadcast_json(problem):
        return [f"{folder}: rank 0 cannot write it ({problem}). Choose a folder that the job may write."]
    # A file with a new name: a folder of the same path may be on the local disk of each node.
    seen = mark.is_file() and mark.read_text(encoding="utf-8") == mark.name
    dist.barrier()
    if dist.get_rank() == 0:
        mark.unlink()
    unseen = (
        f"{folder.absolute()}: rank {dist.get_rank()} does not see what rank 0 wrote there. "
        "Give an absolute path on a file system that all nodes mount."
    )
    return [] if seen else [unseen]


def port_problems() -> list[str]:
    """Returns a problem if this rank cannot connect to a free port of the next rank; a collective of all ranks."""
    with socket.create_server(("", 0), family=socket.AF_INET) as server:
        addresses = all_gather_json([socket.gethostname(), server.getsockname()[1]])
        host, port = addresses[(dist.get_rank() + 1) % len(addresses)]
        try:
            socket.create_connection((host, port), CONNECT_SECONDS).close()
            problems = []
        except OSError as error:
            problems = [
                f"{host}:{port}: cannot connect ({error}). Let the nodes resolve each other's names, and open all TCP "
                "ports between them."
            ]
        dist.barrier()  # the port stays open until the rank before has tried
    return problems
