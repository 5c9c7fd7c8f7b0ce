"""Changes alone and quantized weights into real SGLang servers outside a job: what their processes have afterwards."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from tests.helpers.roles import build_role
from tests.helpers.server_probe import PROBE, parameters_of
from tests.helpers.sglang_servers import SETTINGS, RunningServer, ready
from tests.helpers.traces import needs_sglang
from tests.roles.updates import COUNT, rows, settings, with_entropy
from tests.weight_sync.receivers import differing, expected
from verl_mg.config import OptimizerConfig
from verl_mg.engines.sglang.shard_receiver import RECEIVER
from verl_mg.errors import UserError
from verl_mg.models.hf_config import read_config
from verl_mg.models.tiny_model import make_tiny_model
from verl_mg.reshard.encoding import Wire
from verl_mg.roles.models import Actor
from verl_mg.servers.info import ServerRequirements
from verl_mg.servers.remote_engine import RemoteEngine
from verl_mg.sharding.weight_table import weight_table
from verl_mg.weight_sync.folder import FolderSync
from verl_mg.weight_sync.servers import gather_views
from verl_mg.weight_sync.shards import ProcessGroupSync

pytestmark = needs_sglang
MODE = "seq-mean-token-mean"
BYTES = ("sent", "received", "lower_bound")
CHANNELS = '{"quantization_config": {"quant_method": "w8a8_fp8"}}'


def start(folder: Path, name: str, **arguments: str) -> RunningServer:
    loaders = {"custom_weight_loader": [RECEIVER, PROBE], "dtype": "bfloat16"}
    return RunningServer(folder / "model", folder / f"{name}.log", "tp2", **loaders, **arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("encodings")
    make_tiny_model(
        folder / "model", "qwen3", hidden=128, layers=2, heads=4, kv_heads=4, head_dim=64, ffn=256, init_std=0.02,
        max_positions=64,
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def servers(folder) -> Iterator[list[str]]:
    with ready(start(folder, "first"), start(folder, "second")) as servers:
        yield [server.url for server in servers]


class Sender:
    """An actor of two ranks, and a sync to servers that its first rank leads."""

    def __init__(
        self, model: Path, wire: Wire, delta: bool, shared: Path | None = None, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self.model, optimizer = model, OptimizerConfig(lr=1e-6, weight_decay=0.0)
        self.actor = build_role(Actor, model, "pp2", dtype=dtype, tokens_per_micro_batch=200, optimizer=optimizer)
        table = self.actor.runner.table
        self.sync = FolderSync(shared, model, table) if shared else ProcessGroupSync(table, False, wire, delta)
        self.requirements = ServerRequirements(read_config(model), 64, group_device="cpu", shards=True, wire=wire)
        self.engines: dict[int, RemoteEngine] = {}

    def connect(self, number: int, url: str) -> None:
        if dist.get_rank() == 0:
            self.engines[number] = RemoteEngine(url, self.requirements, SETTINGS)

    def update(self) -> None:
        mine = rows(self.model).select(range(dist.get_rank(), COUNT, 2))
        self.actor.update(mine, partial(with_entropy, settings(MODE)), MODE, max_length=16, num_minibatches=1)

    def send(self, export: Path, names: Sequence[str]) -> tuple[float, ...]:
        """These counts of bytes; the weights are exported too."""
        result = self.sync.transfer(self.actor.weights, self.engines, gather_views(self.engines))
        assert not result.lost
        self.actor.save(export, self.model)
        return tuple(result.metrics[f"weight_sync/bytes_{name}"] for name in names)

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()


def wrong(export: Path, held: list[Mapping[str, Tensor]], wire: Wire = "cast") -> list[str]:
    """Parameters of a server of tp2 whose bits are not those of the exported tensors, quantized as a whole."""
    table, tensors, found = weight_table(read_config(export)), load_file(export / "model.safetensors"), list[str]()
    for rank, parameters in enumerate(held):
        wanted = expected("tp2", rank, tensors, wire, table)
        # SGLang has FP8 matrices transposed for its kernel.
        values = {name: value.t() if value.dtype.itemsize == 1 else value for name, value in parameters.items()}
        found += [f"{name} on {rank}" for name in differing({name: values[name] for name in wanted}, wanted)]
    return found


def transfers(
    folder: Path,
    urls: Sequence[str],
    steps: int,
    wire: Wire = "cast",
    shared: Path | None = None,
    joins: int = -1,
    damaged: int = -1,
) -> list[tuple[tuple[float, ...], list[str], list[str]]]:
    """Transfers with an update between two; the second server joins in one, and is damaged in another.

    The bytes of each, what differs then, and the names in the shared folder.
    """
    sender, report = Sender(folder / "model", wire, delta=True, shared=shared), []
    sender.connect(0, urls[0])
    for step in range(steps):
        if step == joins:
            sender.connect(1, urls[1])
        if step:
            sender.update()
        if step == damaged and dist.get_rank() == 0:
            parameters_of(urls[1], 2, folder / "damaged", "model.norm.weight")
        export = folder / f"{wire}-{shared is not None}-{step}"
        counted, bad = sender.send(export, ("written", "received") if shared else BYTES), list[str]()
        if dist.get_rank() == 0:
            for number in sender.engines:
                bad += wrong(export, parameters_of(urls[number], 2, folder / "held"), wire)
        dist.barrier()
        report.append((counted, bad, sorted(path.name for path in shared.iterdir()) if shared else []))
    sender.close()
    return report


def test_changes_reach_servers_that_join_or_are_damaged_bit_for_bit(ranks, folder, servers):
    first, second = ranks.run(2, transfers, folder, servers, 6, "cast", None, 2, 4)
    assert [counted for counted, *_ in first] == [counted for counted, *_ in second]
    assert [bad for _, bad, _ in first] == [[]] * 6
    shares = []
    for sent, received, everything in (counted for counted, *_ in first):
        assert sent == received > 0
        shares.append(received / everything)
    print("share of the bytes of all values, transfer by transfer:", [f"{share:.1%}" for share in shares])
    # All values at first and when a server joins; changes and then all values after the damage.
    assert shares[0] == shares[2] == 1.0 and 1.0 < shares[4] < 1.4
    assert max(shares[1], shares[3], shares[5]) < 0.4


def test_changes_in_a_shared_folder_give_servers_the_bits_of_the_weights(ranks, folder, servers):
    first, second = ranks.run(2, transfers, folder, servers, 7, "cast", folder / "shared", 4, 6)
    assert [counted for counted, *_ in first] == [counted for counted, *_ in second]
    assert [bad for _, bad, _ in first] == [[]] * 7
    # Server 1 joins in step 4, and loads all weights; in step 6 it was damaged, and does so again.
    whole, changes = {0, 4, 6}, {1, 2, 3, 4, 5, 6}
    for step, (_, _, names) in enumerate(first):
        expected = [f"changes-{step}"] * (step in changes) + [f"weights-{step}"] * (step in whole)
        assert names == expected
    (everything, _), *later = (counted for counted, *_ in first)
    print("bytes written, of those of all weights:", [f"{written / everything:.1%}" for written, _ in later])
    for step, (written, received) in enumerate(later, 1):
        assert 0 < received < 0.4 * everything
        assert written < 0.2 * everything or (step in whole and everything < written < 1.2 * everything)


def complaint(folder: Path, url: str, through: str) -> str:
    shared = folder / "refused" if through == "disk" else None
    sender = Sender(folder / "model", "cast", True, shared, torch.float32)
    sender.connect(0, url)
    try:
        for step in range(2):
            if step:
                sender.update()
            sender.send(folder / "unused", ())
    except UserError as error:
        return str(error)
    finally:
        sender.close()
    return ""


@pytest.mark.parametrize("through", ["shards", "disk"])
def test_changes_for_a_server_of_another_dtype_are_refused(ranks, folder, servers, through):
    for output in ranks.run(2, complaint, folder, servers[0], through):
        assert output.startswith(f"rollout.weight_transfer={through}: ")
        assert "is bfloat16, and the job sends float32" in output


@pytest.mark.nightly
def test_quantized_weights_reach_a_server_with_the_bits_of_its_quantizer(ranks, folder):
    """SGLang cannot compute with them on this CPU, so the server only receives."""
    with ready(start(folder, "quantized", json_model_override_args=CHANNELS)) as servers:
        first, _ = ranks.run(2, transfers, folder, [server.url for server in servers], 3, "fp8_channel")
    assert [bad for _, bad, _ in first] == [[]] * 3
    (sent, received, bound), *later = (counted for counted, *_ in first)
    assert sent == received == bound > 0
    assert all(sent == received < 0.4 * bound for sent, received, bound in later)
