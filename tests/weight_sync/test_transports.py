"""What every transport has to do: bring each value to each place, at the lower bound, whoever restarts or is lost."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Qwen3Config

from tests.weight_sync.receivers import (
    CONFIG,
    TABLE,
    EngineProcess,
    Server,
    ServerRank,
    Source,
    damage,
    differing,
    tensors_of,
    world,
)
from tools.bench.message_counter import counted_traffic
from verl_mg.checkpoint.peft import adapted_tensors, adapter_shapes
from verl_mg.config.roles import LoraConfig
from verl_mg.engines.engine_options import AdapterSettings
from verl_mg.engines.hf.engine import HFEngine
from verl_mg.layout import EngineLayout, EnginePlacement, Layout
from verl_mg.models.tensor_index import TensorInfo
from verl_mg.planner.inputs import PlanInputs
from verl_mg.planner.iteration_time import weight_sync
from verl_mg.planner.memory import rollout_memory
from verl_mg.reshard import best_stride
from verl_mg.reshard.encoding import Wire
from verl_mg.sharding.boxes import Piece, Shard, full_box
from verl_mg.sharding.shard_map import ExplicitShardMap, ShardMap
from verl_mg.weight_sync import broadcast, transfer_plan
from verl_mg.weight_sync.adapters import AdapterSync
from verl_mg.weight_sync.folder import FolderSync
from verl_mg.weight_sync.hf_module import HFEngineSync
from verl_mg.weight_sync.ipc import ProcessEngineSync, engine_groups
from verl_mg.weight_sync.servers import ServerTransport, gather_views
from verl_mg.weight_sync.shards import ProcessGroupSync

CHUNK = 2**18
"""Bytes of a chunk, of which a model has several."""


class Steps:
    """Transfers of a scenario: what was wrong after each on this rank, and the bytes that it counted."""

    def __init__(self) -> None:
        self.found: list[tuple[str, list[str], float, float]] = []
        self.held: list[int] = []
        """Bytes of the parameters of each rank of an engine that this rank leads."""

    def note(self, sent: str, wrong: list[str], metrics: Mapping[str, float] = MappingProxyType({})) -> None:
        """`sent`: "all" values, "changes", "both" where changes did not give the values, "" where it is not counted."""
        received = metrics.get("weight_sync/bytes_received", metrics.get("weight_sync/bytes_written", 0.0))
        self.found.append((sent, wrong, received, metrics.get("weight_sync/bytes_lower_bound", 0.0)))


def check(results: Sequence[Steps]) -> None:
    for steps in zip(*(result.found for result in results), strict=True):
        assert [wrong for _, wrong, _, _ in steps] == [[]] * len(steps)
        for sent, _, received, needed in steps:
            share = received / needed if needed else 0.0
            low, high = {"all": (1.0, 1.0), "changes": (0.001, 0.2), "both": (1.0001, 1.2), "": (0.0, 10.0)}[sent]
            assert low <= share <= high, (sent, received, needed)


# -- engines of the job


def into_engines(wire: Wire, delta: bool) -> Steps:
    """Transfers from 4 ranks into two engines of two ranks, of which the second one restarts and dies."""
    source, rank = Source("tp4"), dist.get_rank()
    placement = best_stride(source.shard_map(), TABLE, EnginePlacement(EngineLayout(tp=2), (0, 1, 2, 3)), 4)
    leaders = [ranks[0] for ranks in placement.members().values()]
    engine = EngineProcess("tp2") if rank in leaders else None
    steps, changes = Steps(), "changes" if delta else "all"

    def wrong(version: int) -> list[str]:
        return engine.wrong(version, wire) if engine else []

    def restart(version: int) -> None:
        if engine and rank == leaders[1]:
            engine.restart()
        sync.transfer_to_engine(source.at(version), 1)
        steps.note("", wrong(version))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer_plan, "CHUNK_BYTES", CHUNK)
        sync = ProcessEngineSync(placement, engine_groups(placement), engine, TABLE, wire, delta)
        for version, sent in enumerate(("all", changes)):
            earlier = len(engine.loads) if engine else 0
            with counted_traffic() as traffic:
                metrics = sync.transfer(source.at(version))
            steps.note(sent, wrong(version), metrics)
        if engine and not delta:  # one exchange for each chunk, and the report
            assert traffic.calls["weight_sync.ipc"] == len(engine.loads) - earlier > 1
            assert traffic.calls["weight_sync.transfer_plan"] == 1
        restart(1)
        if delta and engine and rank == leaders[0]:
            damage(engine.parameters[1])
        metrics = sync.transfer(source.at(2))
        steps.note("both" if delta else "all", wrong(2), metrics)
        for version, loads in ((3, 0), (4, 2)):
            if engine and rank == leaders[1]:
                engine.loads_left = loads
            sync.transfer(source.at(version))
            dead = engine is not None and rank == leaders[1]
            steps.note("", wrong(version) if not dead else ["not noticed"] if engine.version == version else [])
            restart(version)
    if engine:
        assert ("changes" in engine.loads) == delta
        assert engine.begun == (5 if rank == leaders[0] else 8)  # once in each transfer to the engine
        steps.held = [sum(tensor.nbytes for tensor in held.values()) for held in engine.parameters]
    return steps


@pytest.mark.parametrize(
    ("wire", "delta"),
    [
        ("cast", False),
        ("fp8_block", True),
        pytest.param("cast", True, marks=pytest.mark.nightly),
        pytest.param("fp8_channel", False, marks=pytest.mark.nightly),
        pytest.param("mxfp8", True, marks=pytest.mark.nightly),
    ],
)
def test_engines_of_the_job_receive_every_value_through_restarts_and_deaths(ranks, wire, delta):
    results = ranks.run(4, into_engines, wire, delta)
    check(results)
    inputs = PlanInputs(TABLE, 4, node=4, wire=wire)
    received = weight_sync(inputs, Layout(tp=4), EngineLayout(tp=2)).received
    assert [result.found[0][2] for result in results] == [sum(received)] * 4  # on paper too
    (weights,) = rollout_memory(inputs, EngineLayout(tp=2)).weights
    assert all(result.held in ([], [weights] * 2) for result in results)


def into_modules() -> Steps:
    source, steps = Source("tp2"), Steps()
    engine = HFEngine(Qwen3Config(**CONFIG), "cpu", torch.bfloat16, load_weights=False)
    sync = HFEngineSync(engine)
    for version in range(2):
        metrics = sync.transfer(source.at(version))
        wrong = differing(engine.parameters(), tensors_of(version))
        steps.note("all", wrong if engine.version == version else [*wrong, "version"], metrics)
    return steps


def test_modules_of_the_ranks_receive_every_value(ranks):
    check(ranks.run(2, into_modules))


class Adapters:
    """Adapters of a runner, each whole on one rank; values are a function of the version."""

    config = LoraConfig(rank=4)
    adapted = adapted_tensors(TABLE, ("q_proj",))
    shapes = adapter_shapes(TABLE, adapted, 4)

    def shard_map(self, weights: ShardMap) -> ExplicitShardMap:
        shards: dict[int, dict[str, Shard]] = {rank: {} for rank in weights.ranks}
        for number, (name, shape) in enumerate(self.shapes.items()):
            whole = Shard(shape, (Piece(name, full_box(shape), full_box(shape)),))
            shards[number % len(weights.ranks)][name] = whole
        infos = {name: TensorInfo(number, shape) for number, (name, shape) in enumerate(self.shapes.items())}
        return ExplicitShardMap(shards, infos)

    def values(self, name: str, version: int) -> Tensor:
        return torch.full(self.shapes[name], len(name) + version, dtype=torch.bfloat16)


class AdaptedSource(Source):
    lora, computed_parameters, version = Adapters(), frozenset(), 0

    def adapters(self) -> dict[str, Tensor]:
        names = self.lora.shard_map(self.shard_map()).shards(dist.get_rank())
        return {name: self.lora.values(name, self.version) for name in names}


def into_engines_with_adapters() -> Steps:
    """Transfers of q_proj's adapters, of which engines fuse k_proj and v_proj, into an engine on each of two ranks."""
    source, steps, engine = AdaptedSource("tp2"), Steps(), EngineProcess("tp1")
    placement, targets = EnginePlacement(EngineLayout(), (0, 1)), ("q_proj", "k_proj", "v_proj")
    sync = AdapterSync(placement, engine_groups(placement), engine, TABLE, AdapterSettings(4, targets))
    complete = adapter_shapes(TABLE, adapted_tensors(TABLE, targets), 4)

    def wrong(version: int) -> list[str]:
        lora = source.lora
        wanted = {
            name: lora.values(name, version) if name in lora.shapes else torch.zeros(shape, dtype=torch.bfloat16)
            for name, shape in complete.items()
        }
        return [*engine.wrong(0), *differing(engine.adapters, wanted)] + [
            f"version {engine.adapter_version}" for _ in range(engine.adapter_version != version)
        ]

    weights = source.at(0)
    for version in range(2):
        source.version = version
        metrics = sync.transfer(replace(weights, version=version) if version else weights)
        steps.note("all", wrong(version), metrics)
    loads = len(engine.loads)
    if dist.get_rank() == 1:
        engine.restart()
    source.version = 0
    sync.transfer_to_engine(weights, 1)
    steps.note("", wrong(1 - dist.get_rank()))  # engine 1 has version 0 again
    assert (len(engine.loads) > loads) == (dist.get_rank() == 1)
    return steps


def test_engines_receive_weights_once_and_adapters_at_each_update(ranks):
    check(ranks.run(2, into_engines_with_adapters))


# -- servers

JOB, LAYOUTS = 2, ("tp2", "tp1")
"""Ranks of the job, each of which leads a server of one of the layouts on the ranks that follow."""


def transport(way: str, wire: Wire, folder: Path) -> ServerTransport:
    if "folder" in way:
        return FolderSync(folder, folder, TABLE if "changes" in way else None)
    return ProcessGroupSync(TABLE, way == "broadcast", wire, "changes" in way)


def into_servers(way: str, wire: Wire, folder: Path) -> Steps | None:
    """Transfers from 2 ranks to two servers, of which the second restarts and is killed in a transfer."""
    members = [(number, rank) for number, text in enumerate(LAYOUTS) for rank in range(EngineLayout.parse(text).ranks)]
    addresses = [folder / f"{number}-{rank}" for number, rank in members]
    place = dist.get_rank()
    if place < JOB:
        with world(folder / "job", place, JOB):
            mine = [address for address, (number, _) in zip(addresses, members, strict=True) if number == place]
            return send_to_servers(way, wire, folder / "shared", Server(place, LAYOUTS[place], mine))
    number, rank = members[place - JOB]
    with world(folder / f"server-{number}-{rank}", 0, 1):
        ServerRank(LAYOUTS[number], rank, wire).serve(addresses[place - JOB])
    return None


def send_to_servers(way: str, wire: Wire, folder: Path, server: Server) -> Steps:
    rank, source, steps = dist.get_rank(), Source("tp2"), Steps()
    changes, sync = "changes" in way, transport(way, wire, folder)

    def transfer(version: int, sent: str, only: Sequence[int] = (0, 1), lost: Sequence[int] = ()) -> None:
        engines = {rank: server.engine} if rank in only else {}
        result = sync.transfer(source.at(version), engines, gather_views(engines))
        assert result.lost == set(lost)
        answers = server.query("wrong", version=version) if engines and not lost else []
        wrong = [name for answer in answers for name in answer]
        steps.note("" if way in ("broadcast", "folder") or lost else sent, wrong, result.metrics)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer_plan, "CHUNK_BYTES", CHUNK)
        patch.setattr(broadcast, "BUFFER_BYTES", CHUNK)
        transfer(0, "" if "folder" in way else "all")
        transfer(1, "changes" if changes else "all")
        if rank == 1:
            server.restart()
        transfer(1, "" if "folder" in way else "all", only=[1])
        transfer(2, "changes" if way == "folder, changes" else "all")
        if changes:
            transfer(3, "changes")
            if rank == 1:
                server.query("damage")
            transfer(4, "" if "folder" in way else "both")
        if not changes:
            if rank == 1:
                if way == "shards":
                    server.restart()  # members of a new group wait for it
                server.query("kill")  # at the next request
            transfer(5, "", lost=[1])
            transfer(5, "all", only=[0])
            if rank == 1:
                server.restart()
            transfer(6, "all")
    server.end()
    return steps


@pytest.mark.parametrize(
    ("way", "wire"),
    [
        ("shards", "cast"),
        ("shards, changes", "fp8_channel"),
        ("broadcast", "cast"),
        ("folder", "cast"),
        ("folder, changes", "cast"),
        pytest.param("shards", "fp8_block", marks=pytest.mark.nightly),
        pytest.param("shards, changes", "mxfp8", marks=pytest.mark.nightly),
        pytest.param("shards, changes", "cast", marks=pytest.mark.nightly),
    ],
)
def test_servers_receive_every_value_through_restarts_and_losses(ranks, tmp_path, way, wire):
    first, second, *_ = ranks.run(5, into_servers, way, wire, tmp_path)
    check([first, second])
