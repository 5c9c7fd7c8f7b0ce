"""Parameters of a module of `transformers` as boxes of the tensors of a checkpoint.

`transformers` 5 renames, fuses and stacks tensors while it loads them (`core_model_loading`, `conversion_mapping`). Its
own loader runs here on tensors without elements, see `symbolic_tensor`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from verl_mg.errors import UserError
from verl_mg.models.transformers_module import checkpoint_shapes, meta_module, read_module_config, stored_dtypes
from verl_mg.sharding.boxes import Shard
from verl_mg.sharding.symbolic_tensor import SymbolicTensor, shard_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class ModuleShards:
    """Parameters and persistent buffers of a whole module, in the module's order; tied ones once."""

    config: PretrainedConfig

    shards: Mapping[str, Shard]
    """{name in the module: shard}. A buffer that the checkpoint does not fill is not among them."""
    shapes: Mapping[str, tuple[int, ...]]
    """{name: shape} of the checkpoint's tensors that the module uses, in the order of `shards`."""
    embedding: str  # name in the module of the input embedding
    output: frozenset[str]
    """Names in the module of the output layer's parameters that are its own; empty where they are the embedding's."""
    text: frozenset[str]  # names of the shards that text passes through, without a vision tower and its projection
    linear: frozenset[str]  # names of the shards that are weights of linear layers, without the output layer
    constant: frozenset[str]  # names of the shards without a gradient
    dtypes: Mapping[str, torch.dtype]  # dtypes, by name, of the shards that have their own in every runtime
    copies: Mapping[str, str]  # {tensor of the files: the tensor that it repeats}, of parameters that are tied


def module_shards(model_dir: str | Path, headless: bool = False) -> ModuleShards:
    """Derives the shards of a model directory's module; `headless`: without the output layer.

    A directory without weights has the tensors that `transformers` would save. Raises UserError where the module cannot
    be built, the directory does not fill it, or a parameter is not made of boxes of tensors.
    """
    model_dir = Path(model_dir)
    config = read_module_config(model_dir)
    module = meta_module(config, model_dir)
    shapes = checkpoint_shapes(model_dir, module)
    state, tied = module.state_dict(keep_vars=True), dict(module.all_tied_weights_keys)
    untied = [name for name in state if name not in tied]
    embedding, output = _ends(module)
    text = (*output, f"{_name_of(module, module.get_decoder())}.")
    dtypes = dict(_other_dtypes(module, untied))
    parts = module.named_modules()
    linear = frozenset(f"{name}.weight" for name, part in parts if isinstance(part, torch.nn.Linear)) - output
    constant = frozenset(name for name in untied if not state[name].requires_grad)
    # Everything else is read from the module first: the loader puts symbolic tensors in the place of its parameters.
    _load(module, shapes, model_dir)
    filled = {name: t for name, t in module.state_dict(keep_vars=True).items() if isinstance(t, SymbolicTensor)}
    for name, source in tied.items():
        if source not in filled and name in filled:  # the checkpoint has the tensor under its other name
            filled[source] = filled[name]
    left_out = output if headless else frozenset()
    # A constant that the files do not have is computed, but for a table: nothing else knows it.
    computed = {name for name in constant if state[name].is_floating_point()}
    missing = [name for name in untied if name not in filled and name not in left_out and name not in computed]
    if missing:
        raise UserError(
            f"{model_dir}: the checkpoint has no tensor for the parameter {missing[0]} of transformers' module"
            f"{f' and {len(missing) - 1} others' if missing[1:] else ''}. Use the config.json of these weights."
        )
    shards = {name: shard_of(name, filled[name]) for name in untied if name in filled and name not in left_out}
    copies = {
        shard_of(name, filled[name]).pieces[0].tensor: shards[source].pieces[0].tensor
        for name, source in tied.items()
        if name in filled and filled[name] is not filled[source] and source in shards
    }
    used = dict.fromkeys(piece.tensor for shard in shards.values() for piece in shard.pieces)
    return ModuleShards(
        config,
        shards,
        {name: shapes[name] for name in used},
        embedding,
        frozenset(output - tied.keys()),
        frozenset(name for name in shards if name.startswith(text)),
        linear & shards.keys(),
        constant & shards.keys(),
        {name: dtype for name, dtype in dtypes.items() if name in shards} | _integers(model_dir, shards, dtypes),
        copies,
    )


def _ends(module: PreTrainedModel) -> tuple[str, frozenset[str]]:
    """Returns the names of the input embedding's weight, and of all parameters of the output layer."""
    output = module.get_output_embeddings()
    name = _name_of(module, output)
    return (
        f"{_name_of(module, module.get_input_embeddings())}.weight",
        frozenset(f"{name}.{parameter}" for parameter, _ in output.named_parameters()),
    )


def _name_of(module: PreTrainedModel, part: torch.nn.Module | None) -> str:
    for name, other in module.named_modules():
        if other is part:
            return name
    raise UserError(
        f"model.path: {type(module).__name__} of transformers does not say which of its parts are the embeddings, the "
        "layers and the output layer of a language model. Use another model."
    )


def _other_dtypes(module: PreTrainedModel, names: list[str]) -> Iterator[tuple[str, torch.dtype]]:
    """Yields what a bfloat16 module has in another dtype, by itself or because `transformers` keeps it in float32."""
    from transformers.core_model_loading import build_glob_alternation

    state, kept = module.state_dict(keep_vars=True), list(module._get_dtype_plan(torch.bfloat16))
    pattern = build_glob_alternation(kept)[0] if kept else None
    for name in names:
        if not state[name].is_floating_point():
            yield name, state[name].dtype
        elif state[name].dtype == torch.float32 or (pattern and pattern.search(name)):
            yield name, torch.float32


def _integers(
    model_dir: Path, shards: Mapping[str, Shard], dtypes: Mapping[str, torch.dtype]
) -> dict[str, torch.dtype]:
    """Returns the dtypes of tables of integers in the files, where all values of them are also of the module's."""
    tensors = {
        name: shards[name].pieces[0].tensor
        for name, dtype in dtypes.items()
        if name in shards and not dtype.is_floating_point
    }
    stored = stored_dtypes(model_dir, frozenset(tensors.values()))
    of_files = {name: stored.get(tensor, dtypes[name]) for name, tensor in tensors.items()}
    return {name: dtype for name, dtype in of_files.items() if torch.promote_types(dtype, dtypes[name]) == dtypes[name]}


def _load(module: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]], model_dir: Path) -> None:
    """Fills a module with symbolic tensors by the loader of `transformers`."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    # The loader itself, and not a second reading of its conversion rules: rules that it gets later are covered too, and
    # one that is not a move of elements raises in it.
    tensors = {name: SymbolicTensor.of(name, shape) for name, shape in shapes.items()}
    options = LoadStateDictConfig(dtype=torch.float32, weight_mapping=get_model_conversion_mapping(module))
    with _without_progress_bars():
        info, _ = convert_and_load_state_dict_in_model(module, tensors, options)
    for parameter, reason in info.conversion_errors.items():
        raise UserError(
            f"{model_dir}: the parameter {parameter} is more than boxes of the checkpoint's tensors that are moved "
            f"({reason.splitlines()[-1].removeprefix('Error: ').removesuffix('.')}). Use another model."
        )
    for parameter, stored, expected in sorted(info.mismatched_keys):
        raise UserError(
            f"{model_dir}: the parameter {parameter} has shape {tuple(expected)} by config.json, but the checkpoint's "
            f"tensors have {tuple(stored)}. Use the config.json of these weights."
        )


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()
