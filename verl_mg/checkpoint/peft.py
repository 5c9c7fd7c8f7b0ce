"""Low-rank adapters of linear layers (arXiv:2106.09685): which tensors have them, and PEFT's names and files.

The adapter of a tensor W (out, in) is A (r, in) and B (out, r); with it the layer computes with W + alpha / r * B A.
Adapters belong to the tensors of the checkpoint. What a rank has of them follows from the boxes of those that it holds.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from verl_mg.checkpoint.hf_safetensors import SINGLE, CheckpointWriter
from verl_mg.config import LoraConfig
from verl_mg.errors import UserError
from verl_mg.models.hf_tensors import MLP, Experts, GroupedAttention, LayerSpec, TensorSpec
from verl_mg.sharding.boxes import Box, Piece, Shard, full_box, slices
from verl_mg.sharding.weight_table import SCORE, WeightTable

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
HEAD = f"base_model.model.{SCORE}"
"""A value head in PEFT's files: one of `modules_to_save`."""

Shapes = Mapping[str, tuple[int, ...]]
Read = Callable[[str, Box], Tensor]
"""(a tensor of PEFT's file, box in it) -> the values there."""

# Under these PEFT computes something else, or with other weights of the model than those of its checkpoint.
_PLAIN: Mapping[str, tuple[object, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
    **dict.fromkeys(("use_dora", "use_rslora", "lora_bias", "fan_in_fan_out"), (False,)),
    **dict.fromkeys(("rank_pattern", "alpha_pattern", "layer_replication"), ({},)),
}


@dataclass(frozen=True)
class AdapterShard:
    """What goes with the boxes of one tensor in a parameter: shards of A and B, under PEFT's names.

    rows: of the parameter, those to which the rows of the shard of B belong.
    """

    tensor: str
    a: Shard
    b: Shard
    rows: tuple[int, ...]


def leaf(tensor: str) -> str:
    """`q_proj` of model.layers.0.self_attn.q_proj.weight."""
    return tensor.removesuffix(".weight").rpartition(".")[2]


def adapted_tensors(table: WeightTable, targets: Sequence[str] | None) -> tuple[str, ...]:
    """The tensors with an adapter, in the order of the checkpoint: of the layers named, or of all that can have one.

    UserError for a name of which no layer can have one.
    """
    c = table.config
    if c.latent or c.sandwich_norms:
        without = "latent attention" if c.latent else "layers with a norm behind them"
        raise UserError(f"lora: {c.architecture} has {without}, for which there are no adapters yet; leave lora out")
    able, others = _linear(table, _adaptable), _linear(table, _not_adaptable)
    known = ", ".join(dict.fromkeys(map(leaf, able)))
    for target in targets or ():
        if target in map(leaf, able):
            continue
        if target in map(leaf, others):
            reason = f"every {target!r} of the model is an expert's, and those have no adapters yet"
            raise UserError(f"lora.targets: {reason}; name some of {known}")
        raise UserError(f"lora.targets: the model has no linear layer {target!r}; name some of {known}")
    chosen = tuple(name for name in able if targets is None or leaf(name) in targets)
    if not chosen:
        raise UserError(f"lora: no layer of a {c.architecture} model can have an adapter; leave lora out")
    return chosen


def _linear(table: WeightTable, which: Callable[[LayerSpec], Iterator[TensorSpec]]) -> list[str]:
    blocks = enumerate(table.model.layers)
    return [tensor.name.format(layer=layer, expert=0) for layer, block in blocks for tensor in which(block)]


def _adaptable(block: LayerSpec) -> Iterator[TensorSpec]:
    if isinstance(block.attention, GroupedAttention):
        yield from (block.attention.q, block.attention.k, block.attention.v, block.attention.out)
    mlp = block.mlp.shared if isinstance(block.mlp, Experts) else block.mlp
    if mlp:
        yield from (mlp.gate, mlp.up, mlp.down)


def _not_adaptable(block: LayerSpec) -> Iterator[TensorSpec]:
    if isinstance(block.mlp, Experts):
        each: MLP = block.mlp.each
        yield from (each.gate, each.up, each.down)


def adapter_shards(shard: Shard, adapted: Container[str], rank: int) -> list[AdapterShard]:
    """The adapters of rank `rank` that go with a parameter, by the tensors that it holds pieces of."""
    pieces: dict[str, list[Piece]] = {}
    for piece in shard.pieces:
        if piece.tensor in adapted:
            pieces.setdefault(piece.tensor, []).append(piece)
    return [_adapter_shard(tensor, own, rank) for tensor, own in pieces.items()]


def _adapter_shard(tensor: str, pieces: Sequence[Piece], rank: int) -> AdapterShard:
    """All pieces of a tensor in a parameter are of the same columns, those of the parameter."""
    (columns,) = {piece.source[1] for piece in pieces}
    name_a, name_b = _names(tensor)
    shape_a = (rank, columns[1] - columns[0])
    of_b, rows = [], list[int]()
    for piece in pieces:
        start = len(rows)
        rows += range(*piece.target[0])
        of_b.append(Piece(name_b, (piece.source[0], (0, rank)), ((start, len(rows)), (0, rank))))
    return AdapterShard(
        tensor,
        Shard(shape_a, (Piece(name_a, ((0, rank), columns), full_box(shape_a)),)),
        Shard((len(rows), rank), tuple(of_b)),
        tuple(rows),
    )


def head_shard(shard: Shard) -> Shard | None:
    """The value head in a parameter, under PEFT's name, where it is one."""
    pieces = tuple(Piece(HEAD, piece.source, piece.target) for piece in shard.pieces if piece.tensor == SCORE)
    return Shard(shard.shape, pieces) if pieces else None


def _names(tensor: str) -> tuple[str, str]:
    module = f"base_model.model.{tensor.removesuffix('.weight')}"
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def adapter_shapes(table: WeightTable, adapted: Sequence[str], rank: int) -> dict[str, tuple[int, ...]]:
    """The tensors of PEFT's file; a value head is among them."""
    shapes: dict[str, tuple[int, ...]] = {}
    for tensor in adapted:
        height, width = table.tensor_index.tensors[tensor].shape
        name_a, name_b = _names(tensor)
        shapes |= {name_a: (rank, width), name_b: (height, rank)}
    if table.head == "value":
        shapes[HEAD] = table.tensor_index.tensors[SCORE].shape
    return shapes


def fresh_adapters(shapes: Shapes, seed: int) -> Read:
    """A by Kaiming's uniform distribution, as PEFT has it, from the seed and its name alone; B 0."""

    def read(name: str, box: Box) -> Tensor:
        values = torch.zeros(shapes[name])
        if name.endswith(".lora_A.weight"):
            number = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7])
            generator = torch.Generator().manual_seed(number)
            torch.nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
        return values[slices(box)]

    return read


def read_adapters(folder: Path, shapes: Shapes, lora: LoraConfig) -> Read:
    """Those of a folder in PEFT's format. UserError where they are not the ones that the configuration describes."""
    _check_config(folder / CONFIG, lora)
    path = folder / WEIGHTS
    try:
        file = safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: not a readable safetensors file ({error}); lora.path must be PEFT's folder") from None
    names = set(file.keys())
    for name, shape in shapes.items():
        if name not in names:
            raise UserError(f"{path}: no tensor {name!r}, which the model and lora.targets ask for")
        if (found := tuple(file.get_slice(name).get_shape())) != tuple(shape):
            raise UserError(f"{path}: tensor {name!r} has shape {found}, the model and lora.rank ask for {shape}")
    if extra := sorted(names - shapes.keys()):
        raise UserError(f"{path}: tensor {extra[0]!r} is none that lora.targets ask for; add its layer there")

    def read(name: str, box: Box) -> Tensor:
        values: Tensor = file.get_slice(name)[slices(box)]
        return values

    return read


def _check_config(path: Path, lora: LoraConfig) -> None:
    try:
        fields: dict[str, Any] = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path}: not readable ({error}); lora.path must be a folder in PEFT's format") from None
    if fields.get("peft_type") != "LORA":
        raise UserError(f"{path}: peft_type is {fields.get('peft_type')!r}; lora.path must hold LORA")
    for name, wanted, key in (("r", lora.rank, "rank"), ("lora_alpha", lora.alpha, "alpha")):
        if fields.get(name) != wanted:
            raise UserError(f"{path}: {name} is {fields.get(name)}; write lora.{key}={fields.get(name)}")
    for name, plain in _PLAIN.items():
        value = fields.get(name)
        if value is not None and value not in plain:
            raise UserError(f"{path}: {name} is {value!r}, which is not supported; it must be {plain[0]!r}")


class AdapterWriter:
    """PEFT's folder in the making; see `CheckpointWriter`."""

    def __init__(self, folder: Path, shapes: Shapes, dtype: torch.dtype) -> None:
        self._folder = folder
        shards = {name: Shard(tuple(shape), ()) for name, shape in shapes.items()}
        self._writer = CheckpointWriter(folder, shards, dtype, file_bytes=2**62)  # PEFT wants one file
        self._head = HEAD in shapes

    def create(self, lora: LoraConfig, adapted: Sequence[str], model_dir: Path) -> None:
        """Make the file and the configuration; one process does it, before any writes. model_dir: of the base."""
        self._writer.create()
        fields = {
            "peft_type": "LORA",
            "task_type": "SEQ_CLS" if self._head else "CAUSAL_LM",
            "base_model_name_or_path": str(model_dir),
            "r": lora.rank,
            "lora_alpha": lora.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": list(dict.fromkeys(map(leaf, adapted))),
            "modules_to_save": [leaf(SCORE)] if self._head else None,
            "inference_mode": True,
        }
        (self._folder / CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")

    def write(self, name: str, box: Box, values: Tensor) -> None:
        """See `CheckpointWriter`."""
        self._writer.write(name, box, values)

    def finish(self) -> None:
        """Give the file PEFT's name; the process that made it does it, after all writes."""
        (self._folder / SINGLE).rename(self._folder / WEIGHTS)
