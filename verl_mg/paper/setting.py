"""`Setting`: what layouts are judged by."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from verl_mg.errors import UserError
from verl_mg.weights import WeightTable

GIB = 2**30
GIGA = 10**9
WEIGHT_BYTES = 2  # bf16


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
    recompute: bool = True

    def __post_init__(self) -> None:
        names = ("ranks", "node", "memory", "intra_node", "inter_node", "sequence", "micro_batch", "batch")
        for name in names:
            if not getattr(self, name) > 0:
                raise UserError(f"--{name.replace('_', '-')} is {getattr(self, name)}; write a number above 0")
        if not 0 <= self.reserve < self.memory:
            raise UserError(f"--reserve is {self.reserve:g}; write 0 or more, and less than --memory {self.memory:g}")
        if self.ranks > self.node and self.ranks % self.node:
            whole = self.ranks // self.node * self.node
            raise UserError(
                f"--ranks {self.ranks} are no whole nodes of {self.node}; write {whole} or {whole + self.node}, "
                "or another --node"
            )

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
        return [
            "weights are bf16; gradients, main weights and Adam's two moments float32, the latter three sharded by "
            "the distributed optimizer over dp*cp, those of experts over edp",
            f"activations: a micro-batch has {self.micro_batch} tokens, {kept}; flash attention, sequence "
            "parallelism, experts evenly loaded, logits in chunks",
            f"an iteration has {self.batch} tokens in samples of {self.sequence}; the KV cache is bf16",
            f"a device has {self.memory:g} GiB, of which {self.reserve:g} are kept free; gradients and optimizer "
            "states leave it before the weight sync, training weights after it; it holds no reference and no critic",
            f"a rank moves {self.intra_node:g} GB/s within its node of {self.node} and {self.inter_node:g} GB/s "
            "between nodes; copies in memory take no time",
        ]

