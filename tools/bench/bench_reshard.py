"""Weight sync of real megatron-core models: ours against gather-everything and against Megatron's own resharding.

    python -m tools.bench.bench_reshard [--cases dense-tp4 servers] [--repeats 5] [--parameters 400] [--bucket-mib 32]
        [--json FILE]

Eight processes over gloo have one model in bf16, every element of which is a function of its position in its Hugging
Face tensor. The methods take turns to fill the same target from it, after one warm-up that is verified bitwise:

    ours      verl_mg.reshard
    gather    every rank materialises every tensor, as verl and slime do (gather_everything.py)
    megatron  megatron.core.resharding with its gloo service, where both sides are Megatron models
    others    quantized weights and only changes (encoded_transfers.py), of the dense model to engines; these are
              timed one after another, without turns

The case `servers` (server_transfers.py) sends a model of a tenth of the size to real SGLang servers outside the
job, shard by shard and by broadcast.

Plans are made before the clock starts, for all methods. Bytes received are counted at messages, and for a broadcast
as the least that it needs. Peak memory is the growth of a rank's resident set.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import re
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.resharding import swap_model_weights
from megatron.core.resharding.copy_services.gloo_copy_service import GlooCopyService
from torch import Tensor

from tools.bench import server_transfers
from tools.bench.encoded_transfers import Changes, Quantized
from tools.bench.gather_everything import GatherEverything, of_each_expert
from verl_mg.layout import EngineLayout, EnginePlacement, Layout, Placement
from verl_mg.megatron.model import PackedModel, build_chunks, parameters_by_name
from verl_mg.megatron.process_groups import ParallelGroups
from verl_mg.models.hf_config import HFConfig, parse_config
from verl_mg.reshard import BUCKET_BYTES, best_stride, execute, plan, schedule
from verl_mg.reshard.encoding import Wire
from verl_mg.sharding.boxes import Box, Shard, box_shape, slices
from verl_mg.sharding.shard_map import ShardMap
from verl_mg.sharding.weight_table import weight_table
from verl_mg.training.model_spec import ModelSpec

RANKS = 8
SERVERS = "servers"
"""Case of tools/bench/server_transfers.py."""
MIB = 2**20
POISON = float("nan")
QUANTIZED: tuple[Wire, ...] = ("fp8_block", "fp8_channel", "mxfp8", "int4")
LIBC = ctypes.CDLL("libc.so.6")
HEADER = f"""\
{"":<15} {"":<9} {"MiB received a rank":>20} {"at least":>9} {"peak MiB":>9} {"seconds":>9} {"against ours":>20}
{"case":<15} {"method":<9} {"mean":>10} {"worst":>9} {"mean":>9} {"worst":>9} {"median":>9} {"bytes":>10} {"time":>9}"""


@dataclass(frozen=True)
class Case:
    """A model under a layout of Megatron, and where its weights go: to engines of SGLang, or to another layout."""

    model: str
    source: str
    target: str
    to_megatron: bool = False


CASES = {
    "dense-tp4": Case("dense", "tp4-pp2", "tp4"),
    "dense-tp2": Case("dense", "tp4-pp2", "tp2"),
    "moe": Case("moe", "ep4", "tp4-ep2"),
    "dense-megatron": Case("dense", "tp4-pp2", "tp2-pp2", to_megatron=True),
    "moe-megatron": Case("moe", "ep4", "ep8", to_megatron=True),
}


@dataclass
class Measured:
    """Measurements of one method on one rank, or merged over all ranks."""

    seconds: list[float] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    peak: list[int] = field(default_factory=list)
    details: dict[str, float] = field(default_factory=dict)


Method = Callable[[], int]
"""Fills the target; returns the bytes received."""


def main() -> None:
    """Start the ranks, print the table."""
    options = _options()
    with_servers = SERVERS in options.cases
    options.cases = [name for name in options.cases if name != SERVERS]
    report = _on_ranks(options) if options.cases else {}
    if with_servers:
        report[SERVERS] = server_transfers.measure(options.parameters * 10**5, options.repeats)
        for line in server_transfers.lines(report[SERVERS]):
            print(line, flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1))


def _on_ranks(options: argparse.Namespace) -> dict[str, Any]:
    """The cases between ranks of one job: reports by name."""
    context = get_context("fork")
    answers, answer = context.Pipe(duplex=False)
    folder = tempfile.mkdtemp()
    ranks = [context.Process(target=_rank, args=(r, options, folder, answer), daemon=True) for r in range(RANKS)]
    for process in ranks:
        process.start()
    report: dict[str, Any] = {}
    print(HEADER)
    for name in options.cases:
        if answers not in wait([answers, *(process.sentinel for process in ranks)]):
            raise SystemExit(f"{name}: a rank failed; its output is above")
        report[name] = answers.recv()
        for line in _lines(name, report[name]):
            print(line, flush=True)
    return report


def _options() -> argparse.Namespace:
    verbatim = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=verbatim)
    parser.add_argument("--cases", nargs="+", choices=[*CASES, SERVERS], default=[*CASES, SERVERS])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--parameters", type=int, default=400, metavar="MILLIONS", help="at least so many")
    parser.add_argument("--bucket-mib", type=int, default=BUCKET_BYTES // MIB, help="of ours and of gather")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


def _lines(case: str, report: dict[str, Any]) -> Iterator[str]:
    ours = report["methods"]["ours"]
    for method, measured in report["methods"].items():
        received, seconds = measured["received"], statistics.median(measured["seconds"])
        bytes_ratio = sum(received) / max(1, sum(ours["received"]))
        time_ratio = seconds / statistics.median(ours["seconds"])
        yield (
            f"{case:<15} {method:<9} {sum(received) / RANKS / MIB:>10.1f} {max(received) / MIB:>9.1f} "
            f"{report['lower_bound'] / MIB:>9.1f} {max(measured['peak']) / MIB:>9.0f} {seconds:>9.3f} "
            f"{bytes_ratio:>9.2f}x {time_ratio:>8.2f}x"
        )
    details = ", ".join(f"{what} {seconds:.2f} s" for what, seconds in ours["details"].items())
    yield f"{'':<15} {report['what']}; ours: plan {report['plan_seconds']:.2f} s, {details}"


def _rank(rank: int, options: argparse.Namespace, folder: str, answer: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS)
    for name in options.cases:
        report = _measure(CASES[name], options)
        if rank == 0:
            answer.send(report)
        gc.collect()
    dist.barrier()


def _measure(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """The report of a case, on rank 0."""
    rank, config = dist.get_rank(), model_config(case.model, options.parameters * 10**6)
    weights, bucket_bytes = weight_table(config), options.bucket_mib * MIB
    placement = Placement.on(Layout.parse(case.source), RANKS)
    source_model, groups = _megatron(config, placement)
    source = parameters_by_name([source_model])
    shard_map = weights.shard_map_megatron(placement)
    _fill(source, shard_map.shards(rank))
    target_model: PackedModel | None = None
    wanted: ShardMap
    if case.to_megatron:
        target_placement = Placement.on(Layout.parse(case.target), RANKS)
        wanted = weights.shard_map_megatron(target_placement)
        target_model, _ = _megatron(config, target_placement)
        target = parameters_by_name([target_model])
        where = f"Megatron {target_placement.layout}"
    else:
        engines = EnginePlacement(EngineLayout.parse(case.target), tuple(range(RANKS)))
        engines = best_stride(shard_map, weights, engines, RANKS)
        wanted = weights.shard_map_engine(engines)
        target = {name: torch.empty(s.shape, dtype=torch.bfloat16) for name, s in wanted.shards(rank).items()}
        where = f"{engines.engines} engines {engines.layout} at stride {engines.stride}"
    begin = time.perf_counter()
    moves = plan(shard_map, wanted, RANKS)
    ours = Ours(schedule(moves, rank, torch.bfloat16, bucket_bytes), source, target)
    plan_seconds = time.perf_counter() - begin
    methods: dict[str, Method] = {"ours": ours.run}
    if target_model is None:
        gather = GatherEverything(source, target, wanted.shards(rank), groups, config, bucket_bytes)
        methods["gather"] = gather.run
    else:
        methods["megatron"] = Megatron(source_model, target_model).run
    measured = _race(methods, target, wanted.shards(rank), options.repeats)
    measured["ours"].details = ours.details
    if case.model == "dense" and target_model is None:  # half an expert of this mixture has no whole blocks
        for wire in QUANTIZED:
            encoded = Quantized(weights, shard_map, wanted, source, wire, bucket_bytes)
            measured[wire], methods[wire] = _timed(encoded.run, options.repeats), encoded.run
        ours.run()
        changes = Changes(ours.schedule, source, target)
        measured["changes"], methods["changes"] = _timed(changes.run, options.repeats, changes.prepare), changes.run
        received = {name: tensor.clone() for name, tensor in target.items()}
        ours.run()
        if any(not torch.equal(received[n].view(torch.int16), t.view(torch.int16)) for n, t in target.items()):
            raise SystemExit("changes: the target differs from that of a whole transfer")
    bound = moves.lower_bound(rank, torch.bfloat16.itemsize)
    everyone: list[Any] = [None] * RANKS
    dist.all_gather_object(everyone, (measured, bound))
    size = sum(torch.Size(shard.shape).numel() for shard in weights.huggingface().values())
    return {
        "what": f"{size / 10**6:.0f}M parameters, Megatron {placement.layout} -> {where}",
        "parameters": size,
        "plan_seconds": plan_seconds,
        "lower_bound": statistics.mean(bound for _, bound in everyone),
        "methods": {name: asdict(_merged([measurements[name] for measurements, _ in everyone])) for name in methods},
    }


def model_config(kind: str, parameters: int) -> HFConfig:
    """A Qwen3 model of at least so many parameters, with a number of layers that two stages divide."""
    fields = {
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 32768,
        "tie_word_embeddings": False,
        "num_hidden_layers": 2,
    }
    if kind == "moe":
        experts = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 384}
        fields |= experts | {"num_key_value_heads": 4, "head_dim": 64}
    fields["model_type"] = "qwen3_moe" if kind == "moe" else "qwen3"

    def size() -> int:
        shards = weight_table(parse_config(fields)).huggingface().values()
        return sum(torch.Size(shard.shape).numel() for shard in shards)

    while size() < parameters:
        fields["num_hidden_layers"] += 2
    return parse_config(fields)


def _megatron(config: HFConfig, placement: Placement) -> tuple[PackedModel, ParallelGroups]:
    groups = ParallelGroups(placement)
    with groups.active():
        (model,) = build_chunks(weight_table(config), groups, ModelSpec(Path(), torch.bfloat16))
    return model, groups


class Ours:
    """`verl_mg.reshard` with its plan made."""

    def __init__(self, made: Any, source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
        self.schedule = made
        self._arguments = (made, source, target)
        self._packing: list[float] = []
        self._waiting: list[float] = []

    def run(self) -> int:
        """Fills the target and returns the bytes received."""
        traffic = execute(*self._arguments)
        self._packing.append(traffic.seconds_packing)
        self._waiting.append(traffic.seconds_waiting)
        return traffic.bytes_received

    @property
    def details(self) -> dict[str, float]:
        """Median seconds of packing and waiting on this rank."""
        return {
            "packing": statistics.median(self._packing[1:]),
            "waiting": statistics.median(self._waiting[1:]),
        }


class _Service(GlooCopyService):
    """Megatron's gloo service, which counts what comes from other ranks."""

    received = 0

    def submit_recv(self, dest_tensor: Tensor, src_rank: int, *options: Any, **named: Any) -> None:
        if src_rank != self.rank:
            self.received += dest_tensor.nbytes
        super().submit_recv(dest_tensor, src_rank, *options, **named)


class _Grouped:
    """A model under the names of grouped experts: its planner finds an expert's number only in `weight7`."""

    def __init__(self, model: PackedModel) -> None:
        self._model, self.config, self.pg_collection = model, model.config, model.pg_collection
        self.named_modules = model.named_modules

    def named_parameters(self, recurse: bool = True) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in of_each_expert(self._model.named_parameters(recurse=recurse)):
            yield re.sub(r"local_experts\.(\d+)\.(linear_fc[12]\.weight)$", r"\2\1", name), parameter


class Megatron:
    """`megatron.core.resharding`, which makes its plan in the first run."""

    def __init__(self, source: PackedModel, target: PackedModel) -> None:
        self._source, self._target, self._service = _Grouped(source), _Grouped(target), _Service()

    def run(self) -> int:
        """Fills the target and returns the bytes received."""
        self._service.received = 0
        swap_model_weights(self._source, self._target, self._service)
        return self._service.received


def _race(
    methods: dict[str, Method], target: Mapping[str, Tensor], shards: Mapping[str, Shard], repeats: int
) -> dict[str, Measured]:
    """The methods in turn; the first round warms up and is verified."""
    measured = {name: Measured() for name in methods}
    for turn in range(repeats + 1):
        for name, method in methods.items():
            for tensor in target.values():
                tensor.detach().fill_(POISON)
            gc.collect()
            LIBC.malloc_trim(0)  # memory that a run before has freed, and that malloc kept, would hide a peak
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
            resident = _status("VmRSS")
            dist.barrier()
            begin = time.perf_counter()
            received = method()
            seconds = time.perf_counter() - begin
            if turn == 0:
                _verify(name, target, shards)
                continue
            measured[name].seconds.append(seconds)
            measured[name].received.append(received)
            measured[name].peak.append(_status("VmHWM") - resident)
    return measured


def _timed(method: Method, repeats: int, prepare: Callable[[], None] = lambda: None) -> Measured:
    """Measures one method, after a run that warms up; `prepare` is called before each run."""
    measured = Measured()
    for turn in range(repeats + 1):
        prepare()
        gc.collect()
        LIBC.malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        resident = _status("VmRSS")
        dist.barrier()
        begin = time.perf_counter()
        received = method()
        if turn:
            measured.seconds.append(time.perf_counter() - begin)
            measured.received.append(received)
            measured.peak.append(_status("VmHWM") - resident)
    return measured


def _status(field_name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    (kib,) = re.findall(rf"{field_name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kib) * 1024


def _merged(ranks: list[Measured]) -> Measured:
    """Merges the ranks: a run takes as long as its slowest rank; bytes and peaks remain rank by rank."""
    return Measured(
        seconds=[max(run) for run in zip(*(rank.seconds for rank in ranks), strict=True)],
        received=[rank.received[-1] for rank in ranks],
        peak=[max(rank.peak) for rank in ranks],
        details={key: statistics.mean(rank.details[key] for rank in ranks) for key in ranks[0].details},
    )


def _values(tensor: str, box: Box) -> Tensor:
    """The elements of a box of a Hugging Face tensor: bits that are a hash of tensor and place, finite as bf16."""
    place = torch.zeros((1,) * len(box), dtype=torch.int32)
    for axis, (start, stop) in enumerate(box):
        shape = [-1 if other == axis else 1 for other in range(len(box))]
        place = place * 7919 + torch.arange(start, stop, dtype=torch.int32).view(shape)
    bits = (place + zlib.crc32(tensor.encode()) % 2**24) * 40503
    return (bits ^ (bits >> 13)).to(torch.int16).bitwise_and_(-0x4001).view(torch.bfloat16)


def _fill(parameters: Mapping[str, Tensor], shards: Mapping[str, Shard]) -> None:
    for name, shard in shards.items():
        for piece in shard.pieces:
            target = parameters[name].detach()[slices(piece.target)]
            target.copy_(_values(piece.tensor, piece.source).view(box_shape(piece.target)))


def _verify(method: str, parameters: Mapping[str, Tensor], shards: Mapping[str, Shard]) -> None:
    for name, shard in shards.items():
        for piece in shard.pieces:
            values = parameters[name].detach()[slices(piece.target)].view(torch.int16)
            expected = _values(piece.tensor, piece.source).view(torch.int16).view(box_shape(piece.target))
            if not torch.equal(values, expected):
                raise SystemExit(f"{method}: {name} differs at {piece}")


if __name__ == "__main__":
    main()
