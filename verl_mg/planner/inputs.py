"""Inputs of a plan: the model, the ranks, the hardware, the tokens of an iteration and the options of training.

Hardware figures are fractions of a GPU's data sheet (`efficiency`) or come from a JSON file of measurements, see
`read_hardware_profile`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from verl_mg.errors import UserError
from verl_mg.layout import Layout, format_ranks
from verl_mg.layout.packing import pack
from verl_mg.models.flops import RowFlops, active_elements, orthogonalization_flops, row_flops
from verl_mg.planner.efficiency import DEFAULT_GPU, FITTED, GPUS, Efficiency
from verl_mg.planner.training_options import DEFAULT_OPTIONS, Recompute, TrainingOptions
from verl_mg.reshard.encoding import Wire
from verl_mg.sharding.model_table import Head, ModelTable

QUANTILES = 96  # number of samples that represent a spread
GIB = 2**30  # memory of devices is counted in GiB, rates are in GB/s
GIGA = 10**9
WEIGHT_BYTES = 2  # bytes of a bf16 weight
OPTIMIZER_STATES = "optimizer states"  # name of the part of a role's memory with main weights and moments
ACTIVATIONS = "activations"  # name of the part of a role's memory with activations
GATHERED = "gathered weights"  # name of the part with weights and gradients of layers that the FSDP backend gathers
TRANSIENT = frozenset((ACTIVATIONS, GATHERED))  # names of the parts that exist only while the role computes
# Without --gpu a plan is for this GPU.
_REACHED = FITTED.figures(GPUS[DEFAULT_GPU])
WITH_VALUE_HEAD = ("critic", "reward_model", "frozen_reward_model")  # roles whose model has a value head
FIGURES = ("flops", "memory", "memory_bandwidth", "intra_node", "inter_node", "host")
"""Names of the figures of a hardware profile."""


@dataclass(frozen=True)
class LengthSpread:
    """Spread of the lengths of samples, in tokens."""

    longest: int  # prompt and longest response
    mean: float  # prompt and mean response
    prompt: int = 0  # prompt

    @property
    def exponent(self) -> float:
        """Exponent a; infinite where all responses have the same length."""
        return math.inf if self.mean >= self.longest else (self.mean - self.prompt) / (self.longest - self.mean)

    @property
    def longest_response(self) -> int:
        """Tokens of the longest response: decoding steps until all samples are complete."""
        return self.longest - self.prompt

    @property
    def mean_response(self) -> float:
        """Mean tokens of a response."""
        return self.mean - self.prompt

    def unfinished(self, step: float) -> float:
        """Returns the fraction of samples that are longer than `step` tokens of response."""
        share = step / self.longest_response
        return 1.0 if math.isinf(self.exponent) else 1 - share**self.exponent

    @property
    def mean_square(self) -> float:
        """Mean of the squared lengths, on which attention depends."""
        if math.isinf(self.exponent):
            return float(self.longest) ** 2
        a, r, p = self.exponent, self.longest_response, self.prompt
        return p * p + 2 * p * r * a / (a + 1) + r * r * a / (a + 2)

    def samples(self) -> tuple[int, ...]:
        """Returns QUANTILES lengths that represent the spread."""
        power = 0.0 if math.isinf(self.exponent) else 1 / self.exponent
        shares = (((number + 0.5) / QUANTILES) ** power for number in range(QUANTILES))
        return tuple(max(1, round(self.prompt + self.longest_response * share)) for share in shares)


@dataclass(frozen=True)
class Packed:
    """Micro-batches that a spread is packed into."""

    per_sample: float  # micro-batches of a sample
    tokens: tuple[int, ...]  # tokens of representative micro-batches, in increasing order

    def longest_of(self, count: int) -> float:
        """Returns the expected tokens of the longest of `count` micro-batches, relative to their mean."""
        mean = sum(self.tokens) / len(self.tokens)
        size = len(self.tokens)
        # The chance that the longest of `count` is among the first k of `size` is (k / size) ** count.
        expected = sum(
            tokens * (((k + 1) / size) ** count - (k / size) ** count) for k, tokens in enumerate(self.tokens)
        )
        return expected / mean


@cache  # equal for all layouts of a search
def packed(spread: LengthSpread, budget: int) -> Packed:
    """Packs a spread into micro-batches of at most `budget` tokens, as a job packs its rows."""
    if math.isinf(spread.exponent):
        # In closed form: packing equal rows in any number gives this, without the remainder of QUANTILES of them.
        together = max(1, budget // spread.longest)
        return Packed(1 / together, (together * spread.longest,))
    rows = spread.samples()
    (micro_batches,) = pack(rows, [float(row) for row in rows], 1, budget)
    return Packed(
        len(micro_batches) / QUANTILES, tuple(sorted(sum(rows[row] for row in micro) for micro in micro_batches))
    )


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a model that are sums over all of its tensors."""

    elements: int  # number of elements of all weights
    experts: int  # number of elements of all experts' weights
    active: float  # number of weight elements that a token is multiplied with
    bytes: int  # bytes of all weights, without replicas
    row_flops: RowFlops  # FLOPs of a forward pass over a row, as a function of its length
    muon_flops: float  # FLOPs of Muon's orthogonalization of all matrices of layers


@cache  # equal for every batch, every hardware and every role of the same model
def model_size(weights: ModelTable) -> ModelSize:
    """Sums the sizes of a model's tensors, padding not included."""
    index = weights.tensor_index
    sizes = [(math.prod(entry.tensor.shape), entry) for entry in index.entries.values()]
    return ModelSize(
        elements=sum(size for size, _ in sizes),
        experts=sum(size for size, entry in sizes if entry.of_experts),
        active=active_elements(weights.config, index),
        bytes=sum(math.prod(info.shape) * info.itemsize(WEIGHT_BYTES) for info in index.tensors.values()),
        row_flops=row_flops(weights.config, index),
        muon_flops=orthogonalization_flops(index),
    )


@dataclass(frozen=True)
class AuxiliaryRole:
    """Role other than the actor, as a job describes it; the last three fields are computed."""

    name: str
    layout: Layout
    is_trained: bool = True  # whether it has gradients and an optimizer, as a critic; a reference only runs inference
    micro_batch: int = 0  # tokens of a micro-batch
    recompute: Recompute = True  # parts of a layer computed again in the backward pass: all, none, or modules by name
    model: str | None = None  # model directory; None: that of the actor
    ranks: tuple[int, ...] = ()  # ranks of the job that have it; empty: all model ranks
    offload: bool = False  # whether it is on the host while other roles compute
    options: TrainingOptions = DEFAULT_OPTIONS  # kernels, precision and overlap of training
    # Bytes of each part of its memory on a rank, one entry for each pipeline stage.
    parts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    update_seconds: float = 0.0  # predicted seconds of its updates in an iteration; 0 where it is not trained
    inference_seconds: float = 0.0  # predicted seconds of a forward pass over an iteration's tokens

    @property
    def head(self) -> Head:
        """Kind of output of its model."""
        return "value" if self.name in WITH_VALUE_HEAD else "language"


@dataclass(frozen=True)
class PlanInputs:
    """Inputs of a plan; options of `verl-mg plan` have the same names."""

    # Weight table of the actor's model: a `ModuleTable` with the FSDP backend, else a `WeightTable`.
    weights: ModelTable
    ranks: int
    node: int = 8  # number of ranks of a node
    memory: float = _REACHED["memory"]  # GiB of a device
    # GiB of a device that stay free for CUDA, NCCL, the engine's graphs, sync buckets and fragmentation.
    reserve: float = 6.0
    intra_node: float = _REACHED["intra_node"]  # GB/s of a rank to other ranks of its node, in each direction
    inter_node: float = _REACHED["inter_node"]  # GB/s of a rank to other nodes, in each direction
    host: float = _REACHED["host"]  # GB/s between a device and the host's memory, in each direction
    flops: float = _REACHED["flops"]  # TFLOP/s that a device reaches in large bf16 matrix products
    # TFLOP/s of bf16 matrix products on the device's data sheet, to which utilization relates.
    peak: float = _REACHED["peak"]
    memory_bandwidth: float = _REACHED["memory_bandwidth"]  # GB/s of a device's memory
    efficiency: Efficiency = FITTED  # constants of the cost model
    sequence: int = 8192  # tokens of the longest sample, prompt and response
    mean_sequence: float = 0.0  # mean tokens of a sample; 0: all samples are as long as the longest
    prompt: int = 0  # tokens of a prompt
    micro_batch: int = 8192  # tokens of a micro-batch of one data-parallel index
    tokens_per_iteration: int = 4 * 2**20  # tokens of an iteration over all ranks
    minibatches: int = 1  # optimizer steps of an epoch
    epochs: int = 1  # passes over the tokens of an iteration
    recompute: Recompute = True  # parts of a layer computed again in the backward pass: all, none, or modules by name
    options: TrainingOptions = DEFAULT_OPTIONS  # kernels, precision and overlap of training
    old_logprobs: bool = True  # whether the actor computes the log-probs of the samples before the update
    even_routing: bool = False  # whether routing is forced to be even, as benchmarks of pretraining do
    rollout_bytes: float = 2.0  # bytes of a weight in the engines, with `wire` cast
    wire: Wire = "cast"  # form in which engines have their weights and receive them
    delta: bool = False  # whether a weight sync sends only what the last update has changed
    # Iterations whose samples engines generate at the same time, so that a new sample takes the place of each that is
    # complete; 0: engines wait until all samples of an iteration are complete.
    batches_in_flight: int = 0
    # Whether the next samples are generated while training computes, on ranks that have only engines.
    prefetch: bool = False
    # Ranks of the actor, or of the auxiliary role that is computed in its place; empty: all model ranks.
    role_ranks: tuple[int, ...] = ()
    rollout_ranks: int = 0  # number of ranks, the last ones, that have only engines; 0: engines are on all ranks
    # Fraction of the free memory that engines take when they start, for weights and KV cache; 0: all of it.
    memory_fraction: float = 0.0
    # Samples that an engine generates at the same time; 0: as many as fit in its KV cache.
    max_running_requests: int = 0
    offload: bool = True  # whether the actor is on the host while other roles compute and while engines are awake
    sleep: bool = True  # whether engines release their memory while training computes
    auxiliary_roles: tuple[AuxiliaryRole, ...] = ()  # roles other than the actor
    notes: tuple[str, ...] = ()  # further assumptions to print, one line each

    def __post_init__(self) -> None:
        # Most fields are options of `verl-mg plan`, so errors name them as options.
        names = ("ranks", "node", "memory", "intra_node", "inter_node", "host", "flops", "memory_bandwidth")
        for name in (*names, "sequence", "micro_batch", "tokens_per_iteration", "minibatches", "epochs"):
            if not getattr(self, name) > 0:
                raise UserError(
                    f"--{name.replace('_', '-')}: {getattr(self, name)} is not above 0. Use a number above 0."
                )
        if self.mean_sequence and not self.prompt < self.mean_sequence <= self.sequence:
            raise UserError(
                f"--mean-sequence: {self.mean_sequence:g} is out of range. Use a number above the prompt's "
                f"{self.prompt}, up to --sequence {self.sequence}."
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
        # In rising order, so the last one is the largest.
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

    @property
    def lengths(self) -> LengthSpread:
        """Spread of the samples' lengths."""
        return LengthSpread(
            self.sequence, self.mean_sequence or float(self.sequence), min(self.prompt, self.sequence - 1)
        )

    @property
    def imbalance(self) -> float:
        """Tokens of the fullest expert-parallel rank, relative to the mean."""
        return 1.0 if self.even_routing else self.efficiency.imbalance

    @property
    def size(self) -> ModelSize:
        """Sizes of the model, sums over all of its tensors."""
        return model_size(self.weights)


def read_hardware_profile(path: str | Path) -> dict[str, float]:
    """Reads measured figures from a JSON file such as {"flops": 410, "host": 25}, in the units of `PlanInputs`."""
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
        number = isinstance(value, int | float) and not isinstance(value, bool)  # True is an int in Python
        if not (number and math.isfinite(value) and value > 0):
            raise UserError(f"{path}: {name} is {value!r}. Use a number above 0.")
    return {name: float(value) for name, value in figures.items()}
