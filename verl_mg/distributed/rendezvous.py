"""Rendezvous of ranks: MPI ranks agree on a store, and every launch uses its own namespace of the store.

rank r > 0                                   store                          rank 0
set token/r = T, wait for answer/T    -->    token/r = T             -->    reads all tokens, each POLL_SECONDS
                                      <--    answer/T = NAMESPACE    <--    answers each new token
set ack/NAMESPACE/r                   -->    ack/NAMESPACE/r         -->    ends when all have acknowledged
"""

from __future__ import annotations

import os
import resource
import socket
import time
import uuid
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError, PrefixStore, Store, TCPStore

from verl_mg.errors import UserError

POLL_SECONDS = 0.05  # interval at which rank 0 reads the tokens of all other ranks, in seconds
SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Environment variables in which MPI launchers report the number of ranks."""
MAX_ADDRESS_BYTES = 256  # size of the broadcast buffer for HOST:PORT, in bytes


def wait_for_fresh_store(store: Store, rank: int, size: int, timeout: timedelta = timedelta(minutes=30)) -> Store:
    """Waits for all ranks of this launch and returns a namespace of the store that no earlier launch has used.

    torchrun's store outlives its restarts, so keys of an earlier launch may still be there. Each rank publishes a
    random token and waits for the answer to it, which contains the name of the namespace. Tokens are unique per launch,
    so answers of an earlier launch are to other keys. Rank 0 answers all tokens that it finds, again and again until
    each rank has acknowledged the name: it does not know which tokens are old.

    Every rank sends a fixed number of requests, and rank 0 a few for each reading of all tokens together.
    """
    token = uuid.uuid4().hex
    if rank == 0:
        _answer_tokens(store, range(1, size), token, time.monotonic() + timeout.total_seconds())
        return PrefixStore(token, store)
    store.set(f"token/{rank}", token)
    if not _arrives(store, [f"answer/{token}"], timeout):
        raise TimeoutError("rank 0 did not arrive at the job's store")
    namespace = store.get(f"answer/{token}").decode()
    store.set(f"ack/{namespace}/{rank}", "1")
    return PrefixStore(namespace, store)


def _answer_tokens(store: Store, others: range, namespace: str, deadline: float) -> None:
    """Answers the tokens of the other ranks until all have acknowledged the namespace."""
    tokens, acks = [f"token/{rank}" for rank in others], [f"ack/{namespace}/{rank}" for rank in others]
    answered: set[str] = set()
    expected = tokens
    if others and _arrives(store, tokens, timedelta(seconds=max(0.0, deadline - time.monotonic()))):
        expected = acks
        while not store.check(acks) and time.monotonic() < deadline:
            new = {token.decode() for token in store.multi_get(tokens)} - answered
            if new:
                keys = [f"answer/{token}" for token in new]
                store.multi_set(keys, [namespace] * len(new))  # type: ignore[attr-defined]  # not in torch's stubs
                answered |= new
            time.sleep(POLL_SECONDS)
    if missing := [rank for rank, key in zip(others, expected, strict=True) if not store.check([key])]:
        raise TimeoutError(f"ranks {missing} did not arrive at the job's store")


def _arrives(store: Store, keys: list[str], timeout: timedelta) -> bool:
    """Waits for keys of the store; returns whether all were there in time."""
    try:
        store.wait(keys, timeout)
    except DistStoreError:
        return False
    return True


def raise_open_files_limit() -> None:
    """Raises the limit of open files to what the system allows: gloo connects each pair of ranks, a store all."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def started_by_mpi() -> bool:
    """Returns whether an MPI launcher started this process as one of several ranks."""
    for variable in SIZE_VARIABLES:
        if variable in os.environ:
            return int(os.environ[variable]) > 1
    # PMIx does not report the number of ranks; Slurm does.
    return "PMIX_RANK" in os.environ and os.environ.get("SLURM_STEP_NUM_TASKS") != "1"


def join_mpi() -> tuple[Store, int, int]:
    """Joins the ranks that mpirun or srun started, and sets the variables that torchrun would."""
    mpi = _import_mpi()
    world = mpi.COMM_WORLD
    if world.size == 1:
        library = mpi.Get_library_version().splitlines()[0].split(",")[0]
        raise UserError(
            f"mpi4py: it sees one rank where the launcher started several, because it uses {library}, another MPI "
            "than the launcher's. Start the job with that library's mpirun, or install mpi4py against the launcher's."
        )
    node = world.Split_type(mpi.COMM_TYPE_SHARED)
    store = _start_store(world.size, node.size == world.size) if world.rank == 0 else None
    text = f"{store.host}:{store.port}".encode() if store else b""
    address = bytearray(text.ljust(MAX_ADDRESS_BYTES, b"\0"))
    world.Bcast([address, mpi.BYTE])  # bytes, and not mpi4py's pickles
    host, _, port = address.rstrip(b"\0").decode().rpartition(":")
    store = store or TCPStore(host, int(port), world.size, wait_for_workers=False)
    numbers = {"RANK": world.rank, "WORLD_SIZE": world.size, "LOCAL_RANK": node.rank, "LOCAL_WORLD_SIZE": node.size}
    os.environ.update({name: str(value) for name, value in numbers.items()}, MASTER_ADDR=host, MASTER_PORT=port)
    rank, size = world.rank, world.size
    mpi.Finalize()  # its threads and buffers are not needed any more
    return store, rank, size


def _import_mpi() -> Any:
    try:
        from mpi4py import MPI
    except ImportError:
        raise UserError("mpi4py: it is missing, and ranks started by MPI need it. Run pip install mpi4py.") from None
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"mpi4py: it finds no MPI library ({reason}). Load the library that mpirun uses.") from None
    return MPI


def _start_store(size: int, one_host: bool) -> TCPStore:
    host = "127.0.0.1" if one_host else _host_address()
    # The listening socket is passed on, so that no other process can get its port in between.
    try:
        listener = socket.create_server((host, 0))
    except OSError as error:
        raise UserError(
            f"{host}: rank 0 cannot listen there ({error.strerror}). Set MASTER_ADDR to the host of rank 0."
        ) from None
    port = listener.getsockname()[1]
    return TCPStore(host, port, size, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _host_address() -> str:
    """Returns the address of this host under which other hosts reach it."""
    if "MASTER_ADDR" in os.environ:
        return os.environ["MASTER_ADDR"]
    try:
        address = socket.gethostbyname(socket.gethostname())
        if not address.startswith("127."):
            return address
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("10.255.255.255", 1))  # sends nothing; the route determines the interface
            return probe.getsockname()[0]
    except OSError:
        raise UserError(
            "MASTER_ADDR: this host has no address that other hosts can reach. Set MASTER_ADDR to one."
        ) from None
