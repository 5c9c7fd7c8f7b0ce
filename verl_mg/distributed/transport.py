"""Transports of NCCL between the GPUs of a job, as the driver and the environment say them, without a transfer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from verl_mg.choice import Choice

ADAPTERS = Path("/sys/class/infiniband")
SOCKETS = "sockets"


def transports(nodes: int) -> list[Choice]:
    """Returns the rows of NCCL's transports on this rank's machine; gloo's without a GPU."""
    if not torch.cuda.is_available():
        # GPU: NCCL, over what the driver and the environment say.
        # GPU-TEST: tests/distributed/test_transport.py::test_transport_within_a_node_is_the_fastest_known_one
        # GPU-RAN: not yet
        return [Choice("collectives", "gloo over TCP")]
    rows = [Choice("NCCL within a node", _within_node())]
    if nodes > 1:
        network = _between_nodes()
        slow = "RDMA is not used. Give the container /dev/infiniband, or set NCCL_IB_HCA or NCCL_NET_PLUGIN."
        rows.append(Choice("NCCL between nodes", network, slow if network.startswith(SOCKETS) else ""))
    return rows


def _within_node() -> str:
    gpus = range(torch.cuda.device_count())
    if len(gpus) == 1:
        return "one GPU"
    if os.environ.get("NCCL_P2P_DISABLE") == "1":
        return "shared memory (NCCL_P2P_DISABLE=1)"
    pairs = [(a, b) for a in gpus for b in gpus if a != b]
    links = _links()
    if links and all(links[a][b] for a, b in pairs):
        return "NVLink (the driver's list of links)"
    if all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs):
        return "peers over PCIe (the driver's peer access)"
    return "shared memory between some GPUs (the driver's peer access)"


def _links() -> Any:
    """Returns the number of NVLink connections of each pair of GPUs; None where the driver does not say it."""
    try:
        return torch._C._distributed_c10d._detect_dma_connectivity(torch._C._autograd.DeviceType.CUDA, "nvlink").matrix  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):  # torch has no public way to it, and the driver may have no NVML
        return None


def _between_nodes() -> str:
    if name := os.environ.get("NCCL_NET"):
        return f"{SOCKETS if name == 'Socket' else name} (NCCL_NET)"
    if plugin := os.environ.get("NCCL_NET_PLUGIN"):
        return f"plugin {plugin} (NCCL_NET_PLUGIN)"
    if os.environ.get("NCCL_IB_DISABLE") == "1":
        return f"{SOCKETS} (NCCL_IB_DISABLE=1)"
    adapters = sorted(path.name for path in ADAPTERS.glob("*"))
    return f"RDMA by {', '.join(adapters)} ({ADAPTERS})" if adapters else f"{SOCKETS} ({ADAPTERS} has no adapter)"
