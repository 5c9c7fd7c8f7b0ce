"""Transfers between the ranks: bandwidth, ports, and the folder that they share."""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from verl_mg import device
from verl_mg.distributed.collectives import all_gather_json, broadcast_json

REPEATS = 5
CONNECT_SECONDS = 5
SLOW_GPUS_OF_A_NODE, SLOW_NODES = 10e9, 2e9
"""Bytes per second of a rank below which GPUs do not use NVLink or PCIe peers, and nodes do not use RDMA."""


def measure_bandwidth() -> dict[str, float]:
    """Returns bytes/s of the slowest rank: nccl-tests' bus bandwidth of all-reduce, "p2p" to the next; collective."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    if ranks == 1:
        return {}
    place = device.current_device()
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
        _finish()
        dist.barrier()
        started = time.perf_counter()
        work()
        _finish()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def _finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def bandwidth_problems(measured: dict[str, float], nodes: int) -> Iterator[str]:
    """Yields the results of `measure_bandwidth` so low that the hardware for transfers between GPUs is not used."""
    least = SLOW_GPUS_OF_A_NODE if nodes == 1 else SLOW_NODES
    remedy = "whether peers are allowed: nvidia-smi topo -p2p r" if nodes == 1 else "RDMA: NCCL_IB_HCA, /dev/infiniband"
    for name, speed in measured.items():
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
    if seen:
        return []
    return [
        f"{folder.absolute()}: rank {dist.get_rank()} does not see what rank 0 wrote there. "
        "Give an absolute path on a file system that all nodes mount."
    ]


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
