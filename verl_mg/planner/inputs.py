"""Inputs of a plan: the model, the ranks, the hardware and the tokens of an iteration.

Hardware figures are defaults or come from a JSON file of measurements, see `read_hardware_profile`.
"""

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
WEIGHT_BYTES = 2
"""Bytes of a bf16 weight."""


@dataclass(frozen=True)
class AuxiliaryRole:
    """Memory and predicted seconds of a role other than the actor."""

    name: str
    """Name of the role."""
    layout: Layout
    """Parallel sizes of the role."""
    parts: Mapping[str, tuple[int, ...]]
    """Bytes of each part of its memory on a rank, one entry for each pipeline stage."""
    update_seconds: float
    """Predicted seconds of its updates in an iteration; 0 where it is not trained."""
    inference_seconds: float
    """Predicted seconds of a forward pass over an iteration's tokens."""
    ranks: tuple[int, ...]
    """Ranks of the job that have it."""
    offload: bool = False
    """Whether it is on the host while other roles compute."""


@dataclass(frozen=True)
class PlanInputs:
    """Inputs of a plan; options of `verl-mg plan` have the same names."""

    weights: WeightTable
    """Weight table of the actor's model."""
    ranks: int
    """Number of ranks of the job, one device each."""
    node: int = 8
    """Number of ranks of a node."""
    memory: float = 80.0
    """GiB of a device."""
    reserve: float = 6.0
    """GiB of a device for CUDA, NCCL, the engine's graphs, sync buckets and fragmentation."""
    intra_node: float = 400.0
    """GB/s of a rank to other ranks of its node, in each direction."""
    inter_node: float = 50.0
    """GB/s of a rank to other nodes, in each direction."""
    host: float = 50.0
    """GB/s between a device and the host's memory, in each direction."""
    flops: float = 400.0
    """TFLOP/s of bf16 matrix products that a device reaches; the default is for an H100."""
    memory_bandwidth: float = 2400.0
    """GB/s of a device's memory."""
    sequence: int = 8192
    """Tokens of a sample, prompt and response."""
    micro_batch: int = 8192
    """Tokens of a micro-batch of one data-parallel index."""
    tokens_per_iteration: int = 4 * 2**20
    """Tokens of an iteration over all ranks."""
    minibatches: int = 1
    """Optimizer steps of an epoch."""
    epochs: int = 1
    """Passes over the tokens of an iteration."""
    recompute: bool = True
    """Whether all activations of a layer are recomputed in the backward pass."""
    role_ranks: tuple[int, ...] = ()
    """Ranks of the actor, or of the auxiliary role that is computed in its place; empty: all model ranks."""
    rollout_ranks: int = 0
    """Number of ranks, the last ones, that have only engines; 0: engines are on all ranks."""
    memory_fraction: float = 0.0
    """Fraction of the free memory that engines take when they start, for weights and KV cache; 0: all of it."""
    max_running_requests: int = 0
    """Samples that an engine generates at the same time; 0: as many as fit in its KV cache."""
    offload: bool = True
    """Whether the actor is on the host while other roles compute and while engines are awake."""
    sleep: bool = True
    """Whether engines release their memory while training computes."""
    auxiliary_roles: tuple[AuxiliaryRole, ...] = ()
    """Roles other than the actor."""
    notes: tuple[str, ...] = ()
    """Further assumptions to print, one line each."""

    def __post_init__(self) -> None:
        names = ("ranks", "node", "memory", "intra_node", "inter_node", "host", "flops", "memory_bandwidth")
        for name in (*names, "sequence", "micro_batch", "tokens_per_iteration", "minibatches", "epochs"):
            if not getattr(self, name) > 0:
                raise UserError(
                    f"--{name.replace('_', '-')}: {getattr(self, name)} is not above 0. Use a number above 0."
                )
        if not 0 <= self.reserve < self.memory:
            raise UserError(
                f"--reserve: {self.reserve:g} is out of range. Use 0 or more, below --memory {self.memory:g}."
            )
        if not 0 <= self.memory_fraction < 1:
            raise UserError(f"--memory-fraction: {self.memory_fraction:g} is out of range. Use a number from 0 to 1.")
        if not 0 <= self.rollout_ranks < self.ranks:
            raise UserError(f"--rollout-ranks: {self.rollout_ranks} is out of range. Use 0 or fewer than {self.ranks}.")
        if self.ranks > self.node and self.ranks % self.node:
            whole = self.ranks // self.node * self.node
            raise UserError(
                f"--ranks: {self.ranks} is not a multiple of --node {self.node}. Use {whole} or {whole + self.node}, "
                "or another --node."
            )
        if self.role_ranks and self.role_ranks[-1] >= self.num_model_ranks:
            raise UserError(
                f"ranks {format_ranks(self.role_ranks)}: rank {self.role_ranks[-1]} is out of range. Model roles can "
                f"use ranks 0-{self.num_model_ranks - 1}."
            )

    @property
    def num_model_ranks(self) -> int:
        """Number of ranks, the first ones, that can have model roles."""
        return self.ranks - self.rollout_ranks

    @property
    def placement_ranks(self) -> tuple[int, ...]:
        """Ranks of the actor, or of the auxiliary role that is computed in its place."""
        return self.role_ranks or tuple(range(self.num_model_ranks))

    @property
    def engine_ranks(self) -> tuple[int, ...]:
        """Ranks of the job that have rollout engines."""
        return tuple(range(self.num_model_ranks if self.rollout_ranks else 0, self.ranks))

    @property
    def longest_micro_batch(self) -> int:
        """Tokens of the longest micro-batch: a sample longer than `micro_batch` is one by itself."""
        return max(self.micro_batch, self.sequence)

    @property
    def usable(self) -> float:
        """Bytes of a device that a job can use."""
        return (self.memory - self.reserve) * GIB

    @cached_property
    def elements(self) -> int:
        """Number of elements of all weights."""
        return sum(math.prod(entry.tensor.shape) for entry in self.weights.tensor_index.entries.values())

    @cached_property
    def expert_elements(self) -> int:
        """Number of elements of all experts' weights."""
        entries = self.weights.tensor_index.entries.values()
        return sum(math.prod(entry.tensor.shape) for entry in entries if entry.expert is not None)

    @cached_property
    def row_flops(self) -> RowFlops:
        """FLOPs of a forward pass over a row, as a function of its length."""
        return row_flops(self.weights.config, self.weights.tensor_index)

    @cached_property
    def active_elements(self) -> float:
        """Number of weight elements that a token is multiplied with."""
        return active_elements(self.weights.config, self.weights.tensor_index)

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of all weights, without replicas."""
        tensors = (entry.tensor for entry in self.weights.tensor_index.entries.values())
        return sum(math.prod(tensor.shape) * (4 if tensor.float32 else WEIGHT_BYTES) for tensor in tensors)

    def assumptions(self) -> list[str]:
        """Returns the assumptions of the plan, one line each."""
        kept = "a layer keeps its input and recomputes the rest" if self.recompute else "a layer keeps all activations"
        steps = f"{self.epochs} x {self.minibatches} optimizer steps"
        return [
            "weights are bf16; gradients, main weights and Adam's two moments float32, the latter three sharded by "
            "the distributed optimizer over dp*cp, those of experts over edp",
            f"activations: a micro-batch has {self.longest_micro_batch} tokens, {kept}; flash attention, sequence "
            "parallelism, experts evenly loaded, logits in chunks",
            f"an iteration has {self.tokens_per_iteration} tokens in samples of {self.sequence}, and {steps}; every "
            "role runs inference once over each token, samples have full length, and roles on disjoint ranks compute "
            "at the same time; the KV cache is bf16",
            f"a device has {self.memory:g} GiB, of which {self.reserve:g} are kept free; {self._residency()}",
            f"a rank moves {self.intra_node:g} GB/s within its node of {self.node}, {self.inter_node:g} GB/s "
            f"between nodes and {self.host:g} GB/s to its host",
            f"a device reaches {self.flops:g} TFLOP/s and reads {self.memory_bandwidth:g} GB/s of its memory",
            "seconds are uncalibrated: they follow from these figures and were not compared with measured runs",
            *self.notes,
        ]

    def _residency(self) -> str:
        """Describes which roles and engines are on a device at the same time."""
        if self.rollout_ranks:
            return f"the last {self.rollout_ranks} ranks have only engines"
        roles = {"the actor": self.offload} | {role.name: role.offload for role in self.auxiliary_roles}
        waiting = " and ".join(name for name, offload in roles.items() if offload)
        staying = " and ".join(name for name, offload in roles.items() if not offload)
        waits = f"on the host while other roles compute and engines are awake: {waiting}" if waiting else ""
        stays = f"always on the device: {staying}" if staying else ""
        share = (
            f"engines take {self.memory_fraction:g} of the memory that is free when they start"
            if self.memory_fraction
            else ""
        )
        asleep = "engines release it while training computes" if self.sleep else "engines never release it"
        return ", ".join(line for line in (waits, stays, asleep, share) if line)


FIGURES = ("flops", "memory", "memory_bandwidth", "intra_node", "inter_node", "host")
"""Names of the figures of a hardware profile."""


def read_hardware_profile(path: str | Path) -> dict[str, float]:
    """Reads measured figures of devices and links from a JSON file.

    The file is an object with any of these figures, each a positive number; `verl-mg plan` has an option of the same
    name for each:

        {"flops": 410, "memory": 80, "memory_bandwidth": 2500, "intra_node": 380, "inter_node": 45, "host": 25}

    `flops` is in TFLOP/s of bf16 matrix products, `memory` in GiB of a device, `memory_bandwidth` in GB/s of its
    memory, `intra_node` and `inter_node` in GB/s of a rank to its node and to other nodes, `host` in GB/s to the
    host.

    Raises:
        UserError: the file is not such an object.
    """
    try:
        figures = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a readable JSON file ({error}). Write an object of figures.") from None
    if not isinstance(figures, dict):
        raise UserError(
            f"{path}: it contains a {type(figures).__name__}. Write an object of figures: {', '.join(FIGURES)}."
        )
    for name, value in figures.items():
        if name not in FIGURES:
            raise UserError(f"{path}: unknown figure {name!r}. Use {', '.join(FIGURES)}.")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and math.isfinite(value) and value > 0):
            raise UserError(f"{path}: {name} is {value!r}. Use a number above 0.")
    return {name: float(value) for name, value in figures.items()}
