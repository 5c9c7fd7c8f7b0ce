"""Check of all ranks, printed as one report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_mg.distributed.collectives import all_gather_json
from verl_mg.distributed.world import World
from verl_mg.doctor.machine import describe_machine, installed_versions, machine_problems, version_problems
from verl_mg.doctor.network import bandwidth_problems, folder_problems, measure_bandwidth, port_problems

EXIT_PROBLEMS = 1  # exit code where there is something to fix


def check(folder: Path) -> int:
    """Checks this rank and, under a launcher, all others; rank 0 prints the report, and all return the same code."""
    world = World.join()
    machine, versions = describe_machine(), installed_versions()
    problems = [*version_problems(bool(machine["gpus"])), *machine_problems(machine, world.size)]
    problems += [*port_problems(), *folder_problems(folder)]
    # Collectives of all ranks, whatever the problems so far: the report names them together.
    bandwidth = measure_bandwidth()
    ranks = all_gather_json({"machine": machine, "versions": versions, "problems": problems})
    hosts = {rank["machine"]["host"]: rank for rank in reversed(ranks)}  # the first rank of each
    all_problems = _problems(ranks, [*bandwidth_problems(bandwidth, len(hosts)), *_differences(ranks)])
    if world.rank == 0:
        print("\n".join(_report(ranks, hosts, bandwidth, all_problems)), flush=True)
    world.shut_down()
    return EXIT_PROBLEMS if all_problems else 0


def _problems(ranks: Sequence[dict[str, Any]], common: Sequence[str]) -> list[str]:
    """Returns the problems of all ranks, one that several ranks of a host have once."""
    of_hosts = [f"{rank['machine']['host']}: {problem}" for rank in ranks for problem in rank["problems"]]
    return list(dict.fromkeys([*common, *of_hosts]))


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
