"""`Setting`: what layouts are judged by."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from verl_mg.errors import UserError
from verl_mg.layout import Layout
from verl_mg.weights import WeightTable

GIB = 2**30
GIGA = 10**9
WEIGHT_BYTES = 2  # bf16


@dataclass(frozen=True)
class Beside:
    """A role on the actor's ranks: bytes of each part, an entry for each of its pipeline stages, and its seconds."""

    name: str
    layout: Layout
    parts: Mapping[str, tuple[int, ...]]
    seconds: float


@dataclass(frozen=True)
class Setting:
    """A model on ranks of which `node` share a node; options of `verl-mg plan` have the same names."""

    weights: WeightTable
    ranks: int
    node: int = 8
    memory: float = 80.0  # GiB of a device
    reserve: float = 6.0  # GiB of it for CUDA, NCCL, the engine's graphs, sync buckets, fragmentation
    intra_node: float = 400.0  # GB/s of a rank, in each direction
    inter_node: float = 50.0
    sequence: int = 8192  # tokens of a sample
    micro_batch: int = 8192  # tokens of a micro-batch of one data-parallel index
    batch: int = 4 * 2**20  # tokens of an iteration
    minibatches: int = 1  # optimizer steps of an epoch
    epochs: int = 1  # passes over the tokens of an iteration
    recompute: bool = True
    rollout_ranks: int = 0  # so many of the last ranks hold engines and nothing else; 0: engines stand on all
    memory_fraction: float = 0.0  # of what is free when engines start, for their weights and cache; 0: all of it
    max_batch: int = 0  # samples that an engine works on at once; 0: as many as its cache has room for
    offload: bool = True  # the actor is on the host while engines are awake
    sleep: bool = True  # engines give their memory back while training computes
    beside: tuple[Beside, ...] = ()
    notes: tuple[str, ...] = ()  # further assumptions, a line each

    def __post_init__(self) -> None:
        names = ("ranks", "node", "memory", "intra_node", "inter_node", "sequence", "micro_batch", "batch")
        for name in (*names, "minibatches", "epochs"):
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

    @property
    def training_ranks(self) -> int:
        """How many of the ranks, the first ones, hold networks."""
        return self.ranks - self.rollout_ranks

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
        return sum(math.prod(entry.tensor.shape) for entry in self.weights.catalogue.entries.values())

    @cached_property
    def expert_elements(self) -> int:
        """Elements of all experts' weights."""
        entries = self.weights.catalogue.entries.values()
        return sum(math.prod(entry.tensor.shape) for entry in entries if entry.expert is not None)

    @cached_property
    def active_elements(self) -> float:
        """Elements of the weights that a token is multiplied with: experts by top_k of their count, no embedding."""
        c = self.weights.config
        idle = self.expert_elements * (1 - c.experts.top_k / c.experts.count) if c.experts else 0.0
        return self.elements - idle - (0 if c.tied else c.vocab * c.hidden)

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        tensors = (entry.tensor for entry in self.weights.catalogue.entries.values())
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
            f"an iteration has {self.batch} tokens in samples of {self.sequence}, and {steps}; seconds are of updates "
            "and of samples of full length, without the forward passes that only judge; the KV cache is bf16",
            f"a device has {self.memory:g} GiB, of which {self.reserve:g} are kept free; {self._phases()}",
            f"a rank moves {self.intra_node:g} GB/s within its node of {self.node} and {self.inter_node:g} GB/s "
            "between nodes; copies in memory take no time",
            *self.notes,
        ]

    def _phases(self) -> str:
        """What stands on a device together, as the job does it."""
        if self.rollout_ranks:
            return f"the last {self.rollout_ranks} ranks hold engines and nothing else"
        stays = "the actor waits on the host while engines are awake" if self.offload else "the actor never leaves it"
        share = f"engines take {self.memory_fraction:g} of what is free when they start" if self.memory_fraction else ""
        asleep = "engines leave it while training computes" if self.sleep else "engines never leave it"
        others = " and ".join(role.name for role in self.beside)
        always = f"{others} on it always" if others else "no other role on it"
        lines = ["all of the actor on it during the weight sync", always, stays, asleep, share]
        return ", ".join(line for line in lines if line)
