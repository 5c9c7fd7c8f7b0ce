"""`EngineLayout` and `EnginePlacement`: how SGLang shards a model, and on which ranks its engines are located.

two engines tp2 on ranks 0-3      stride 1: (0, 1) and (2, 3)      stride 2: (0, 2) and (1, 3)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from verl_mg.errors import UserError
from verl_mg.layout.layout import ModelDims, divisors, parse_sizes

KEYS = ("tp", "pp", "ep", "adp")
EXAMPLE = "tp8-ep8"


@dataclass(frozen=True, slots=True)
class EngineCoordinates:
    """Coordinates of a rank: its pipeline stage, and its indices on the axes that shard tensors."""

    engine: int  # number of the engine in the job
    pp: int
    tp: int
    attention_tp: int
    attention_dp: int
    ep: int
    expert_tp: int


@dataclass(frozen=True)
class EngineLayout:
    """Valid sizes of an engine's parallelism: experts are sharded over tp / ep ranks of a stage, attention tp / adp."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    adp: int = 1

    def __post_init__(self) -> None:
        for key in KEYS:
            if getattr(self, key) < 1:
                raise UserError(f"rollout.layout: {key} is {getattr(self, key)}. Sizes start at 1, as in {EXAMPLE}.")
        for key in ("ep", "adp"):
            if self.tp % getattr(self, key):
                fitting = " or ".join(map(str, divisors(self.tp)))
                raise UserError(f"rollout.layout={self}: {key} must divide tp{self.tp}. Write {key}{fitting}.")

    @classmethod
    def parse(cls, text: str) -> EngineLayout:
        """Parses text such as `tp8-ep8`: sizes in any order, each key at most once."""
        return cls(**parse_sizes(text, KEYS, EXAMPLE))

    def __str__(self) -> str:
        """Returns the shortest text that `parse` reads as an equal layout."""
        return "-".join(f"{key}{getattr(self, key)}" for key in KEYS if getattr(self, key) > 1) or "tp1"

    @property
    def ranks(self) -> int:
        """Number of ranks of one engine."""
        return self.tp * self.pp

    @property
    def attention_tp(self) -> int:
        """Number of ranks that shard an attention layer."""
        return self.tp // self.adp

    @property
    def expert_tp(self) -> int:
        """Number of ranks that shard an expert."""
        return self.tp // self.ep

    def check(self, model: ModelDims) -> None:
        """Raises a UserError with the first dimension of a model that the layout does not divide."""
        # Key-value heads may be fewer than ranks: SGLang then gives neighbouring ranks the same head.
        self._divide(model.attention_heads, "attention heads", self.attention_tp, "tp / adp")
        if self.attention_tp % model.kv_heads:  # a multiple of the heads repeats them
            self._divide(model.kv_heads, "key-value heads", self.attention_tp, "tp / adp")
        self._divide(model.key_heads, "key heads of linear attention", self.attention_tp, "tp / adp")
        self._divide(model.ffn, "columns of the feed-forward layer", self.tp, "tp")
        if self.ep > 1 and not model.experts:
            raise UserError(
                f"rollout.layout={self}: ep{self.ep} distributes experts, but the model has none. Leave out ep."
            )
        self._divide(model.experts, "experts", self.ep, "ep")
        self._divide(model.expert_ffn, "columns of an expert", self.expert_tp, "tp / ep")
        self._divide(model.shared_ffn, "columns of the shared experts", self.tp, "tp")
        if model.layers < self.pp:
            raise UserError(
                f"rollout.layout={self}: pp{self.pp} has more stages than the model's {model.layers} layers. "
                "Use a smaller pp."
            )

    def _divide(self, dimension: int, what: str, size: int, written: str) -> None:
        if dimension % size:
            fitting = ", ".join(str(n) for n in range(1, size) if dimension % n == 0)
            raise UserError(
                f"rollout.layout={self}: {written} = {size} does not divide the {dimension} {what}. "
                f"Choose {written} from {fitting}."
            )

    def layers(self, num_layers: int, pp_rank: int) -> range:
        """Returns the global indices of the layers of a stage; SGLang gives the remaining layers to the last stages."""
        # vLLM, which distributes them in another order, is given this one by `VLLM_PP_LAYER_PARTITION`.
        each, left = divmod(num_layers, self.pp)
        start = pp_rank * each + max(0, pp_rank - (self.pp - left))
        return range(start, start + each + (pp_rank >= self.pp - left))


@dataclass(frozen=True)
class EnginePlacement:
    """Engines of a layout on ranks of a job: of a run of `layout.ranks * stride` every stride-th is of one engine."""

    layout: EngineLayout
    ranks: tuple[int, ...]  # global ranks of all engines
    stride: int = 1  # distance between neighbouring ranks of an engine
    _index: dict[int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        run = self.layout.ranks * self.stride
        if not self.ranks or len(self.ranks) % run:
            raise UserError(
                f"rollout.layout={self.layout} with stride {self.stride} requires a multiple of {run} ranks, "
                f"not {len(self.ranks)}. Change rollout.layout or the number of ranks."
            )
        # `coordinates` is called for every rank of a job.
        object.__setattr__(self, "_index", {rank: index for index, rank in enumerate(self.ranks)})

    @property
    def engines(self) -> int:
        """Number of engines in the job."""
        return len(self.ranks) // self.layout.ranks

    def coordinates(self, global_rank: int) -> EngineCoordinates:
        """Returns the coordinates of a rank; raises KeyError for a rank without engine."""
        run, rest = divmod(self._index[global_rank], self.layout.ranks * self.stride)
        member, offset = divmod(rest, self.stride)
        pp, tp = divmod(member, self.layout.tp)
        attention_dp, attention_tp = divmod(tp, self.layout.attention_tp)
        ep, expert_tp = divmod(tp, self.layout.expert_tp)
        return EngineCoordinates(run * self.stride + offset, pp, tp, attention_tp, attention_dp, ep, expert_tp)

    def members(self) -> dict[int, tuple[int, ...]]:
        """Returns the global ranks of each engine by its number, in the order of the engine's ranks."""
        ranks: dict[int, list[int]] = defaultdict(list)
        at = {rank: self.coordinates(rank) for rank in self.ranks}
        for rank in sorted(self.ranks, key=lambda rank: (at[rank].pp, at[rank].tp)):
            ranks[at[rank].engine].append(rank)
        return {number: tuple(engine) for number, engine in ranks.items()}

    def check_nodes(self, node: int) -> None:
        """Raises a UserError where an engine over several nodes of `node` ranks has not as many ranks on each."""
        for ranks in self.members().values():
            counts = Counter(rank // node for rank in ranks)
            sizes = sorted((len(counts), self.layout.pp))
            if len(set(counts.values())) > 1 or (len(counts) > 1 and sizes[1] % sizes[0]):
                raise UserError(
                    f"rollout.layout={self.layout}: an engine over {len(counts)} nodes of {node} ranks needs as many "
                    "ranks on each of them, and pipeline stages of whole nodes or within them. Write other sizes, or "
                    "another rollout.num_ranks."
                )

    def strides(self, node: int) -> Iterator[EnginePlacement]:
        """Yields the placements whose stride keeps an engine inside a node (of `node` ranks) or on whole nodes."""
        # Pipeline stages permit only stride 1: SGLang applies `gpu_id_step` to the ranks of a stage, but places the
        # stages `tp` GPUs apart.
        largest = len(self.ranks) // self.layout.ranks if self.layout.pp == 1 else 1
        for stride in range(1, largest + 1):
            run = self.layout.ranks * stride
            if len(self.ranks) % run == 0 and (stride == 1 or self._within_nodes(run, node)):
                yield EnginePlacement(self.layout, self.ranks, stride)

    def _within_nodes(self, run: int, node: int) -> bool:
        ends = zip(self.ranks[::run], self.ranks[run - 1 :: run], strict=True)
        return all(first // node == last // node for first, last in ends)
