"""`Layout`: the sizes of every kind of parallelism, and where each rank stands in the two grids they span.

The ranks of a layout are numbered twice, as Megatron does with its default order `tp-cp-ep-dp-pp`:

    dense grid    rank = tp  + TP  * (cp + CP * (dp  + DP  * pp))
    expert grid   rank = etp + ETP * (ep + EP * (edp + EDP * pp))

Both cover the same ranks, so TP*CP*DP == ETP*EP*EDP, and a rank has one and the same `pp` in both.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from verl_mg.errors import UserError
from verl_mg.layout.model_dims import ModelDims

KEYS = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")
EXAMPLE = "tp4-pp2-ep8"


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Where one rank stands: (tp, cp, dp, pp) in the dense grid, (etp, ep, edp, pp) in the expert grid."""

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int


@dataclass(frozen=True)
class Layout:
    """Sizes of tensor, pipeline, virtual pipeline, context, expert, expert tensor and data parallelism.

    `etp` left out is `tp`, as in Megatron. `dp` left out is open: it is the smallest that both grids
    allow (1 without experts) until `fit` spreads the layout over all the ranks of a job.
    An instance is always sound: its dense and its expert grid cover the same ranks.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 0  # 0: as tp
    dp: int = 0  # 0: open
    dp_given: bool = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        for key in KEYS:
            size = getattr(self, key)
            if size < 0 or (size == 0 and key not in ("etp", "dp")):
                raise UserError(f"layout: {key} is {size}; sizes start at 1, as in {EXAMPLE}")
        object.__setattr__(self, "dp_given", self.dp > 0)
        object.__setattr__(self, "etp", self.etp or self.tp)
        object.__setattr__(self, "dp", self.dp or self._smallest_dp)
        if self.vpp > 1 and self.pp == 1:
            raise UserError(f"layout {self}: vpp interleaves pipeline stages; write pp2 or more, or drop vpp")
        if self.dp % self._smallest_dp:
            raise UserError(
                f"layout {self}: the experts (etp{self.etp}, ep{self.ep}) need dp to be a multiple of "
                f"{self._smallest_dp}; leave dp{self.dp} out, or write dp{self._smallest_dp}"
            )

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Read `tp2-pp2-cp1-ep2`: sizes in any order, each key at most once, a size left out at its default.

        Raises UserError naming the part that is not understood.
        """
        return cls(**parse_sizes(text, KEYS, EXAMPLE))

    def __str__(self) -> str:
        """The shortest text that `parse` reads back as an equal layout; `tp1` when every size is 1."""
        defaults = {"etp": self.tp, "dp": self._smallest_dp}
        shown = [f"{key}{size}" for key in KEYS if (size := getattr(self, key)) != defaults.get(key, 1)]
        return "-".join(shown) or "tp1"

    @property
    def _smallest_dp(self) -> int:
        """The least dp for which the expert grid covers the dense one; every sound dp is a multiple of it."""
        experts = self.etp * self.ep
        return experts // math.gcd(self.tp * self.cp, experts)

    @property
    def ranks(self) -> int:
        """How many ranks the layout stands on."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def edp(self) -> int:
        """Expert data parallel size: how many ranks hold the same experts."""
        return self.tp * self.cp * self.dp // (self.etp * self.ep)

    def fit(self, ranks: int) -> "Layout":
        """This layout with dp filled in so that it stands on exactly `ranks` ranks.

        Raises UserError when it cannot, or when a dp given before says otherwise.
        """
        unit = self.tp * self.pp * self.cp * self._smallest_dp
        if ranks < 1 or ranks % unit:
            counts = [self.ranks] if self.dp_given else _multiples_around(unit, ranks)
            raise UserError(
                f"layout {self} stands on a multiple of {unit} ranks, not on {ranks}: start {_or(map(str, counts))}"
            )
        fitted = self._with(dp=ranks // (self.tp * self.pp * self.cp))
        if self.dp_given and fitted != self:
            raise UserError(
                f"layout {self} was given dp{self.dp}, so {self.ranks} ranks, not {ranks}: "
                f"start {self.ranks}, or write dp{fitted.dp}, or leave dp out"
            )
        return fitted

    def coordinates(self, rank: int) -> Coordinates:
        """Where `rank`, 0 to ranks - 1, stands in both grids. Raises IndexError beyond them."""
        if not 0 <= rank < self.ranks:
            raise IndexError(f"rank {rank} of layout {self}, which has {self.ranks}")
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        rest, etp = divmod(rank, self.etp)
        rest, ep = divmod(rest, self.ep)
        return Coordinates(tp, cp, dp, pp, etp, ep, edp=rest % self.edp)

    def rank_of(self, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """The rank at a point of the dense grid. Raises IndexError outside it."""
        point = {"tp": (tp, self.tp), "cp": (cp, self.cp), "dp": (dp, self.dp), "pp": (pp, self.pp)}
        for key, (index, size) in point.items():
            if not 0 <= index < size:
                raise IndexError(f"{key} index {index} of layout {self}, which has {size}")
        return tp + self.tp * (cp + self.cp * (dp + self.dp * pp))

    def layers(self, num_layers: int, pp_rank: int, vpp_rank: int = 0) -> range:
        """Global indices of the layers that chunk `vpp_rank` of pipeline stage `pp_rank` holds.

        Chunk v of stage p is the (v * pp + p)-th run of layers, Megatron's interleaved order. Where the chunks do not
        divide the layers, some have one layer fewer: the last chunk and the first, which carry the output and the
        embedding, then their neighbours inwards. Raises UserError when there are fewer layers than chunks, IndexError
        for a chunk that is not there.
        """
        if not (0 <= pp_rank < self.pp and 0 <= vpp_rank < self.vpp):
            raise IndexError(f"chunk {vpp_rank} of pipeline stage {pp_rank} of layout {self}")
        chunks, number = self.pp * self.vpp, vpp_rank * self.pp + pp_rank
        if num_layers < chunks:
            raise UserError(f"layout {self}: {chunks} pipeline chunks are more than the model's {num_layers} layers")
        each, fewer = -(-num_layers // chunks), -num_layers % chunks
        # Chunk n from the left is the (2n + 1)-th to go short, chunk n from the right the 2n-th.
        short = [min(2 * chunk + 1, 2 * (chunks - 1 - chunk)) < fewer for chunk in range(number + 1)]
        start = number * each - sum(short[:number])
        return range(start, start + each - short[number])

    def check(self, model: ModelDims) -> None:
        """Raise UserError naming the first dimension of a model that this layout does not divide.

        Megatron would replicate KV heads for a tp that is a multiple of them; here each rank holds its own.
        """
        self._divide(model.attention_heads, "attention heads", "tp")
        self._divide(model.kv_heads, "key-value heads", "tp")
        self._divide(model.ffn, "columns of the feed-forward layer", "tp")
        self.layers(model.layers, 0)
        if model.experts == 0 and self.ep > 1:
            raise UserError(f"layout {self}: ep{self.ep} spreads experts, and the model has none; drop ep")
        self._divide(model.experts, "experts", "ep")
        self._divide(model.expert_ffn, "columns of an expert", "etp")
        self._divide(model.shared_ffn, "columns of the shared experts", "tp")

    def check_context(self, attention_heads: int) -> None:
        """Raise UserError where the context-parallel ranks cannot share out the heads of a tensor-parallel one."""
        self._divide(attention_heads, "attention heads", "tp", "cp")

    def check_down_projections(self, *widths: int) -> None:
        """Raise UserError for a down projection of latent attention that tp does not divide."""
        for width in widths:
            self._divide(width, "rows of a down projection of latent attention", "tp")

    def _divide(self, dimension: int, what: str, *keys: str) -> None:
        size = math.prod(getattr(self, key) for key in keys)
        if dimension % size == 0:
            return
        divisors = sorted(_divisors(dimension), key=lambda divisor: abs(divisor - size))[:6]
        axes = "*".join(key for key in keys if len(keys) == 1 or getattr(self, key) > 1)
        named = "-".join(f"{key}{getattr(self, key)}" for key in axes.split("*"))
        raise UserError(
            f"layout {self}: {named} does not divide the {dimension} {what}; "
            f"{axes} {', '.join(map(str, sorted(divisors)))} would"
        )

    def _with(self, **changes: int) -> "Layout":
        """A copy with other sizes; an etp that followed tp and a dp that was open stay so."""
        sizes = {key: getattr(self, key) for key in KEYS}
        sizes["etp"] = 0 if self.etp == self.tp else self.etp
        sizes["dp"] = 0
        return Layout(**{**sizes, **changes})


def parse_sizes(text: str, keys: tuple[str, ...], example: str) -> dict[str, int]:
    """Read `tp2-pp2`: {key: size}. Raises UserError naming the part that is not understood."""
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
        raise UserError(f"layout {text!r}: {reason}; keys are {', '.join(keys)}, each once, as in {example}")
    return sizes


def _multiples_around(unit: int, ranks: int) -> list[int]:
    """The positive multiples of `unit` next below and next above `ranks`."""
    below = max(ranks, 0) // unit * unit
    return [count for count in (below, below + unit) if count > 0]


def _divisors(number: int) -> set[int]:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return {*small, *(number // divisor for divisor in small)}


def _or(choices: Iterable[str]) -> str:
    return " or ".join(choices)
