"""`PlanInputs`: what layouts are judged by."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from verl_mg.errors import UserError
from verl_mg.layout import Layout, format_ranks
from verl_mg.models.flops import RowFlops, active_elements, row_flops
from verl_mg.sharding.weight_table import WeightTable

GIB = 2**30
GIGA = 10**9
WEIGHT_BYTES = 2  # bf16


@dataclass(frozen=True)
class AuxiliaryRole:
    """A role beside the actor: bytes of each part, an entry for each of its pipeline stages, and where it stands.

    seconds: of its updates, 0 where it learns nothing. judging: of a forward pass over an iteration's tokens.
    """

    name: str
    layout: Layout
    parts: Mapping[str, tuple[int, ...]]
    seconds: float
    judging: float
    ranks: tuple[int, ...]
    offload: bool = False


@dataclass(frozen=True)
class PlanInputs:
    """A model on ranks of which `node` share a node; options of `verl-mg plan` have the same names."""

    weights: WeightTable
    ranks: int
    node: int = 8
    memory: float = 80.0  # GiB of a device
    reserve: float = 6.0  # GiB of it for CUDA, NCCL, the engine's graphs, sync buckets, fragmentation
    intra_node: float = 400.0  # GB/s of a rank, in each direction
    inter_node: float = 50.0
    host: float = 50.0  # GB/s between a device and the host's memory, in each direction
    flops: float = 400.0  # TFLOP/s of bf16 matrix products that a device reaches, here those of an H100
    memory_bandwidth: float = 2400.0  # GB/s of a device's memory
    sequence: int = 8192  # tokens of a sample
    micro_batch: int = 8192  # tokens of a micro-batch of one data-parallel index
    batch: int = 4 * 2**20  # tokens of an iteration
    minibatches: int = 1  # optimizer steps of an epoch
    epochs: int = 1  # passes over the tokens of an iteration
    recompute: bool = True
    role_ranks: tuple[int, ...] = ()  # the actor stands on; empty: on all that hold networks
    rollout_ranks: int = 0  # so many of the last ranks hold engines and nothing else; 0: engines stand on all
    memory_fraction: float = 0.0  # of what is free when engines start, for their weights and cache; 0: all of it
    max_running_requests: int = 0  # samples that an engine works on at once; 0: as many as its cache has room for
    offload: bool = True  # the actor is on the host while others compute and while engines are awake
    sleep: bool = True  # engines give their memory back while training computes
    beside: tuple[AuxiliaryRole, ...] = ()
    notes: tuple[str, ...] = ()  # further assumptions, a line each

    def __post_init__(self) -> None:
        names = ("ranks", "node", "memory", "intra_node", "inter_node", "host", "flops", "memory_bandwidth")
        for name in (*names, "sequence", "micro_batch", "batch", "minibatches", "epochs"):
            if not getattr(self, name) > 0:
                raise UserError(f"--{name.replace('_', '-')} is {getattr(self, name)}; write a number above 0")
        if not 0 <= self.reserve < self.memory:
            raise UserError(f"--reserve is {self.reserve:g}; write 0 or more, and less than --memory {self.memory:g}")
        if not 0 <= self.memory_fraction < 1:
            raise UserError(f"--memory-fraction is {self.memory_fraction:g}; write a number between 0 and 1")
        if not 0 <= self.rollout_ranks < self.ranks:
            raise UserError(
                f"--rollout-ranks is {self.rollout_ranks}; write 0, or fewer than the job's {self.ranks} ranks"
            )
        if self.ranks > self.node and self.ranks % self.node:
            whole = self.ranks // self.node * self.node
            raise UserError(
                f"--ranks {self.ranks} are no whole nodes of {self.node}; write {whole} or {whole + self.node}, "
                "or another --node"
            )
        if self.role_ranks and self.role_ranks[-1] >= self.training_ranks:
            raise UserError(
                f"ranks {format_ranks(self.role_ranks)}: rank {self.role_ranks[-1]} is none of the "
                f"{self.training_ranks} that hold networks, 0 to {self.training_ranks - 1}; write lower ones"
            )

    @property
    def training_ranks(self) -> int:
        """How many of the ranks, the first ones, hold networks."""
        return self.ranks - self.rollout_ranks

    @property
    def standing(self) -> tuple[int, ...]:
        """The ranks that the actor stands on, or the role that is counted in its place."""
        return self.role_ranks or tuple(range(self.training_ranks))

    @property
    def engine_ranks(self) -> tuple[int, ...]:
        """The ranks that hold engines."""
        return tuple(range(self.training_ranks if self.rollout_ranks else 0, self.ranks))

    @property
    def longest_micro_batch(self) -> int:
        """Tokens: a sample that is longer than a micro-batch is one by itself."""
        return max(self.micro_batch, self.sequence)

    @property
    def usable(self) -> float:
        """Bytes of a device that the job can fill."""
        return (self.memory - self.reserve) * GIB

    @cached_property
    def elements(self) -> int:
        """Elements of all weights."""
        return sum(math.prod(entry.tensor.shape) for entry in self.weights.tensor_index.entries.values())

    @cached_property
    def expert_elements(self) -> int:
        """Elements of all experts' weights."""
        entries = self.weights.tensor_index.entries.values()
        return sum(math.prod(entry.tensor.shape) for entry in entries if entry.expert is not None)

    @cached_property
    def row_flops(self) -> RowFlops:
        """Of a forward pass over a row."""
        return row_flops(self.weights.config, self.weights.tensor_index)

    @cached_property
    def active_elements(self) -> float:
        """Elements of the weights that a token is multiplied with."""
        return active_elements(self.weights.config, self.weights.tensor_index)

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        tensors = (entry.tensor for entry in self.weights.tensor_index.entries.values())
        return sum(math.prod(tensor.shape) * (4 if tensor.float32 else WEIGHT_BYTES) for tensor in tensors)

    def assumptions(self) -> list[str]:
        """What the numbers rest on, one line each."""
        kept = "a layer keeps its input and recomputes the rest" if self.recompute else "a layer keeps all of them"
        steps = f"{self.epochs} x {self.minibatches} optimizer steps"
        return [
            "weights are bf16; gradients, main weights and Adam's two moments float32, the latter three sharded by "
            "the distributed optimizer over dp*cp, those of experts over edp",
            f"activations: a micro-batch has {self.longest_micro_batch} tokens, {kept}; flash attention, sequence "
            "parallelism, experts evenly loaded, logits in chunks",
            f"an iteration has {self.batch} tokens in samples of {self.sequence}, and {steps}; every role judges each "
            "token once, samples are of full length, and roles on other ranks compute at the same time; the KV cache "
            "is bf16",
            f"a device has {self.memory:g} GiB, of which {self.reserve:g} are kept free; {self._phases()}",
            f"a rank moves {self.intra_node:g} GB/s within its node of {self.node}, {self.inter_node:g} GB/s "
            f"between nodes and {self.host:g} GB/s to its host",
            f"a device reaches {self.flops:g} TFLOP/s and reads {self.memory_bandwidth:g} GB/s of its memory",
            *self.notes,
        ]

    def _phases(self) -> str:
        """What stands on a device together, as the job does it."""
        if self.rollout_ranks:
            return f"the last {self.rollout_ranks} ranks hold engines and nothing else"
        roles = {"the actor": self.offload} | {role.name: role.offload for role in self.beside}
        waiting = " and ".join(name for name, offload in roles.items() if offload)
        staying = " and ".join(name for name, offload in roles.items() if not offload)
        waits = f"on the host while others compute and engines are awake: {waiting}" if waiting else ""
        stays = f"never leaving it: {staying}" if staying else ""
        share = f"engines take {self.memory_fraction:g} of what is free when they start" if self.memory_fraction else ""
        asleep = "engines leave it while training computes" if self.sleep else "engines never leave it"
        return ", ".join(line for line in (waits, stays, asleep, share) if line)


FIGURES = ("flops", "memory", "memory_bandwidth", "intra_node", "inter_node", "host")


def read_hardware_profile(path: str | Path) -> dict[str, float]:
    """The figures of a file. UserError naming what is not one."""
    try:
        figures = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a readable JSON file ({error})") from None
    if not isinstance(figures, dict):
        raise UserError(f"{path}: a {type(figures).__name__}, not an object of figures: {', '.join(FIGURES)}")
    for name, value in figures.items():
        if name not in FIGURES:
            raise UserError(f"{path}: no figure {name!r}; there are {', '.join(FIGURES)}")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and math.isfinite(value) and value > 0):
            raise UserError(f"{path}: {name} is {value!r}; write a number above 0")
    return {name: float(value) for name, value in figures.items()}
