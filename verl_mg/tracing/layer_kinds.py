"""Traces of a few layers for models with many: layers of the same tensors are loaded in the same way.

A loader that runs on codes takes several times the memory of the weights. A model of 60 equal layers is thus traced
with one of them, a model with two kinds of layers with its first ones up to the second kind, and what the trace shows
of a layer is repeated for all layers of its kind.

Four layers, the first one dense, the others with a gate of experts: model_of (0, 1, 1, 1), so the first 2 are traced,
and layers 2 and 3 repeat the shards of layer 1.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from verl_mg.errors import UserError
from verl_mg.sharding.boxes import Piece, Shard

Shapes = Mapping[str, tuple[int, ...]]
_NUMBER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class LayerKinds:
    """The layers of a model and the first one of the kind of each."""

    prefix: str  # names of the layers' tensors up to the number of the layer, such as `model.layers`
    model_of: tuple[int, ...]  # for each layer, the first layer with tensors of the same names and shapes

    @property
    def count(self) -> int:
        """Number of first layers that contain all kinds."""
        return max(self.model_of) + 1

    def layer_of(self, tensor: str) -> int | None:
        """Returns the layer of a tensor; None outside the layers."""
        number = _NUMBER.match(tensor, len(self.prefix)) if tensor.startswith(self.prefix + ".") else None
        return int(number[1]) if number else None

    def first_layers(self, shapes: Shapes) -> dict[str, tuple[int, ...]]:
        """Returns the tensors of the first layers and those outside the layers."""
        layers = {name: self.layer_of(name) for name in shapes}
        return {name: shape for name, shape in shapes.items() if (layers[name] or 0) < self.count}

    def extended(self, shards: Mapping[str, Shard]) -> dict[str, Shard]:
        """Returns the parameters of all layers from a trace of the first ones; UserError for one of several layers."""
        result: dict[str, Shard] = {}
        for name, shard in shards.items():
            # A parameter without pieces is only padding, and has no layer.
            layers = {self.layer_of(piece.tensor) for piece in shard.pieces} or {None}
            if len(layers) > 1:
                raise UserError(f"parameter {name} has tensors of several layers. Trace all layers.")
            (layer,) = layers
            if layer is None:
                result[name] = shard
                continue
            for other, model in enumerate(self.model_of):
                if model == layer:
                    pieces = tuple(
                        Piece(self._renamed(piece.tensor, layer, other), piece.source, piece.target)
                        for piece in shard.pieces
                    )
                    result[_numbered(name, layer, other)] = replace(shard, pieces=pieces)
        return result

    def _renamed(self, tensor: str, layer: int, other: int) -> str:
        return f"{self.prefix}.{other}.{tensor.removeprefix(f'{self.prefix}.{layer}.')}"


def _numbered(parameter: str, layer: int, other: int) -> str:
    """Returns the name of an engine's parameter in another layer; it may have another prefix than the tensors."""
    name, count = re.subn(rf"\.{layer}\.", f".{other}.", parameter, count=1)
    if not count:
        raise UserError(f"parameter {parameter} does not have the number of its layer in its name. Trace all layers.")
    return name


def layer_kinds(shapes: Shapes, layers: int) -> LayerKinds | None:
    """Returns the kinds of a model's layers; None where its tensors are not numbered by layers."""
    tensors: dict[str, dict[int, set[tuple[str, tuple[int, ...]]]]] = defaultdict(lambda: defaultdict(set))
    for name, shape in shapes.items():
        if number := _NUMBER.search(name):
            tensors[name[: number.start()]][int(number[1])].add((name[number.end() :], shape))
    prefixes = [prefix for prefix, by_layer in tensors.items() if set(by_layer) == set(range(layers))]
    if len(prefixes) != 1:
        return None
    kinds = tensors[prefixes[0]]
    return LayerKinds(prefixes[0], tuple(min(m for m in kinds if kinds[m] == kinds[n]) for n in range(layers)))


def text_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the part of a config.json that describes the language model."""
    text = fields.get("text_config")
    return text if isinstance(text, dict) else fields


def write_first_layers(fields: dict[str, Any], count: int, folder: Path) -> None:
    """Writes the config.json of a model with only its first `count` layers."""
    copy = json.loads(json.dumps(fields))
    text = text_fields(copy)
    layers = text["num_hidden_layers"]
    for name, value in text.items():
        if isinstance(value, list) and len(value) == layers:  # has an entry for each layer
            text[name] = value[:count]
    text["num_hidden_layers"] = count
    (folder / "config.json").write_text(json.dumps(copy), encoding="utf-8")
