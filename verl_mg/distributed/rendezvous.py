"""Rendezvous of ranks: MPI ranks agree on a store, and every launch uses its own namespace of the store."""

from __future__ import annotations

import os
import socket
import time
import uuid
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore

from verl_mg.errors import UserError

POLL_SECONDS = 0.05
"""Interval between two reads of the store, in seconds."""
SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Environment variables in which MPI launchers report the number of ranks."""
MAX_ADDRESS_BYTES = 256
"""Size of the broadcast buffer for HOST:PORT, in bytes."""


def wait_for_fresh_store(store: Store, rank: int, size: int, timeout: timedelta = timedelta(minutes=30)) -> Store:
    """Waits for all ranks of this launch and returns a namespace of the store that no earlier launch has used.

    torchrun's store outlives its restarts, so keys of an earlier launch may still be there. Each rank publishes a
    random token. Rank 0 answers every token with the token and the name of the namespace, until each rank has
    acknowledged that name. Tokens are unique per launch, so stale answers of an earlier launch are ignored.

    Args:
        store: the store that all ranks share.
        rank: this rank.
        size: number of ranks of the job.
        timeout: how long to wait for the other ranks.

    Returns:
        The same new namespace on all ranks.

    Raises:
        TimeoutError: a rank did not arrive in time.
    """
    token, deadline = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    if rank == 0:
        missing = set(range(1, size))
        while missing:
            for other in missing:
                if other_token := _read(store, f"token/{other}"):
                    store.set(f"answer/{other}", f"{other_token} {token}")
            missing = {other for other in missing if _read(store, f"ack/{other}") != token}
            _sleep_until(deadline, f"ranks {sorted(missing)}")
        return PrefixStore(token, store)
    store.set(f"token/{rank}", token)
    while True:
        answered_token, _, namespace = _read(store, f"answer/{rank}").partition(" ")
        if answered_token == token:
            store.set(f"ack/{rank}", namespace)
            return PrefixStore(namespace, store)
        _sleep_until(deadline, "rank 0")


def started_by_mpi() -> bool:
    """Returns whether an MPI launcher started this process as one of several ranks."""
    for variable in SIZE_VARIABLES:
        if variable in os.environ:
            return int(os.environ[variable]) > 1
    # PMIx does not report the number of ranks; Slurm does.
    return "PMIX_RANK" in os.environ and os.environ.get("SLURM_STEP_NUM_TASKS") != "1"


def join_mpi() -> tuple[Store, int, int]:
    """Joins the ranks that mpirun or srun started: MPI is used for ranks and the store's address, and nothing else.

    Sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun would.

    Returns:
        The job's store, this rank and the number of ranks.

    Raises:
        UserError: mpi4py is missing, finds no MPI library, or uses another one than the launcher.
    """
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
    world.Bcast([address, mpi.BYTE])
    host, _, port = address.rstrip(b"\0").decode().rpartition(":")
    store = store or TCPStore(host, int(port), world.size, wait_for_workers=False)
    numbers = {"RANK": world.rank, "WORLD_SIZE": world.size, "LOCAL_RANK": node.rank, "LOCAL_WORLD_SIZE": node.size}
    os.environ.update({name: str(value) for name, value in numbers.items()}, MASTER_ADDR=host, MASTER_PORT=port)
    rank, size = world.rank, world.size
    mpi.Finalize()  # its threads and buffers are not needed any more
    return store, rank, size


def _read(store: Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


def _sleep_until(deadline: float, missing: str) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError(f"{missing} did not arrive at the job's store")
    time.sleep(POLL_SECONDS)


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
