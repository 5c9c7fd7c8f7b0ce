"""Trace of `transformers`: which boxes of the checkpoint each parameter of its modules consists of.

An oracle for the table of `verl_mg.sharding.transformers`, by the same codes of positions as the trace of SGLang.
"""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from verl_mg.models.tensor_tree import expert_shapes
from verl_mg.models.transformers_module import checkpoint_shapes
from verl_mg.sharding.boxes import Shard
from verl_mg.tracing.position_codes import PositionCodes, decode
from verl_mg.tracing.trace_rank import checkpoint
from verl_mg.tracing.tracer import stacked_tensors


def trace_transformers(model_dir: str | Path) -> dict[str, Shard]:
    """Returns the shard of each parameter and of each buffer that `from_pretrained` fills."""
    model_dir = Path(model_dir)
    stacked = stacked_tensors(model_dir)
    stacks: dict[str, list[str]] = {}
    for name, place in stacked.items():
        stacks.setdefault(place.name, []).append(name)
    codes = PositionCodes(expert_shapes(checkpoint_shapes(model_dir), stacked))
    passes: dict[str, list[Tensor]] = {}
    for number in range(codes.passes):
        for name, tensor in _loaded_by_transformers(model_dir, dict(checkpoint(codes, number, stacks))):
            passes.setdefault(name, []).append(tensor)
    return {name: decode(name, codes, seen) for name, seen in passes.items()}


def _loaded_by_transformers(model_dir: Path, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters and the filled buffers of the module that `from_pretrained` makes of a checkpoint."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    with tempfile.TemporaryDirectory(prefix="trace-") as name:
        shutil.copy(model_dir / "config.json", name)
        stored = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(stored, Path(name) / "model.safetensors", {"format": "pt"})
        takes_images = hasattr(AutoConfig.from_pretrained(name), "vision_config")
        model, info = (AutoModelForImageTextToText if takes_images else AutoModelForCausalLM).from_pretrained(
            name, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    assert not info["mismatched_keys"]
    missing: set[str] = set(info["missing_keys"])
    parameters = dict(model.named_parameters())
    unfilled = sorted(missing & parameters.keys())
    assert not unfilled, f"transformers finds no tensor of the checkpoint for {', '.join(unfilled[:4])}"
    yield from parameters.items()
    saved = model.state_dict().keys() - missing
    yield from ((name, b) for name, b in model.named_buffers() if name in saved)
