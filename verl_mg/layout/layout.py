"""`Layout`: sizes of all kinds of parallelism, and the coordinates of each rank in the two grids that they span.

The ranks of a layout are numbered twice, as in Megatron with its default order `tp-cp-ep-dp-pp`:

    dense grid    rank = tp  + TP  * (cp + CP * (dp  + DP  * pp))
    expert grid   rank = etp + ETP * (ep + EP * (edp + EDP * pp))

Both cover the same ranks, so TP*CP*DP == ETP*EP*EDP, and a rank has the same `pp` in both.

    tp2-dp4-ep4-etp1, 8 ranks, EDP = 8 / 4 = 2:

    rank        0  1  2  3  4  5  6  7
    (tp, dp)    00 10 01 11 02 12 03 13
    (ep, edp)   00 10 20 30 01 11 21 31

`Placement`: a layout on ranks of a job, its process groups, and lists of ranks as text such as `0-3,8-11`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product

from verl_mg.errors import UserError

KEYS = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")  # in the order in which a layout is written
EXAMPLE = "tp4-pp2-ep8"

DENSE_GROUPS = ("cp dp", "dp", "cp", "tp pp", "tp", "pp", "tp cp dp", "tp dp", "tp cp")
"""Coordinates of the dense grid that vary within a group, for each kind of group."""
EXPERT_GROUPS = ("ep", "etp", "etp ep", "etp ep pp", "edp")
"""Coordinates of the expert grid that vary within a group, for each kind of group."""


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Coordinates of a rank: (tp, cp, dp, pp) in the dense grid, (etp, ep, edp, pp) in the expert grid."""

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int


@dataclass(frozen=True)
class ModelDims:
    """Dimensions of a model that layouts divide; 0 for a dimension that the model does not have."""

    attention_heads: int  # query heads of a layer
    kv_heads: int  # key-value heads of a layer
    layers: int
    ffn: int  # width of a dense feed-forward layer
    experts: int = 0  # routed experts of a layer
    expert_ffn: int = 0  # width of an expert
    shared_ffn: int = 0  # width of all shared experts together
    key_heads: int = 0  # key heads of a layer with linear attention


@dataclass(frozen=True)
class Stage:
    """Contents of a pipeline stage."""

    layers: tuple[int, ...]  # global indices of the layers of all model chunks of the stage, ascending
    is_first: bool  # whether it has the embedding
    is_last: bool  # whether it has the output layer


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel dimensions of a Megatron model, whose dense and expert grids cover the same ranks."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1  # virtual pipeline size: model chunks of each stage
    cp: int = 1
    ep: int = 1
    etp: int = 0  # expert-tensor-parallel size; 0 becomes tp, as in Megatron
    dp: int = 0
    """Data-parallel size; 0 becomes the smallest that both grids allow (1 without experts), until `fit` sets it."""
    pipeline_layers: tuple[int, ...] = ()
    """Number of layers of each model chunk, in the order of the layers; empty: as even as the layers allow."""
    dp_given: bool = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        # Filled in here, so that two layouts of equal sizes are equal, with dp written or left out.
        for key in KEYS:
            size = getattr(self, key)
            if size < 0 or (size == 0 and key not in ("etp", "dp")):
                raise UserError(f"layout: {key} is {size}. Sizes start at 1, as in {EXAMPLE}.")
        # `fit` may replace a dp that was filled in, and not one that was given.
        object.__setattr__(self, "dp_given", self.dp > 0)
        object.__setattr__(self, "etp", self.etp or self.tp)
        object.__setattr__(self, "dp", self.dp or self._smallest_dp)
        if self.vpp > 1 and self.pp == 1:
            raise UserError(
                f"layout {self}: vpp interleaves pipeline stages, but pp is 1. Write pp2 or more, or leave out vpp."
            )
        if self.dp % self._smallest_dp:
            raise UserError(
                f"layout {self}: the experts (etp{self.etp}, ep{self.ep}) require dp to be a multiple of "
                f"{self._smallest_dp}. Leave out dp{self.dp}, or write dp{self._smallest_dp}."
            )
        if self.pipeline_layers:
            self._check_chunks()

    @classmethod
    def parse(cls, text: str, pipeline_layers: Sequence[int] = ()) -> Layout:
        """Parses text such as `tp2-pp2-cp1-ep2`: sizes in any order, each key at most once."""
        sizes = parse_sizes(text, KEYS, EXAMPLE)
        return cls(**sizes, pipeline_layers=tuple(pipeline_layers))

    def __str__(self) -> str:
        """Returns the shortest text that `parse` reads as the same sizes; `tp1` when every size is 1."""
        defaults = {"etp": self.tp, "dp": self._smallest_dp}
        shown = [f"{key}{size}" for key in KEYS if (size := getattr(self, key)) != defaults.get(key, 1)]
        return "-".join(shown) or "tp1"

    @property
    def _smallest_dp(self) -> int:
        """The smallest dp for which both grids cover the same ranks; every valid dp is a multiple of it."""
        experts = self.etp * self.ep
        return experts // math.gcd(self.tp * self.cp, experts)

    @property
    def ranks(self) -> int:
        """Number of ranks of the layout."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def edp(self) -> int:
        """Expert-data-parallel size: the number of ranks with the same experts."""
        return self.tp * self.cp * self.dp // (self.etp * self.ep)

    def fit(self, ranks: int) -> Layout:
        """Returns this layout with the dp that makes it use exactly `ranks` ranks."""
        unit = self.tp * self.pp * self.cp * self._smallest_dp  # any other dp is a multiple of the smallest
        if ranks < 1 or ranks % unit:
            counts = map(str, [self.ranks] if self.dp_given else _multiples_around(unit, ranks))
            raise UserError(
                f"layout {self} requires a multiple of {unit} ranks, not {ranks}. Start {' or '.join(counts)}."
            )
        fitted = self._with(dp=ranks // (self.tp * self.pp * self.cp))
        if self.dp_given and fitted != self:
            raise UserError(
                f"layout {self}: dp{self.dp} requires {self.ranks} ranks, not {ranks}. "
                f"Start {self.ranks}, write dp{fitted.dp}, or leave out dp."
            )
        return fitted

    def coordinates(self, rank: int) -> Coordinates:
        """Returns the coordinates of a rank of the layout, 0 to ranks - 1; raises IndexError beyond."""
        if not 0 <= rank < self.ranks:
            raise IndexError(f"rank {rank} of layout {self}, which has {self.ranks}")
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        rest, etp = divmod(rank, self.etp)
        rest, ep = divmod(rest, self.ep)
        return Coordinates(tp, cp, dp, pp, etp, ep, edp=rest % self.edp)

    def rank_of(self, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """Returns the rank at a point of the dense grid."""
        point = {"tp": (tp, self.tp), "cp": (cp, self.cp), "dp": (dp, self.dp), "pp": (pp, self.pp)}
        for key, (index, size) in point.items():
            if not 0 <= index < size:
                raise IndexError(f"{key} index {index} of layout {self}, which has {size}")
        return tp + self.tp * (cp + self.cp * (dp + self.dp * pp))

    def layers(self, num_layers: int, pp_rank: int, vpp_rank: int = 0) -> range:
        """Returns the global indices of the layers of a model chunk: the only place that defines them.

        Chunk v of stage p is the (v * pp + p)-th run of layers, Megatron's interleaved order. Without `pipeline_layers`
        and where the chunks do not divide the layers, some have one layer fewer: the last chunk and the first, which
        have the output layer and the embedding, then their neighbours inwards. With pp2-vpp2 and 7 layers stage 0 has
        0, 1, 4, 5 and stage 1 has 2, 3, 6.
        """
        if not (0 <= pp_rank < self.pp and 0 <= vpp_rank < self.vpp):
            raise IndexError(f"chunk {vpp_rank} of pipeline stage {pp_rank} of layout {self}")
        chunks, number = self.pp * self.vpp, vpp_rank * self.pp + pp_rank
        if self.pipeline_layers:
            self.check_pipeline_layers(num_layers)
            start = sum(self.pipeline_layers[:number])
            return range(start, start + self.pipeline_layers[number])
        if num_layers < chunks:
            raise UserError(
                f"layout {self}: {chunks} pipeline chunks are more than the model's {num_layers} layers. "
                "Use a smaller pp or vpp."
            )
        each, fewer = -(-num_layers // chunks), -num_layers % chunks
        # Chunk n from the left is the (2n + 1)-th to get a layer fewer, chunk n from the right the 2n-th.
        short = [min(2 * chunk + 1, 2 * (chunks - 1 - chunk)) < fewer for chunk in range(number + 1)]
        start = number * each - sum(short[:number])
        return range(start, start + each - short[number])

    def check_pipeline_layers(self, num_layers: int) -> None:
        """Raises a UserError where `pipeline_layers` are not all layers of a model; empty ones always are."""
        if self.pipeline_layers and (total := sum(self.pipeline_layers)) != num_layers:
            raise UserError(
                f"pipeline_layers: {list(self.pipeline_layers)} are {total} layers, and the model has {num_layers}. "
                "Distribute all of them, or leave the key out."
            )

    def stage(self, num_layers: int, pp_rank: int) -> Stage:
        """Returns the contents of a pipeline stage."""
        layers = (layer for chunk in range(self.vpp) for layer in self.layers(num_layers, pp_rank, chunk))
        return Stage(tuple(layers), pp_rank == 0, pp_rank == self.pp - 1)

    def check(self, model: ModelDims) -> None:
        """Raises a UserError with the first dimension of a model that the layout does not divide."""
        # Megatron would replicate KV heads for a tp that is a multiple of them; here no two ranks share a head.
        self._divide(model.attention_heads, "attention heads", "tp")
        self._divide(model.kv_heads, "key-value heads", "tp")
        self._divide(model.key_heads, "key heads of linear attention", "tp")
        self._divide(model.ffn, "columns of the feed-forward layer", "tp")
        self.layers(model.layers, 0)  # raises for too few layers
        if model.experts == 0 and self.ep > 1:
            raise UserError(f"layout {self}: ep{self.ep} distributes experts, but the model has none. Leave out ep.")
        self._divide(model.experts, "experts", "ep")
        self._divide(model.expert_ffn, "columns of an expert", "etp")
        self._divide(model.shared_ffn, "columns of the shared experts", "tp")

    def check_context(self, attention_heads: int, value_heads: int = 0) -> None:
        """Raises a UserError where tp * cp does not divide the heads that context-parallel ranks distribute."""
        self._divide(attention_heads, "attention heads", "tp", "cp")
        self._divide(value_heads, "value heads of linear attention", "tp", "cp")

    def check_down_projections(self, *widths: int) -> None:
        """Raises a UserError where tp does not divide the widths of the down projections of latent attention."""
        for width in widths:
            self._divide(width, "rows of a down projection of latent attention", "tp")

    def _divide(self, dimension: int, what: str, *keys: str) -> None:
        size = math.prod(getattr(self, key) for key in keys)
        if dimension % size == 0:
            return
        # The six nearest sizes that divide it: large dimensions have dozens.
        nearest = sorted(divisors(dimension), key=lambda divisor: abs(divisor - size))[:6]
        axes = "*".join(key for key in keys if len(keys) == 1 or getattr(self, key) > 1)
        named = "-".join(f"{key}{getattr(self, key)}" for key in axes.split("*"))
        raise UserError(
            f"layout {self}: {named} does not divide the {dimension} {what}. "
            f"Choose {axes} from {', '.join(map(str, sorted(nearest)))}."
        )

    def _check_chunks(self) -> None:
        """Checks the number of `pipeline_layers`, and that only the first and the last chunk have none."""
        # A chunk between them without a layer would only pass tensors on.
        chunks, given = self.pp * self.vpp, list(self.pipeline_layers)
        if self.pp == 1:
            raise UserError(
                f"pipeline_layers: layout {self} has one pipeline stage, with all layers. Leave the key out, or write "
                "pp2 or more."
            )
        if len(given) != chunks:
            sizes = f"pp{self.pp}" + (f"-vpp{self.vpp}" if self.vpp > 1 else "")
            raise UserError(
                f"pipeline_layers: {given} has length {len(given)}, and layout {self} has {chunks} pipeline chunks. "
                f"Write one number for each chunk of {sizes}, in the order of the layers."
            )
        if min(given) < 0 or min(given[1:-1], default=1) < 1:
            raise UserError(
                f"pipeline_layers: {given} has a chunk without layers. Write 1 or more; 0 is possible for the first "
                "chunk, with only the embedding, and for the last one, with only the output layer."
            )

    def _with(self, **changes: int) -> Layout:
        """Returns a copy with other sizes; an etp equal to tp follows tp, and dp is recomputed."""
        sizes = {key: getattr(self, key) for key in KEYS}
        sizes["etp"] = 0 if self.etp == self.tp else self.etp
        sizes["dp"] = 0
        return Layout(**{**sizes, **changes}, pipeline_layers=self.pipeline_layers)


def parse_sizes(text: str, keys: tuple[str, ...], example: str) -> dict[str, int]:
    """Parses text such as `tp2-pp2` into {key: size}; `example` is a valid text, for the error."""
    sizes: dict[str, int] = {}
    for token in text.split("-"):
        match = re.fullmatch(r"([a-z]+)([0-9]+)", token)
        if match is None:
            reason = f"{token!r} is not a key and a number"
        elif match[1] not in keys:
            reason = f"{token!r} has an unknown key"
        elif match[1] in sizes:
            reason = f"{token!r} gives {match[1]} a second time"
        elif int(match[2]) == 0:
            reason = f"{token!r} is not a size, sizes start at 1"
        else:
            sizes[match[1]] = int(match[2])
            continue
        raise UserError(f"layout {text!r}: {reason}. Valid keys are {', '.join(keys)}, each once, as in {example}.")
    return sizes


def _multiples_around(unit: int, ranks: int) -> list[int]:
    """Returns the next positive multiples of `unit` below and above `ranks`."""
    below = max(ranks, 0) // unit * unit
    return [count for count in (below, below + unit) if count > 0]


def divisors(number: int) -> list[int]:
    """Returns the divisors of a number in increasing order, the number included."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


@dataclass(frozen=True)
class Placement:
    """A layout and its ranks in a job."""

    layout: Layout
    ranks: tuple[int, ...]  # global ranks: rank i of the layout is rank `ranks[i]` of the job

    def __post_init__(self) -> None:
        if len(self.ranks) != self.layout.ranks:
            raise UserError(
                f"layout {self.layout} has {self.layout.ranks} ranks, but {len(self.ranks)} are given. "
                f"Use {self.layout.ranks} ranks, or another dp."
            )
        if len(self._index) != len(self.ranks) or min(self.ranks) < 0:
            raise UserError(
                f"placement of layout {self.layout} on ranks {self.ranks}: ranks must be distinct and not negative. "
                "Name each rank once, from 0 up."
            )

    @classmethod
    def on(cls, layout: Layout, n: int) -> Placement:
        """Places a layout, its dp filled in, on ranks 0 to n - 1; raises UserError where it does not fit."""
        return cls(layout.fit(n), tuple(range(n)))

    def coordinates(self, global_rank: int) -> Coordinates | None:
        """Returns the coordinates of a rank of the job; None for a rank outside the placement."""
        index = self._index.get(global_rank)
        return None if index is None else self.layout.coordinates(index)

    @cached_property
    def _index(self) -> Mapping[int, int]:
        return {rank: index for index, rank in enumerate(self.ranks)}


def parse_ranks(text: str) -> tuple[int, ...]:
    """Reads ranks in rising order, such as `0-7` or `0-3,8-11`."""
    ranks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", part.strip())
        if match is None:
            raise UserError(f"ranks {text!r}: {part.strip()!r} is neither a rank nor a range. Write 0-7 or 0-3,8.")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or (ranks and first <= ranks[-1]):
            raise UserError(
                f"ranks {text!r}: {part.strip()!r} is not in rising order. Write each rank once, as in 0-3,8-11."
            )
        ranks += range(first, last + 1)
    return tuple(ranks)


def format_ranks(ranks: tuple[int, ...]) -> str:
    """Formats ranks in rising order as `parse_ranks` reads them."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def group_ranks(placement: Placement, dynamic_cp: bool = False) -> list[tuple[int, ...]]:
    """Returns the ranks of each process group of a placement, rising; with `dynamic_cp` also of parts of cp."""
    layout = placement.layout
    # A dictionary keeps the order, which must be the same on all ranks: torch names groups by the number of calls.
    sets = dict.fromkeys([*_megatron_groups(layout), *(smaller_cp_groups(layout) if dynamic_cp else ())])
    return [tuple(placement.ranks[index] for index in ranks) for ranks in sets]


def smaller_cp_groups(layout: Layout) -> Iterator[tuple[int, ...]]:
    """Yields, for each proper divisor of cp, the groups of as many neighbours, as ranks of the layout."""
    for cp_size in divisors(layout.cp)[:-1]:
        starts = range(0, layout.cp, cp_size)
        for pp, dp, start, tp in product(range(layout.pp), range(layout.dp), starts, range(layout.tp)):
            yield tuple(layout.rank_of(tp, start + i, dp, pp) for i in range(cp_size))


def _megatron_groups(layout: Layout) -> Iterator[tuple[int, ...]]:
    dense = {"tp": layout.tp, "cp": layout.cp, "dp": layout.dp, "pp": layout.pp}
    expert = {"etp": layout.etp, "ep": layout.ep, "edp": layout.edp, "pp": layout.pp}
    for grid, kinds in ((dense, DENSE_GROUPS), (expert, EXPERT_GROUPS)):
        for kind in kinds:
            yield from _slices(grid, kind.split())
    for stages in _slices(dense, ["pp"]):
        yield tuple(sorted({stages[0], stages[-1]}))  # word embeddings: the first and the last stage have them
        yield stages[:1]  # position embeddings
    yield tuple(range(layout.ranks))


def _slices(grid: dict[str, int], varying: Sequence[str]) -> Iterator[tuple[int, ...]]:
    """Yields the sets of ranks that differ only in some coordinates; the grid's first coordinate varies fastest."""
    keys = list(grid)
    strides = {key: math.prod(grid[k] for k in keys[:i]) for i, key in enumerate(keys)}

    def offsets(names: Sequence[str]) -> list[int]:
        points = product(*(range(0, grid[key] * strides[key], strides[key]) for key in reversed(names)))
        return [sum(point) for point in points]

    inside = offsets([key for key in keys if key in varying])
    for start in offsets([key for key in keys if key not in varying]):
        yield tuple(start + offset for offset in inside)
