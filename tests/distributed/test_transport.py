"""Transports of NCCL as the driver and the environment say them."""

from types import SimpleNamespace

import pytest
import torch

from verl_mg.distributed import transport
from verl_mg.distributed.transport import transports


@pytest.fixture
def gpus(monkeypatch):
    """Four GPUs, whose driver says what it is told to."""

    def connected(links: int | None, peers: bool) -> None:
        matrix = None if links is None else [[links] * 4] * 4
        detected = lambda *_: SimpleNamespace(matrix=matrix)  # noqa: E731
        monkeypatch.setattr(torch._C._distributed_c10d, "_detect_dma_connectivity", detected)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: peers)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    connected(18, peers=True)
    return connected


@pytest.mark.parametrize(
    ("links", "peers", "words"),
    [(18, True, "NVLink"), (0, True, "peers over PCIe"), (None, True, "peers over PCIe"), (0, False, "shared memory")],
)
def test_transport_within_a_node_is_the_fastest_known_one(gpus, monkeypatch, links, peers, words):
    gpus(links, peers)
    ((part, found, warning),) = transports(nodes=1)
    assert part == "NCCL within a node" and found.startswith(words) and not warning
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert "NCCL_P2P_DISABLE=1" in transports(nodes=1)[0].chosen


@pytest.mark.parametrize(
    ("adapters", "variables", "found", "is_slow"),
    [
        (["mlx5_1", "mlx5_0"], {}, "RDMA by mlx5_0, mlx5_1", False),
        ([], {}, "sockets", True),
        (["mlx5_0"], {"NCCL_IB_DISABLE": "1"}, "sockets (NCCL_IB_DISABLE=1)", True),
        (["mlx5_0"], {"NCCL_NET": "Socket"}, "sockets (NCCL_NET)", True),
        ([], {"NCCL_NET_PLUGIN": "ofi"}, "plugin ofi", False),
    ],
)
def test_transport_between_nodes_without_rdma_is_a_warning(
    gpus, monkeypatch, tmp_path, adapters, variables, found, is_slow
):
    for name in adapters:
        (tmp_path / name).mkdir()
    monkeypatch.setattr(transport, "ADAPTERS", tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    row = transports(nodes=2)[1]
    assert row.chosen.startswith(found) and bool(row.warning) == is_slow


def test_transport_without_a_gpu_is_that_of_gloo():
    assert [row.chosen for row in transports(nodes=2)] == ["gloo over TCP"]
