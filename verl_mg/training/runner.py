"""`Runner`: the model of one role on this rank, as roles see it whatever the backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage

from verl_mg import device
from verl_mg.batch import Batch
from verl_mg.choice import Choice
from verl_mg.distributed.collectives import ProcessGroups
from verl_mg.layout import Coordinates, Layout, Placement, Stage
from verl_mg.phase_timer import PhaseTimer
from verl_mg.sharding.boxes import Box, Shard
from verl_mg.sharding.model_table import ModelTable
from verl_mg.sharding.shard_map import ShardMap
from verl_mg.training.logprobs import EVERYTHING, LOGPROBS, OutputHead, TokenOutputs, VocabularyShard
from verl_mg.training.lora import Adapters
from verl_mg.training.microbatch import MicroBatch
from verl_mg.training.model_spec import ModelSpec

T = TypeVar("T")
Report = dict[str, Tensor]  # values that a loss closure reports for a micro-batch
LossClosure = Callable[[MicroBatch[Any], Tensor], tuple[Tensor, Report]]
"""(micro-batch, output of the last stage) -> (scalar to differentiate, report)."""


@dataclass(frozen=True)
class Pass:
    """Passes over micro-batches, as a backend runs them."""

    micro_batches: Sequence[Batch]
    cp_sizes: Sequence[int]
    temperature: float  # above 0
    outputs: TokenOutputs
    loss_closure: LossClosure
    forward_only: bool


class OnRanks:
    """Base of the process groups of a role and of its model."""

    placement: Placement

    @property
    def layout(self) -> Layout:
        """Parallel sizes of the placement."""
        return self.placement.layout

    @property
    def is_member(self) -> bool:
        """True on the ranks of the placement."""
        return dist.get_rank() in self.placement.ranks


class RoleGroups(OnRanks):
    """Process groups of a placement; every rank of the job constructs them at the same time.

    Attributes:
        placement: the ranks and their layout.
        host_group: all ranks of the placement, for messages in host memory; None where these are all ranks of the job.
        dynamic_cp: whether fewer than all context-parallel ranks may share a micro-batch.
    """

    def __init__(
        self,
        placement: Placement,
        requested: Iterable[tuple[int, ...]],
        dynamic_cp: bool,
        process_groups: ProcessGroups | None,
    ) -> None:
        self.placement, self.dynamic_cp = placement, dynamic_cp
        self._coordinates = placement.coordinates(dist.get_rank())
        process_groups, backend = process_groups or ProcessGroups(), device.group_backend()
        # All ranks request all groups in one order, because torch names a group by the number of calls.
        self._made = {ranks: process_groups.of(ranks, backend) for ranks in requested}
        is_whole_job = len(placement.ranks) == dist.get_world_size()
        # The other groups have only NCCL on GPUs: a gloo half would connect each pair of their ranks.
        self.host_group = None if is_whole_job else process_groups.of(placement.ranks, "gloo")

    @property
    def coordinates(self) -> Coordinates:
        """Coordinates of this rank in the layout; LookupError outside the placement."""
        if self._coordinates is None:
            raise LookupError(f"rank {dist.get_rank()} is not among the ranks {self.placement.ranks} of {self.layout}")
        return self._coordinates

    def _groups_here(self, sets: Iterable[tuple[int, ...]]) -> dict[int, Any]:
        """Returns the groups of this rank among sets of ranks, by their size."""
        return {len(ranks): self._made[ranks] for ranks in sets if dist.get_rank() in ranks}


class Runner(OnRanks, ABC):
    """Model on the ranks of a placement. Methods that compute are called by all ranks of the placement together.

    Ranks of the job outside the placement have the weight table, but no parameter. The constructor is a collective of
    all ranks of the job.

    Attributes:
        table: weight table of the model.
        spec: what it is built from.
        placement: layout of the model and the ranks of the job that have it.
        coordinates: this rank's coordinates in the layout; None outside the placement.
        host_group: all ranks of the placement, for messages in host memory; None where these are all ranks of the job.
        dynamic_cp: whether fewer than all context-parallel ranks may share a micro-batch.
        dtype: dtype in which the model computes, and in which its weights are sent and exported.
        timer: timer of the phases of this rank.
        lora: adapters that are trained; None where the weights are.
        unrestored: names of this rank's parameters, adapters included, whose values a checkpoint still has to restore.
    """

    table: ModelTable
    lora: Adapters | None
    unrestored: set[str]

    def __init__(self, spec: ModelSpec, groups: RoleGroups, timer: PhaseTimer | None) -> None:
        self.spec, self.dtype, self.timer = spec, spec.dtype, timer or PhaseTimer()
        self.placement, self.host_group, self.dynamic_cp = groups.placement, groups.host_group, groups.dynamic_cp
        self.coordinates: Coordinates | None = self.placement.coordinates(dist.get_rank())

    def stage(self, pp_rank: int) -> Stage:
        """Returns the contents of a pipeline stage of the model."""
        return self.layout.stage(self.table.config.layers, pp_rank)

    def output_rank(self, worker_slot: int) -> int:
        """Returns the rank that reports the outputs of a worker slot (dp * cp + cp index): tp index 0, last stage."""
        dp, cp = divmod(worker_slot, self.layout.cp)
        return self.placement.ranks[self.layout.rank_of(cp=cp, dp=dp, pp=self.layout.pp - 1)]

    def is_output_rank_for(self, cp_size: int) -> bool:
        """Returns whether this rank reports the outputs of a micro-batch that it shares with `cp_size` cp ranks."""
        at = self.coordinates
        return at is not None and at.tp == 0 and at.pp == self.layout.pp - 1 and at.cp % cp_size == 0

    def select_outputs(self, reports: Sequence[T], cp_sizes: Sequence[int] | None = None) -> list[T | None]:
        """Replaces the reports of `run` that other ranks return by None; of no reports there are none."""
        cp_sizes = cp_sizes or [self.layout.cp] * len(reports)
        return [
            report if self.is_output_rank_for(cp_size) else None
            # Earlier pipeline stages have sizes, and no reports.
            for report, cp_size in zip(reports, cp_sizes, strict=bool(reports))
        ]

    def infer(
        self,
        micro_batches: Sequence[Batch],
        temperature: float,
        cp_sizes: Sequence[int] | None = None,
        outputs: TokenOutputs = LOGPROBS,
    ) -> list[tuple[Tensor, Tensor] | None]:
        """Computes log-probs or values of the scored tokens, or other outputs of them, without gradients.

        For each micro-batch that this rank is the output rank of there are (n,) int64 indices in its token columns and
        (n, lines) float32 outputs, (n,) of a single line, both on the CPU; None for the others; [] on ranks without
        reports. Arguments as of `run`.
        """

        def report(micro: MicroBatch[Any], output: Tensor) -> tuple[Tensor, Report]:
            # The sum is not read: pipeline schedules expect a scalar to differentiate.
            return output.sum(), {"token_index": micro.token_index, "output": output.T}

        with torch.no_grad():
            reports = self.run(micro_batches, temperature, report, True, cp_sizes, outputs)
        selected = self.select_outputs(reports, cp_sizes)
        # Copied only here, so that the host does not wait for each micro-batch before it starts the next.
        return [
            None if report is None else (report["token_index"], report["output"].cpu().squeeze(1))
            for report in selected
        ]

    def run(
        self,
        micro_batches: Sequence[Batch],
        temperature: float,
        loss_closure: LossClosure,
        forward_only: bool,
        cp_sizes: Sequence[int] | None = None,
        outputs: TokenOutputs = EVERYTHING,
    ) -> list[Report]:
        """Runs the model over micro-batches, which have the columns of this rank's stage, see `pack_rows`.

        All ranks of the placement call it. Returns the reports of the loss closure in order; [] except on the last
        stage, where it is called with each micro-batch and its output. `cp_sizes`: number of context-parallel ranks
        that share each micro-batch; None for all of them.
        """
        if not self.is_member:
            return []
        # Temperature 0 is greedy sampling: its log-probs are of the unscaled distribution.
        scale = temperature if temperature > 0 else 1.0
        cp_sizes = cp_sizes or [self.layout.cp] * len(micro_batches)
        with self.timer("forward" if forward_only else "update"):
            return self._run(Pass(micro_batches, cp_sizes, scale, outputs, loss_closure, forward_only))

    @abstractmethod
    def _run(self, work: Pass) -> list[Report]:
        """Runs the model as `run`, on a member."""

    def chosen(self) -> list[Choice]:
        """Returns what the model computes with on this rank, each once; [] outside the placement."""
        if not self.is_member:
            return []
        precision = Choice("precision", device.precision(self.dtype))
        return list(dict.fromkeys([precision, *self._kernels()]))

    @abstractmethod
    def _kernels(self) -> Iterable[Choice]:
        """Yields what the layers of this rank, a member, compute with."""

    @property
    def can_share_prefixes(self) -> bool:
        """Whether the first tokens that rows share can be computed once; otherwise every row is computed whole."""
        return False

    @property
    @abstractmethod
    def output_head(self) -> OutputHead:
        """Output layer of the language model in its directory; known on all ranks of the job."""

    @abstractmethod
    def vocabulary_shard(self) -> VocabularyShard | None:
        """Returns the part of the vocabulary whose logits this rank computes; None where it computes none."""

    # -- weights

    @abstractmethod
    def parameters(self, complete: bool = True) -> dict[str, Tensor]:
        """Returns this rank's parameters by their names in the shard map; {} outside the placement.

        With `complete` all have the values of the last update. Otherwise the caller waits for each, see `wait_for`.
        """

    @abstractmethod
    def wait_for(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Waits until parameters have the values of the last update; None for all."""

    @property
    @abstractmethod
    def computed_parameters(self) -> frozenset[str]:
        """Names of the parameters whose `served_parameters` are computed from what is trained."""

    @abstractmethod
    def served_parameters(self) -> Mapping[str, Tensor]:
        """Returns the parameters as engines receive them, in `dtype`; `computed_parameters` are computed on access."""

    def adapters(self) -> Mapping[str, Tensor]:
        """Returns what is trained in place of the weights: adapters and a value head; {} without LoRA."""
        self.wait_for()
        return self.lora.parameters if self.lora else {}

    @abstractmethod
    def written_adapters(self) -> Iterator[tuple[str, Box, Tensor]]:
        """Yields (tensor of PEFT's file, box in it, values) that this rank writes; all ranks write each box once."""

    @abstractmethod
    def shard_map(self) -> ShardMap:
        """Returns the shards of every rank, by the weight table."""

    @abstractmethod
    def trained(self) -> Mapping[str, Tensor]:
        """Returns the trained parameters of this rank, or the adapters that are trained instead."""

    def trained_shards(self) -> Mapping[str, Shard]:
        """Returns the shards of `trained`, in tensors of the checkpoint or of PEFT's file."""
        return self.lora.shards if self.lora else self.shard_map().shards(dist.get_rank())

    # -- memory

    @property
    @abstractmethod
    def entry_modules(self) -> Sequence[torch.nn.Module]:
        """Modules of this rank whose first argument is each micro-batch."""

    @abstractmethod
    def weight_storages(self) -> list[UntypedStorage]:
        """Returns the storages of parameters and buffers."""

    @abstractmethod
    def drop_caches(self) -> None:
        """Frees what is derived from the weights and kept between passes; the next pass makes it again."""


class ComputedParameters(Mapping[str, Tensor]):
    """Parameters as engines receive them, each computed on access and not cached."""

    def __init__(self, parameters: Mapping[str, Tensor], compute: Callable[[str, Tensor], Tensor]) -> None:
        self._parameters, self._compute = parameters, compute

    def __getitem__(self, name: str) -> Tensor:
        return self._compute(name, self._parameters[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)
