"""Weights that engines have kept from ranks that were lost, on their way back: the transfer of `ipc`, inverted.

    ranks of an engine                                    its processes
    memory for a chunk ──names──▶ leader ──▶ read     ──▶ copy parameters into the memory
    all ranks agree that each engine has answered     ◀── copied, or an error: no weights are taken
    boxes travel to the ranks of the runner, by a plan whose source is the engines

Only where these are the weights of the optimizer, bit for bit: engines that compute in bfloat16 have them rounded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from verl_mg import device
from verl_mg.checkpoint.sharded_safetensors import StoredBox
from verl_mg.distributed.collectives import all_gather_json
from verl_mg.engines.engine import EngineDiedError
from verl_mg.engines.payloads import Staging
from verl_mg.engines.process_engine import ProcessEngine
from verl_mg.errors import UserError
from verl_mg.reshard import execute, plan, schedule, split_into_chunks
from verl_mg.reshard.encoding import Wire
from verl_mg.sharding.boxes import Piece, Shard, intersect, slices, translate_box
from verl_mg.sharding.shard_map import ShardMap
from verl_mg.training.runner import Runner
from verl_mg.training.weights import WEIGHTS
from verl_mg.weight_sync.transfer_plan import wire_dtypes

NAMESPACE = f"actor/{WEIGHTS}"  # of the weights of which engines have a copy, in a checkpoint


class KeptWeights:
    """Weights of this rank's shards that were taken back from engines."""

    def __init__(self, shards: Mapping[str, Shard], dtypes: Mapping[str, torch.dtype]) -> None:
        self.tensors = {
            name: torch.empty(shard.shape, dtype=dtypes[name], device=device.current_device())
            for name, shard in shards.items()
        }
        self._pieces: dict[str, list[tuple[Piece, Tensor]]] = defaultdict(list)
        for name, shard in shards.items():
            for piece in shard.pieces:
                self._pieces[piece.tensor].append((piece, self.tensors[name]))

    def fill(self, part: StoredBox) -> bool:
        """Copies the values of a box into its memory; False where these are others than the actor's weights."""
        for piece, tensor in self._pieces[part.tensor] if part.namespace == NAMESPACE else ():
            if intersect(piece.source, part.box) == part.box and tensor.dtype is part.values.dtype:
                values = tensor[slices(translate_box(part.box, piece.source, piece.target))]
                part.values.copy_(values.view(part.values.shape))
                return True
        return False


def obstacle(runner: Runner, wire: Wire) -> str:
    """Returns why engines do not have the trained weights bit for bit; empty where they do."""
    if runner.lora:
        return "adapters are trained, and merged into what engines have"
    if wire != "cast":
        return f"rollout.wire={wire} rounds them"
    if runner.dtype is not torch.float32:
        return "the optimizer has them in float32"
    return "files are faster" if files_are_faster() else ""


def files_are_faster() -> bool:
    """Returns whether reading the weights from a checkpoint takes less time than moving them from engines."""
    # GPU: weights move from GPU to GPU.
    # GPU-TEST: none
    # GPU-RAN: not yet
    # The check of a checkpoint has just read its files, so their content is in memory: `bench_recovery` took 0.05 s at
    # most, and 1.1 to 1.3 s from an engine by gloo.
    return device.group_backend() != "nccl"


def take_back(
    runner: Runner, engines: ShardMap, group: dist.ProcessGroup | None, engine: ProcessEngine | None, max_bytes: int
) -> KeptWeights | str:
    """Returns the weights of a runner that all `engines` have, or why they do not give them.

    All ranks call it together. `group` has the ranks of this rank's engine, whose leader has the `engine`. A rank of an
    engine passes on `max_bytes` at a time.
    """
    rank, whole, where = dist.get_rank(), runner.shard_map(), device.current_device()
    if missing := sorted(whole.tensors.keys() - engines.tensors.keys()):
        return f"the engines do not have {missing[0]}"
    # Cut by the engines' parameters, which their ranks read whole.
    parts = split_into_chunks(engines, engines.ranks, max_bytes // runner.dtype.itemsize)
    try:
        moves = plan(engines, whole, device.ranks_of_a_node(dist.get_world_size()))
    except UserError as error:  # a part of a tensor is missing; alike on all ranks, as plans are
        return str(error)
    shards = whole.shards(rank)
    kept = KeptWeights(shards, wire_dtypes(shards, whole.tensors, runner.dtype))
    for part in parts:
        held = part.shards(rank)
        staging = Staging(held, wire_dtypes(held, part.tensors, runner.dtype), where)
        problem = _read(staging, group, engine, is_last=part is parts[-1]) if group else ""
        # Here too, so that none gives its memory back before an engine has opened it.
        if problem := next((text for text in all_gather_json(problem) if text), ""):
            return problem
        execute(schedule(moves, rank, runner.dtype, tensors=part.tensors), staging.tensors, kept.tensors)
    return kept


def _read(staging: Staging, group: dist.ProcessGroup, engine: ProcessEngine | None, is_last: bool) -> str:
    """Has the engine of this rank fill the memory of its ranks; returns why it has not, or ""."""
    payloads = all_gather_json(staging.payload(), group)
    try:
        if engine:
            engine.read(payloads, is_last)
    except (EngineDiedError, RuntimeError) as error:
        return str(error)
    return ""
