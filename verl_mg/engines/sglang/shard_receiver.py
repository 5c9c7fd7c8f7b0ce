"""Receives the shards of a server's rank straight from the ranks of a job; called inside SGLang's schedulers.

A server is started with `--custom-weight-loader verl_mg.engines.sglang.shard_receiver.receive_shards`, where verl_mg
can be imported. A request of SGLang's own `/update_weights_from_tensor` then contains a `ShardRequest` instead of
weights: where the job's store is. Each rank reads its schedule there, joins a process group with the ranks of the job,
and receives its boxes in place. It reports in the store, since an exception here would end SGLang's schedulers.

    job: schedules, address of the store --> POST /update_weights_from_tensor --> receive_shards in each scheduler
    schedules/RANK   written by the job       read in `_join`, with the members of the group
    arrived/RANK     written by the rank      the job sets `go` when all have arrived
    report/N/RANK    written by the rank      read by the job after transfer N
    abort/N          written by the job       read by the thread of `AbortWatch`, and in `_join`

SGLang's own interfaces do not serve: `init_weights_update_group` gives all pipeline stages the same rank and has only
broadcasts, and its remote instances send between servers. Nor can this one serve pipeline stages: SGLang calls the
second stage when the first is done.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore

from verl_mg.distributed.outside_group import all_true, connect_all, connect_store, join_outside_group
from verl_mg.engines.sglang import internals
from verl_mg.engines.sglang.folder_receiver import FolderRequest, apply_folder
from verl_mg.engines.sglang.weight_loader import check_dtypes, loaded_parameters, message_for_loader
from verl_mg.reshard import Schedule, Traffic, execute
from verl_mg.reshard.delta_transfer import SentValues, apply_patches, transfer_changes
from verl_mg.reshard.schedule import pack_schedules, unpack_schedules
from verl_mg.sharding.boxes import Box, Order, described, slices

# Name of the loader, for the server argument `custom_weight_loader` and as load format.
RECEIVER = f"{__name__}.receive_shards"
STORE_SECONDS, GROUP_SECONDS = 60.0, 600.0  # longest wait for the job's store, and for its ranks
ARRIVAL_POLL_SECONDS = 0.02  # interval at which members look whether all others have arrived
# Interval at which a member looks whether a transfer was aborted, because another member is gone.
ABORT_POLL_SECONDS = 0.5

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ShardRequest:
    """Request to a server to receive its shards."""

    address: str
    port: int
    group: str  # name of the process group; a new name is a new group
    first_rank: int  # number of the server's first rank in the group; the others follow, stage by stage
    number: int  # number of the transfer in this group
    changes: bool = False  # whether only what has changed since the last transfer in this group is sent

    def payload(self) -> str:
        """Returns the request as SGLang passes it to a loader."""
        return message_for_loader(asdict(self))


@dataclass(frozen=True)
class Task:
    """Part of a rank of a server in the transfers of a group, as the job describes it."""

    ranks: Sequence[int]  # members of the group
    backend: str
    padding: Mapping[str, Sequence[Box]]  # boxes of its parameters that are padding, which no rank sends
    orders: Mapping[str, Order]  # dimensions of its parameters in the order in which schedules and boxes have them
    dtypes: Mapping[str, str]  # dtypes of its parameters
    exact: bool  # whether these must be equal, because values arrive as bits
    schedules: Sequence[Schedule]

    def pack(self) -> bytes:
        """Returns the task as text for the store."""
        fields = vars(self) | {"schedules": None}
        return json.dumps(fields).encode() + b"\n" + pack_schedules(self.schedules)

    @classmethod
    def unpack(cls, text: bytes) -> Task:
        """Reads the result of `pack`."""
        fields, _, packed = text.partition(b"\n")
        return cls(**json.loads(fields) | {"schedules": unpack_schedules(packed)})


@dataclass(frozen=True)
class Report:
    """Report of a rank of a server about a transfer."""

    bytes_received: int = 0  # bytes received over the wire, counted at the messages
    bytes_sent: int = 0  # bytes sent to other ranks of servers
    error: str = ""  # description of what went wrong; empty where all shards have arrived


# Keys of the store, by the rank in the group, and by the number of a transfer.
schedule_key, arrival_key, GO_KEY = "schedules/{}".format, "arrived/{}".format, "go"
report_key, abort_key = "report/{}/{}".format, "abort/{}".format


class AbortWatch:
    """Aborts a process group when the key of the store is set: NCCL would wait for ever for a member that is gone."""

    def __init__(self, store: TCPStore, number: int, group: dist.ProcessGroup) -> None:
        self._store, self._key, self._group = store, abort_key(number), group
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        # Polls the store; ends with the transfer, or after it has aborted the group, by which the transfer raises.
        while not self._done.wait(ABORT_POLL_SECONDS):
            try:
                aborted = self._store.check([self._key])
            except dist.DistError:  # the rank of the job that has the store is gone
                aborted = True
            if aborted:
                self._group.abort()
                return


class ShardReceiver:
    """The membership of this process in the group of a job, if it has joined one."""

    def __init__(self) -> None:
        self._name = ""
        self._store: TCPStore | None = None
        self._group: dist.ProcessGroup | None = None
        self._schedules: Sequence[Schedule] = []
        self._orders: Mapping[str, Order] = {}

    def receive(self, model: Any, request: ShardRequest, rank: int) -> None:
        """Receives the shards of this rank, and reports."""
        try:
            if request.group != self._name:
                self._leave()
                self._store = connect_store(request.address, request.port, timedelta(seconds=STORE_SECONDS))
            assert self._store is not None
            report = self._transfer(self._store, model, request, rank)
        except Exception as error:
            log.exception("verl_mg: the weights were not received")
            self._leave()
            report = Report(error=f"{type(error).__name__}: {error}")
        try:
            if self._store is not None:
                self._store.set(report_key(request.number, rank), json.dumps(asdict(report)))
        except dist.DistError:
            log.exception("verl_mg: the job is gone")

    def _transfer(self, store: TCPStore, model: Any, request: ShardRequest, rank: int) -> Report:
        parameters = loaded_parameters(model)
        if self._group is None:
            self._join(store, parameters, request, rank)
        assert self._group is not None
        parameters |= {name: described(parameters[name], order) for name, order in self._orders.items()}
        traffic: list[Traffic] = []
        with AbortWatch(store, request.number, self._group), torch.no_grad():
            if not (request.changes and self._receive_changes(self._group, parameters, traffic)):
                traffic += [execute(part, {}, parameters, self._group) for part in self._schedules]
        return Report(sum(part.bytes_received for part in traffic), sum(part.bytes_sent for part in traffic))

    def _receive_changes(
        self, group: dist.ProcessGroup, parameters: Mapping[str, Tensor], traffic: list[Traffic]
    ) -> bool:
        """Receives and applies changes; returns whether all ranks of servers have the senders' values then."""
        here, intact = next(iter(parameters.values())).device, True
        for part in self._schedules:
            patches, counted = transfer_changes(part, {}, SentValues(), group, here=here)
            traffic.append(counted)
            intact = apply_patches(patches, parameters) and intact
        return all_true(group, intact, here)

    def _join(self, store: TCPStore, parameters: Mapping[str, Tensor], request: ShardRequest, rank: int) -> None:
        task = Task.unpack(store.get(schedule_key(rank)))
        check_dtypes(parameters, task.dtypes, task.exact)
        with torch.no_grad():
            # No transfer writes padding, which may have any values so far.
            for name, boxes in task.padding.items():
                for box in boxes:
                    described(parameters[name], task.orders.get(name, ()))[slices(box)] = 0
        # A member that is gone would block the others in the creation of the group: it begins when all have arrived.
        # Polls for `go`, or for the abort of the transfer.
        store.set(arrival_key(rank), "")
        while not store.check([GO_KEY]):
            if store.check([abort_key(request.number)]):
                raise RuntimeError("another server is gone")
            time.sleep(ARRIVAL_POLL_SECONDS)
        timeout = timedelta(seconds=GROUP_SECONDS)
        self._group = join_outside_group(store, request.group, rank, task.ranks, task.backend, timeout)
        self._name, self._schedules, self._orders = request.group, task.schedules, task.orders
        # In some transfers a rank has no message, and NCCL would wait for it while it connects.
        connect_all(self._group, next(iter(parameters.values())).device)

    def _leave(self) -> None:
        # NCCL must not wait for members that are gone.
        group, self._group, self._name = self._group, None, ""
        if group is not None:
            group.abort()
            dist.destroy_process_group(group)


@cache
def _receiver() -> ShardReceiver:
    # One for the process, since SGLang calls a function and keeps nothing for it.
    return ShardReceiver()


def receive_shards(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Receives the shards of this rank in place, or applies the changes in a shared folder."""
    ((_, text),) = named_tensors
    fields, rank = json.loads(bytes(text.tolist())), internals.position().rank
    if "folder" in fields:
        apply_folder(model, FolderRequest(**fields), rank)
    else:
        request = ShardRequest(**fields)
        _receiver().receive(model, request, request.first_rank + rank)
    internals.compute_buffers(model)
