"""Low-rank adapters of linear layers (arXiv:2106.09685): which tensors have them, and PEFT's names and files.

The adapter of a tensor W (out, in) is A (r, in) and B (out, r); with it the layer computes with W + alpha / r * B A.
Adapters belong to the tensors of the checkpoint; the adapter shards of a rank follow from its boxes of these tensors.
So files, initial values and steps are the same under every layout.

    q_proj (8, 4), r = 2, rows 4:8 on tensor parallel rank 1: A whole (2, 4), of B rows 4:8 (4, 2)
    o_proj (4, 8), r = 2, columns 4:8 on it: of A columns 4:8 (2, 4), B whole (4, 2)
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from verl_mg.checkpoint.hf_safetensors import CheckpointWriter
from verl_mg.checkpoint.safetensors_file import DamagedFileError, SafetensorsFile
from verl_mg.config import LoraConfig
from verl_mg.errors import UserError
from verl_mg.lazy_import import lazy_import
from verl_mg.models.hf_config import SINGLE
from verl_mg.sharding.boxes import Box, Piece, Shard, full_box, slices
from verl_mg.sharding.model_table import SCORE, ModelTable

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_import("torch")

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # beginning of all names in PEFT's files
VALUE_HEAD = PREFIX + SCORE  # name of a value head in PEFT's files, where it is one of `modules_to_save`

Shapes = Mapping[str, tuple[int, ...]]
ReadBox: TypeAlias = "Callable[[str, Box], Tensor]"  # function (tensor of PEFT's file, box in it) -> values of the box

# With other values PEFT computes something else, or with base weights that differ from the checkpoint's.
_SUPPORTED: Mapping[str, tuple[object, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
    **dict.fromkeys(("use_dora", "use_rslora", "lora_bias", "fan_in_fan_out"), (False,)),
    **dict.fromkeys(("rank_pattern", "alpha_pattern", "layer_replication"), ({},)),
}


@dataclass(frozen=True)
class AdapterShard:
    """Shards of A and B that belong to the boxes of one tensor in a parameter, under PEFT's names."""

    tensor: str  # Hugging Face name of the adapted tensor
    a: Shard  # shard of A, (r, columns of the parameter)
    b: Shard  # shard of B, (rows of the tensor in the parameter, r)
    rows: tuple[int, ...]  # rows of the parameter to which the rows of the shard of B belong
    splits_a: bool  # whether other ranks have other columns of A
    splits_b: bool  # whether other ranks have other rows of B


def module_name(tensor: str) -> str:
    """Returns the name of the linear layer of a tensor: q_proj for model.layers.0.self_attn.q_proj.weight."""
    return tensor.removesuffix(".weight").rpartition(".")[2]


def base_tensor(name: str) -> str:
    """Returns the tensor that a tensor of PEFT's file adapts, by its name in the checkpoint."""
    inner = name.removeprefix(PREFIX)
    return inner.replace(".lora_A.weight", ".weight").replace(".lora_B.weight", ".weight")


def adapted_tensors(table: ModelTable, targets: Sequence[str] | None, experts: bool = False) -> tuple[str, ...]:
    """Returns the tensors with an adapter, in the order of the checkpoint; of routed experts only with `experts`."""
    shared, routed = table.linear_tensors(), table.linear_tensors(of_experts=True)
    if experts and not routed:
        problem = "has stacked experts, which cannot have adapters" if table.config.experts else "has no experts"
        raise UserError(f"lora.experts: a {table.config.architecture} model {problem}. Leave it out.")
    supported = {*shared, *(routed if experts else ())}
    # In the order of the checkpoint, which has the experts of a layer after its other tensors.
    supported_in_order = [name for name in table.tensor_index.entries if name in supported]
    known = ", ".join(dict.fromkeys(map(module_name, supported_in_order)))
    for target in targets or ():
        if target in map(module_name, supported):
            continue
        if target in map(module_name, routed):
            raise UserError(
                f"lora.targets: {target!r} exists only in experts. Write lora.experts=true, or choose from {known}."
            )
        raise UserError(f"lora.targets: the model has no linear layer {target!r}. Choose from {known}.")
    return tuple(name for name in supported_in_order if targets is None or module_name(name) in targets)


def adapter_targets(table: ModelTable, lora: LoraConfig) -> list[str]:
    """Returns the names of the linear layers with adapters, each once."""
    return list(dict.fromkeys(map(module_name, adapted_tensors(table, lora.targets, lora.experts))))


def adapter_shards(shard: Shard, shapes: Shapes) -> list[AdapterShard]:
    """Returns the adapter shards of a parameter, one for each of its adapted tensors."""
    pieces: dict[str, list[Piece]] = {}
    for piece in shard.pieces:
        if _names(piece.tensor)[0] in shapes:
            pieces.setdefault(piece.tensor, []).append(piece)
    return [_adapter_shard(tensor, tensor_pieces, shapes) for tensor, tensor_pieces in pieces.items()]


def _adapter_shard(tensor: str, pieces: Sequence[Piece], shapes: Shapes) -> AdapterShard:
    """Returns the shards for one tensor; all its pieces in a parameter have the parameter's columns."""
    # A parameter may have several runs of rows of a tensor, such as q of each query group in Megatron's fused QKV.
    (columns,) = {piece.source[1] for piece in pieces}
    stacked = len(pieces[0].target) - len(pieces[0].source)
    name_a, name_b = _names(tensor)
    rank = shapes[name_a][0]
    shape_a = (rank, columns[1] - columns[0])
    of_b, rows = [], list[int]()
    for piece in pieces:
        start = len(rows)
        rows += range(*piece.target[stacked])
        of_b.append(Piece(name_b, (piece.source[0], (0, rank)), ((start, len(rows)), (0, rank))))
    return AdapterShard(
        tensor,
        Shard(shape_a, (Piece(name_a, ((0, rank), columns), full_box(shape_a)),)),
        Shard((len(rows), rank), tuple(of_b)),
        tuple(rows),
        splits_a=shape_a != shapes[name_a],
        splits_b=len(rows) != shapes[name_b][0],
    )


def stacked_shards(shards: Sequence[AdapterShard]) -> list[AdapterShard]:
    """Stacks the shards of experts, given expert by expert, along a new first dimension, for each kind of tensor."""
    kinds: dict[str, list[AdapterShard]] = {}
    for shard in shards:
        kinds.setdefault(module_name(shard.tensor), []).append(shard)
    return [
        replace(of_kind[0], a=_stack([shard.a for shard in of_kind]), b=_stack([shard.b for shard in of_kind]))
        for of_kind in kinds.values()
    ]


def _stack(shards: Sequence[Shard]) -> Shard:
    pieces = [
        Piece(piece.tensor, piece.source, ((number, number + 1), *piece.target))
        for number, shard in enumerate(shards)
        for piece in shard.pieces
    ]
    return Shard((len(shards), *shards[0].shape), tuple(pieces))


def head_shard(shard: Shard) -> Shard | None:
    """Returns the shard of a value head under PEFT's name, or None for another parameter."""
    pieces = tuple(Piece(VALUE_HEAD, piece.source, piece.target) for piece in shard.pieces if piece.tensor == SCORE)
    return Shard(shard.shape, pieces) if pieces else None


def _names(tensor: str) -> tuple[str, str]:
    module = PREFIX + tensor.removesuffix(".weight")
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def adapter_shapes(table: ModelTable, adapted: Sequence[str], rank: int) -> dict[str, tuple[int, ...]]:
    """Returns names and shapes of the tensors in PEFT's file, including a value head."""
    shapes: dict[str, tuple[int, ...]] = {}
    for tensor in adapted:
        height, width = table.tensor_index.tensors[tensor].shape
        name_a, name_b = _names(tensor)
        shapes |= {name_a: (rank, width), name_b: (height, rank)}
    if table.head == "value":
        shapes[VALUE_HEAD] = table.tensor_index.tensors[SCORE].shape
    return shapes


def initial_adapters(shapes: Shapes, seed: int) -> ReadBox:
    """Returns a function that gives initial values: A by Kaiming's uniform distribution, as in PEFT, and B 0."""

    def read(name: str, box: Box) -> Tensor:
        # The whole tensor by a seed of its name, then the box: so a value does not depend on the layout.
        values = torch.zeros(shapes[name])
        if name.endswith(".lora_A.weight"):
            number = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7])
            generator = torch.Generator().manual_seed(number)  # on the CPU, whatever the device of the model
            torch.nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
        return values[slices(box)]

    return read


def read_adapters(folder: Path, shapes: Shapes, lora: LoraConfig) -> ReadBox:
    """Returns a function that reads boxes of the adapters in a folder in PEFT's format; UserError for others."""
    _check_config(folder / CONFIG, lora)
    path = folder / WEIGHTS
    try:
        file = SafetensorsFile(path)
    except (OSError, DamagedFileError) as error:
        raise UserError(
            f"{path}: not a readable safetensors file ({error}). Set lora.path to a folder in PEFT's format."
        ) from None
    for name, shape in shapes.items():
        if name not in file.tensors:
            raise UserError(f"{path}: no tensor {name!r}, which lora.targets require. Change lora.targets.")
        if (stored := file.tensors[name].shape) != tuple(shape):
            raise UserError(
                f"{path}: tensor {name!r} has shape {stored}, but model and lora.rank require {shape}. "
                "Use adapters of this model."
            )
    if extra := sorted(file.tensors.keys() - shapes.keys()):
        raise UserError(f"{path}: lora.targets do not include the tensor {extra[0]!r}. Add its layer to lora.targets.")

    return file.read


def _check_config(path: Path, lora: LoraConfig) -> None:
    try:
        fields: dict[str, Any] = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path}: not readable ({error}). Set lora.path to a folder in PEFT's format.") from None
    if fields.get("peft_type") != "LORA":
        raise UserError(f"{path}: peft_type is {fields.get('peft_type')!r}. Set lora.path to adapters of type LORA.")
    for name, wanted, key in (("r", lora.rank, "rank"), ("lora_alpha", lora.alpha, "alpha")):
        if fields.get(name) != wanted:
            raise UserError(f"{path}: {name} is {fields.get(name)}. Write lora.{key}={fields.get(name)}.")
    for name, supported in _SUPPORTED.items():
        value = fields.get(name)
        if value is not None and value not in supported:
            raise UserError(f"{path}: {name} is {value!r}, which is not supported. Use adapters with {supported[0]!r}.")


def adapter_fields(lora: LoraConfig, adapted: Sequence[str], has_head: bool = False) -> dict[str, Any]:
    """Returns the fields of PEFT's configuration, without the directory of the base model."""
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if has_head else "CAUSAL_LM",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(dict.fromkeys(map(module_name, adapted))),
        "modules_to_save": [module_name(SCORE)] if has_head else None,
        "inference_mode": True,
    }


class AdapterWriter(CheckpointWriter):
    """Writer of a folder in PEFT's format by many processes."""

    def __init__(self, folder: Path, shapes: Shapes, dtype: torch.dtype) -> None:
        shards = {name: Shard(tuple(shape), ()) for name, shape in shapes.items()}
        super().__init__(folder, shards, dtype, file_bytes=2**62)  # PEFT wants one file
        self._has_head = VALUE_HEAD in shapes

    def create_adapters(self, lora: LoraConfig, adapted: Sequence[str], model_dir: Path) -> None:
        """Creates the file and the configuration; called by one process, before any process writes."""
        self.create()
        fields = adapter_fields(lora, adapted, self._has_head) | {"base_model_name_or_path": str(model_dir)}
        (self.folder / CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")

    # The file is written under the model writer's name: a folder without PEFT's name is not complete.
    def finish(self) -> None:
        """Gives the file PEFT's name; called by the process that created it, after all writes."""
        (self.folder / SINGLE).rename(self.folder / WEIGHTS)
