"""Sharding table that was traced from an engine's weight loader, stored as a JSON file.

    {"format": 2, "architecture": "Qwen3ForCausalLM", "engine": "sglang", "version": "0.5.23",
     "layout": {"tp": 2, "ep": 1, "attention_dp": 1, "pp": 1},
     "ranks": [{"lm_head.weight": {"shape": [4, 8], "pieces": [["lm_head.weight", [[0, 3], [0, 8]], [[0, 3], [0, 8]]]],
                                   "padding": [[[3, 4], [0, 8]]], "order": []}, ...}, ...]}

A piece is the name of a Hugging Face tensor, a box of the tensor, and the box of the parameter with these elements.
Shape and boxes of a parameter that was transposed are in the order of its tensors' dimensions: [1, 0] of a matrix.
`verl-mg trace` writes such a file. Jobs and `verl-mg plan` use it instead of the built-in table of the engine with
`rollout.sharding_table=FILE` (`ModelTable.with_traced_table`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from verl_mg.errors import UserError
from verl_mg.jsonl import replacing
from verl_mg.layout import EngineLayout, EnginePlacement
from verl_mg.models.tensor_index import TensorInfo
from verl_mg.sharding.boxes import Piece, Shard, check_shard
from verl_mg.sharding.shard_map import ExplicitShardMap

EngineName = Literal["sglang", "vllm"]
"""Rollout engines that run as separate processes, by their names in `rollout.engine`."""
Content = TypeVar("Content", bound=BaseModel)
_Size = Annotated[int, Field(ge=0)]
_Box = tuple[tuple[_Size, _Size], ...]


@dataclass(frozen=True)
class TracedTable:
    """Parameters of every rank of one engine, under the engine's own names."""

    architecture: str  # model class, as in `architectures` of config.json
    engine: EngineName  # engine whose loader was traced
    version: str  # version of the engine
    layout: EngineLayout
    # {parameter: shard} of each rank of the engine, in the order `pp_rank * tp + tp_rank`.
    ranks: tuple[dict[str, Shard], ...]

    def shard_map(self, placement: EnginePlacement, tensors: Mapping[str, TensorInfo]) -> ExplicitShardMap:
        """Returns the shards of engines on the ranks of a job."""
        self.check_layout(placement.layout)
        # Ranks of several engines get one object, which is checked and indexed as replicas.
        members = {rank: placement.coordinates(rank) for rank in placement.ranks}
        shards = {rank: self.ranks[at.pp * self.layout.tp + at.tp] for rank, at in members.items()}
        return ExplicitShardMap(shards, tensors)

    def without(self, prefixes: tuple[str, ...]) -> TracedTable:
        """Returns the table without the parameters that consist of tensors with one of these prefixes."""
        # A shard of padding only has no tensor, and stays.
        ranks = tuple(
            {
                name: shard
                for name, shard in shards.items()
                if not shard.pieces or not all(piece.tensor.startswith(prefixes) for piece in shard.pieces)
            }
            for shards in self.ranks
        )
        return replace(self, ranks=ranks)

    def check_layout(self, layout: EngineLayout) -> None:
        """Raises a UserError where the table was traced for another layout."""
        if layout != self.layout:
            raise UserError(
                f"rollout.layout={layout}: rollout.sharding_table was traced for {self.layout}. "
                f"Write rollout.layout={self.layout}, or run verl-mg trace with --rollout {layout}."
            )

    def check_engine(self, path: Path, engine: EngineName) -> None:
        """Raises a UserError where the table was traced from another engine."""
        if engine != self.engine:
            raise UserError(
                f"{path}: it was traced from {self.engine}, but rollout.engine={engine}. Run verl-mg trace with "
                f"--engine {engine}."
            )

    def check_model(self, path: Path, tensors: Mapping[str, TensorInfo]) -> None:
        """Raises a UserError with the first tensor of a model that is missing, unknown, or of another shape."""
        shapes = self._shapes()
        hint = "Run verl-mg trace for this model."
        for name, info in tensors.items():
            if name not in shapes:
                raise UserError(f"{path}: the tensor {name!r} of the model is missing. {hint}")
            if shapes[name] != info.shape:
                raise UserError(
                    f"{path}: the tensor {name!r} has shape {shapes[name]}, but {info.shape} in the model. {hint}"
                )
        if unknown := sorted(shapes.keys() - tensors.keys()):
            raise UserError(f"{path}: the model has no tensor {unknown[0]!r}. {hint}")

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the tensors, which the file does not have: each extends to the end of its last box."""
        shapes: dict[str, tuple[int, ...]] = {}
        for shards in self.ranks:
            for shard in shards.values():
                for piece in shard.pieces:
                    stops = tuple(stop for _, stop in piece.source)
                    known = shapes.get(piece.tensor, stops)
                    # A damaged table may give one tensor two numbers of dimensions, which no model has.
                    shapes[piece.tensor] = tuple(map(max, stops, known)) if len(known) == len(stops) else ()
        return shapes


# An unknown key, or a number that is a text, means a damaged file or another format: neither is converted.
class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class _Parameter(_Strict):
    shape: tuple[_Size, ...]
    pieces: tuple[tuple[str, _Box, _Box], ...]
    padding: tuple[_Box, ...]
    order: tuple[_Size, ...] = ()  # files of tables without transposed parameters do not have it

    def shard(self) -> Shard:
        return Shard(self.shape, tuple(Piece(*piece) for piece in self.pieces), self.padding, self.order)


class _Layout(_Strict):
    tp: int
    ep: int
    attention_dp: int
    pp: int


class _Rank(_Strict):
    parameters: dict[str, _Parameter]


class _File(_Strict):
    format: Literal[2]  # version of the file format
    architecture: str
    engine: EngineName
    version: str
    layout: _Layout
    ranks: tuple[dict[str, _Parameter], ...]


def write_traced_table(path: str | Path, table: TracedTable) -> None:
    """Writes a table atomically; missing folders are created."""
    layout = table.layout
    file = _File(
        format=2,
        architecture=table.architecture,
        engine=table.engine,
        version=table.version,
        layout=_Layout(tp=layout.tp, ep=layout.ep, attention_dp=layout.adp, pp=layout.pp),
        ranks=tuple(_parameters(shards) for shards in table.ranks),
    )
    _write(Path(path), file)


def read_traced_table(path: str | Path) -> TracedTable:
    """Reads a file of `write_traced_table`; raises UserError with the file and the key that is wrong."""
    return parse_traced_table(_content(Path(path)), path)


def parse_traced_table(content: bytes, path: str | Path) -> TracedTable:
    """Returns the table in the content of a file of `write_traced_table`; `path` is for errors."""
    path = Path(path)
    file = _parse(path, content, _File)
    try:
        layout = EngineLayout(file.layout.tp, file.layout.pp, file.layout.ep, file.layout.attention_dp)
    except UserError as error:
        raise UserError(f"{path}: layout: {error}") from None
    if len(file.ranks) != layout.ranks:
        raise UserError(f"{path}: ranks: {len(file.ranks)} entries, but layout {layout} has {layout.ranks} ranks.")
    ranks = [_shards(path, f"ranks.{number}", rank) for number, rank in enumerate(file.ranks)]
    return TracedTable(file.architecture, file.engine, file.version, layout, tuple(ranks))


def write_rank_shards(path: str | Path, shards: Mapping[str, Shard]) -> None:
    """Writes the shards of one rank atomically, in the engine's process of this rank."""
    _write(Path(path), _Rank(parameters=_parameters(shards)))


def read_rank_shards(path: str | Path) -> dict[str, Shard]:
    """Reads a file of `write_rank_shards`; raises UserError with the file and the key that is wrong."""
    return _shards(Path(path), "parameters", _parse(Path(path), _content(Path(path)), _Rank).parameters)


def _parameters(shards: Mapping[str, Shard]) -> dict[str, _Parameter]:
    return {
        name: _Parameter(
            shape=shard.shape,
            pieces=tuple((piece.tensor, piece.source, piece.target) for piece in shard.pieces),
            padding=shard.padding,
            order=shard.order,
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
        with replacing(path) as file:
            file.write_text(content.model_dump_json())
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}). Choose another path.") from None


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}). Write it with verl-mg trace.") from None


def _parse(path: Path, content: bytes, kind: type[Content]) -> Content:
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(str(part) for part in first["loc"]) or "the file"
        raise UserError(f"{path}: {key}: {first['msg']}. Write it with verl-mg trace.") from None
