"""Meeting the ranks that mpirun or srun started: MPI tells who they are and where the store is, and nothing more."""

from __future__ import annotations

import os
import socket
from typing import Any

from torch.distributed import Store, TCPStore

from verl_mg.errors import UserError

SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
LONGEST_ADDRESS = 256
"""Bytes of HOST:PORT."""


def among_others() -> bool:
    """Whether an MPI launcher started this process and says that there are more."""
    for variable in SIZES:
        if variable in os.environ:
            return int(os.environ[variable]) > 1
    # PMIx does not tell how many there are; Slurm does.
    return "PMIX_RANK" in os.environ and os.environ.get("SLURM_STEP_NUM_TASKS") != "1"


def join() -> tuple[Store, int, int]:
    """The job's store, this rank and the number of ranks; the environment says the same, as torchrun would.

    Raises:
        UserError: mpi4py is missing, finds no MPI, or another one than that of the launcher.
    """
    mpi = _mpi()
    world = mpi.COMM_WORLD
    if world.size == 1:
        library = mpi.Get_library_version().splitlines()[0].split(",")[0]
        raise UserError(
            f"mpi4py sees one rank where the launcher started several: it uses {library}, another MPI than the "
            "launcher's; start the job with that library's mpirun, or install mpi4py against the launcher's"
        )
    node = world.Split_type(mpi.COMM_TYPE_SHARED)
    store = _serve(world.size, node.size == world.size) if world.rank == 0 else None
    text = f"{store.host}:{store.port}".encode() if store else b""
    address = bytearray(text.ljust(LONGEST_ADDRESS, b"\0"))
    world.Bcast([address, mpi.BYTE])
    host, _, port = address.rstrip(b"\0").decode().rpartition(":")
    store = store or TCPStore(host, int(port), world.size, wait_for_workers=False)
    told = {"RANK": world.rank, "WORLD_SIZE": world.size, "LOCAL_RANK": node.rank, "LOCAL_WORLD_SIZE": node.size}
    os.environ.update({name: str(value) for name, value in told.items()}, MASTER_ADDR=host, MASTER_PORT=port)
    rank, size = world.rank, world.size
    mpi.Finalize()  # its own threads and buffers have nothing more to do
    return store, rank, size


def _mpi() -> Any:
    try:
        from mpi4py import MPI
    except ImportError:
        raise UserError("ranks that MPI has started meet by mpi4py, which is missing; pip install mpi4py") from None
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"mpi4py finds no MPI library ({reason}); load the one that mpirun is of") from None
    return MPI


def _serve(size: int, one_host: bool) -> TCPStore:
    host = "127.0.0.1" if one_host else _address()
    try:
        listener = socket.create_server((host, 0))
    except OSError as error:
        raise UserError(f"{host}: rank 0 cannot listen there ({error.strerror}); set MASTER_ADDR to its host") from None
    port = listener.getsockname()[1]
    return TCPStore(host, port, size, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _address() -> str:
    """Of this host, for other hosts."""
    if "MASTER_ADDR" in os.environ:
        return os.environ["MASTER_ADDR"]
    try:
        address = socket.gethostbyname(socket.gethostname())
        if not address.startswith("127."):
            return address
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("10.255.255.255", 1))  # sends nothing; the route tells the interface
            return probe.getsockname()[0]
    except OSError:
        raise UserError("this host has no address that others know; set MASTER_ADDR to one") from None
