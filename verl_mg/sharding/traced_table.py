"""A dialect that was traced from an engine's own loader, as a JSON file.

    {"format": 1, "architecture": "Qwen3ForCausalLM", "sglang": "0.5.23",
     "layout": {"tp": 2, "ep": 1, "attention_dp": 1, "pp": 1},
     "ranks": [{"lm_head.weight": {"shape": [4, 8], "pieces": [["lm_head.weight", [[0, 3], [0, 8]], [[0, 3], [0, 8]]]],
                                   "padding": [[[3, 4], [0, 8]]]}, ...}, ...]}

A piece is a tensor's name, the box of the tensor and the box of the parameter where it stands.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout, EnginePlacement
from verl_mg.models.tensor_index import TensorInfo
from verl_mg.sharding.boxes import Piece, Shard, check_shard
from verl_mg.sharding.shard_map import ExplicitShardMap


@dataclass(frozen=True)
class TracedTable:
    """What each rank of an engine holds, under the engine's own names."""

    architecture: str
    sglang: str  # its version
    layout: EngineLayout
    ranks: tuple[dict[str, Shard], ...]

    def shard_map(self, placement: EnginePlacement) -> ExplicitShardMap:
        """What the ranks of a placement hold, whose layout must be the traced one."""
        if placement.layout != self.layout:
            raise UserError(f"the dialect was traced for rollout layout {self.layout}, not {placement.layout}")
        members = {rank: placement.coordinates(rank) for rank in placement.ranks}
        shards = {rank: self.ranks[at.pp * self.layout.tp + at.tp] for rank, at in members.items()}
        return ExplicitShardMap(shards, self._tensors())

    def _tensors(self) -> dict[str, TensorInfo]:
        """Each tensor reaches as far as its last box."""
        reach: dict[str, tuple[int, ...]] = {}
        for shards in self.ranks:
            for shard in shards.values():
                for piece in shard.pieces:
                    stops = tuple(stop for _, stop in piece.source)
                    reach[piece.tensor] = tuple(map(max, stops, reach.get(piece.tensor, stops)))
        return {name: TensorInfo(position, reach[name]) for position, name in enumerate(sorted(reach))}


Content = TypeVar("Content", bound=BaseModel)


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


_Size = Annotated[int, Field(ge=0)]
_Box = tuple[tuple[_Size, _Size], ...]


class _Parameter(_Strict):
    shape: tuple[_Size, ...]
    pieces: tuple[tuple[str, _Box, _Box], ...]
    padding: tuple[_Box, ...]

    def shard(self) -> Shard:
        return Shard(self.shape, tuple(Piece(*piece) for piece in self.pieces), self.padding)


class _Layout(_Strict):
    tp: int
    ep: int
    attention_dp: int
    pp: int


class _Rank(_Strict):
    parameters: dict[str, _Parameter]


class _File(_Strict):
    format: Literal[1]  # other numbers will be other forms
    architecture: str
    sglang: str
    layout: _Layout
    ranks: tuple[dict[str, _Parameter], ...]


def write_traced_table(path: str | Path, dialect: TracedTable) -> None:
    """Write the file whole or not at all."""
    layout = dialect.layout
    file = _File(
        format=1,
        architecture=dialect.architecture,
        sglang=dialect.sglang,
        layout=_Layout(tp=layout.tp, ep=layout.ep, attention_dp=layout.adp, pp=layout.pp),
        ranks=tuple(_parameters(shards) for shards in dialect.ranks),
    )
    _write(Path(path), file)


def read_traced_table(path: str | Path) -> TracedTable:
    """Read a file of `write_traced_table`; UserError names the file and the key that is wrong."""
    path = Path(path)
    file = _read(path, _File)
    try:
        layout = EngineLayout(file.layout.tp, file.layout.pp, file.layout.ep, file.layout.attention_dp)
    except UserError as error:
        raise UserError(f"{path}: layout: {error}") from None
    if len(file.ranks) != layout.ranks:
        raise UserError(f"{path}: ranks: {len(file.ranks)} of them, {layout} has {layout.ranks}")
    ranks = [_shards(path, f"ranks.{number}", rank) for number, rank in enumerate(file.ranks)]
    return TracedTable(file.architecture, file.sglang, layout, tuple(ranks))


def write_rank(path: str | Path, shards: Mapping[str, Shard]) -> None:
    """Write the shards of one rank, whole or not at all."""
    _write(Path(path), _Rank(parameters=_parameters(shards)))


def read_rank(path: str | Path) -> dict[str, Shard]:
    """Read a file of `write_rank`; UserError names the file and the key that is wrong."""
    return _shards(Path(path), "parameters", _read(Path(path), _Rank).parameters)


def _parameters(shards: Mapping[str, Shard]) -> dict[str, _Parameter]:
    return {
        name: _Parameter(
            shape=shard.shape,
            pieces=tuple((piece.tensor, piece.source, piece.target) for piece in shard.pieces),
            padding=shard.padding,
        )
        for name, shard in shards.items()
    }


def _shards(path: Path, key: str, parameters: Mapping[str, _Parameter]) -> dict[str, Shard]:
    shards = {name: parameter.shard() for name, parameter in parameters.items()}
    for name, shard in shards.items():
        try:
            check_shard(name, shard)
        except UserError as error:
            raise UserError(f"{path}: {key}.{error}") from None
    return shards


def _write(path: Path, content: BaseModel) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            file.write(content.model_dump_json())
        os.replace(file.name, path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None


def _read(path: Path, kind: type[Content]) -> Content:
    try:
        return kind.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(str(part) for part in first["loc"]) or "the file"
        raise UserError(f"{path}: {key}: {first['msg']}") from None
