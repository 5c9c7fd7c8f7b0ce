"""Directories of Qwen3.5 as they are published: with vision tower, stacked experts and multi-token prediction."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.helpers.tiny_models import CHARACTERS
from verl_mg.models.tiny_vision_model import make_tiny_vision_model

LAYER = "model.language_model.layers.1."
"""A layer with softmax attention, of whose shapes the layer of multi-token prediction is."""


def published(folder: Path, architecture: str, **options: Any) -> Path:
    """Makes a model of 2 layers, of which the first has linear attention, with the names of the published ones.

    The vision tower is in bfloat16, all else in float32.
    """
    options = {"hidden": 32, "ffn": 56, "layers": 2, "max_positions": 64, "init_std": 0.1} | options
    make_tiny_vision_model(folder, architecture, characters=CHARACTERS, perturb=True, seed=3, **options)
    tensors = load_file(folder / "model.safetensors")
    generator, hidden = torch.Generator().manual_seed(1), int(options["hidden"])

    def noise(*shape: int) -> Tensor:
        return 0.1 * torch.randn(shape, generator=generator)

    tensors["model.language_model.embed_tokens.weight"][0] = noise(hidden)  # of the padding, which is drawn too
    layer = {name.removeprefix(LAYER): t.shape for name, t in tensors.items() if name.startswith(LAYER)}
    tensors |= {f"mtp.layers.0.{name}": noise(*shape) for name, shape in layer.items()}
    tensors |= {f"mtp.{name}.weight": noise(hidden) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    tensors["mtp.fc.weight"] = noise(hidden, 2 * hidden)
    tensors = {name: t.bfloat16() if name.startswith("model.visual.") else t for name, t in tensors.items()}
    _write(folder, stacked(tensors))
    (folder / "model.safetensors").unlink()
    return folder


def stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stacks the experts of each layer, gate above up."""
    result = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for prefix in {name.partition("experts.")[0] + "experts." for name in tensors if ".experts." in name}:
        count = len({name.removeprefix(prefix).split(".")[0] for name in tensors if name.startswith(prefix)})
        gate, up, down = (
            torch.stack([tensors[f"{prefix}{expert}.{part}_proj.weight"] for expert in range(count)])
            for part in ("gate", "up", "down")
        )
        result |= {f"{prefix}gate_up_proj": torch.cat([gate, up], dim=1), f"{prefix}down_proj": down}
    return result


def _write(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Writes every third tensor to each of three files."""
    names, weight_map = sorted(tensors), {}
    for number in range(3):
        file, own = f"model-{number + 1:05d}-of-00003.safetensors", names[number::3]
        save_file({name: tensors[name].contiguous() for name in own}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(own, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """All tensors of the files that the index names."""
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    files = {file: load_file(folder / file) for file in sorted(set(weight_map.values()))}
    assert sum(map(len, files.values())) == len(weight_map)
    return {name: files[file][name] for name, file in weight_map.items()}
