"""`EngineLayout` and `EnginePlacement`: how SGLang cuts a model, and on which ranks its engines stand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from verl_mg.errors import UserError
from verl_mg.layout.layout import parse_sizes
from verl_mg.layout.model_dims import ModelDims

KEYS = ("tp", "pp", "ep", "adp")
EXAMPLE = "tp8-ep8"


@dataclass(frozen=True, slots=True)
class EngineCoordinates:
    """Where one rank stands in its engine: in the pipeline, and on the four ways to cut its tensors."""

    engine: int
    pp: int
    tp: int
    attention_tp: int
    attention_dp: int
    ep: int
    expert_tp: int


@dataclass(frozen=True)
class EngineLayout:
    """Sizes of tensor, pipeline, expert and attention data parallelism of one SGLang engine.

    As in SGLang, `ep` and `adp` divide the `tp` ranks of a stage: experts are cut over tp / ep ranks, attention over
    tp / adp. An instance is always sound.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    adp: int = 1

    def __post_init__(self) -> None:
        for key in KEYS:
            if getattr(self, key) < 1:
                raise UserError(f"rollout layout: {key} is {getattr(self, key)}; sizes start at 1, as in {EXAMPLE}")
        for key in ("ep", "adp"):
            if self.tp % getattr(self, key):
                fitting = [size for size in range(1, self.tp + 1) if self.tp % size == 0]
                raise UserError(
                    f"rollout layout {self}: {key} divides the tp{self.tp} ranks of an engine; "
                    f"write {key}{' or '.join(map(str, fitting))}"
                )

    @classmethod
    def parse(cls, text: str) -> EngineLayout:
        """Read `tp8-ep8`: sizes in any order, each key at most once. UserError naming what is not understood."""
        return cls(**parse_sizes(text, KEYS, EXAMPLE))

    def __str__(self) -> str:
        """The shortest text that `parse` reads back."""
        return "-".join(f"{key}{getattr(self, key)}" for key in KEYS if getattr(self, key) > 1) or "tp1"

    @property
    def ranks(self) -> int:
        """Ranks of one engine."""
        return self.tp * self.pp

    @property
    def attention_tp(self) -> int:
        """Ranks that cut an attention layer."""
        return self.tp // self.adp

    @property
    def expert_tp(self) -> int:
        """Ranks that cut an expert."""
        return self.tp // self.ep

    def check(self, model: ModelDims) -> None:
        """Raise UserError naming the first dimension of a model that this layout does not divide.

        Key-value heads may be fewer than ranks: SGLang then gives neighbours the same head.
        """
        self._divide(model.attention_heads, "attention heads", self.attention_tp, "tp / adp")
        if self.attention_tp % model.kv_heads:
            self._divide(model.kv_heads, "key-value heads", self.attention_tp, "tp / adp")
        self._divide(model.ffn, "columns of the feed-forward layer", self.tp, "tp")
        if self.ep > 1 and not model.experts:
            raise UserError(f"rollout layout {self}: ep{self.ep} spreads experts, and the model has none; drop ep")
        self._divide(model.experts, "experts", self.ep, "ep")
        self._divide(model.expert_ffn, "columns of an expert", self.expert_tp, "tp / ep")
        self._divide(model.shared_ffn, "columns of the shared experts", self.tp, "tp")
        if model.layers < self.pp:
            raise UserError(f"rollout layout {self}: pp{self.pp} is more stages than the model's {model.layers} layers")

    def _divide(self, dimension: int, what: str, size: int, written: str) -> None:
        if dimension % size:
            fitting = ", ".join(str(n) for n in range(1, size) if dimension % n == 0)
            raise UserError(
                f"rollout layout {self}: {written} = {size} does not divide the {dimension} {what}; {fitting} would"
            )

    def layers(self, num_layers: int, pp_rank: int) -> range:
        """Global indices of the layers of a stage: SGLang gives the layers that are left over to the last stages."""
        each, left = divmod(num_layers, self.pp)
        start = pp_rank * each + max(0, pp_rank - (self.pp - left))
        return range(start, start + each + (pp_rank >= self.pp - left))


@dataclass(frozen=True)
class EnginePlacement:
    """Engines of one layout on ranks of a job, ranks `stride` apart within an engine.

    `ranks` are taken in runs of `layout.ranks * stride`; in a run, every stride-th rank belongs to the same engine
    (SGLang's `base_gpu_id` and `gpu_id_step`).
    """

    layout: EngineLayout
    ranks: tuple[int, ...]
    stride: int = 1
    _index: dict[int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        run = self.layout.ranks * self.stride
        if not self.ranks or len(self.ranks) % run:
            raise UserError(
                f"rollout layout {self.layout} with stride {self.stride} stands on a multiple of {run} ranks, "
                f"not on {len(self.ranks)}"
            )
        object.__setattr__(self, "_index", {rank: index for index, rank in enumerate(self.ranks)})

    @property
    def engines(self) -> int:
        """How many engines there are."""
        return len(self.ranks) // self.layout.ranks

    def coordinates(self, global_rank: int) -> EngineCoordinates:
        """Where a rank stands; KeyError for one that no engine has."""
        run, rest = divmod(self._index[global_rank], self.layout.ranks * self.stride)
        member, offset = divmod(rest, self.stride)
        pp, tp = divmod(member, self.layout.tp)
        attention_dp, attention_tp = divmod(tp, self.layout.attention_tp)
        ep, expert_tp = divmod(tp, self.layout.expert_tp)
        return EngineCoordinates(run * self.stride + offset, pp, tp, attention_tp, attention_dp, ep, expert_tp)

    def strides(self, node: int) -> Iterator[EnginePlacement]:
        """This placement at every stride that keeps an engine inside its `node` ranks, or on whole nodes."""
        for stride in range(1, len(self.ranks) // self.layout.ranks + 1):
            run = self.layout.ranks * stride
            if len(self.ranks) % run == 0 and (stride == 1 or self._within_nodes(run, node)):
                yield EnginePlacement(self.layout, self.ranks, stride)

    def _within_nodes(self, run: int, node: int) -> bool:
        ends = zip(self.ranks[::run], self.ranks[run - 1 :: run], strict=True)
        return all(first // node == last // node for first, last in ends)
