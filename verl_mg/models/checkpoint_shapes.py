"""Names and shapes of the tensors of a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from verl_mg.errors import UserError
from verl_mg.models.hf_config import weight_map
from verl_mg.models.transformers_module import meta_module, read_module_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Shapes = dict[str, tuple[int, ...]]
BLOCKS, SCALES = "_blocks", "_scales"  # ends of the names of the two tensors that are one in MXFP4
ELEMENTS_OF_BYTE = 2  # elements of a byte of MXFP4


def checkpoint_shapes(model_dir: str | Path, module: PreTrainedModel | None = None) -> Shapes:
    """Returns names and shapes of the checkpoint's tensors, sorted; the module's where no safetensors file exists."""
    model_dir = Path(model_dir)
    shapes: Shapes = {}
    for path in _files(model_dir):
        try:
            with safe_open(path, framework="pt") as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: not a readable safetensors file ({error}). Download the model again.") from None
    # Tensors in MXFP4 have the name and shape that they have after dequantization.
    shapes = _unpacked(shapes)
    if not shapes:
        shapes = _saved_shapes(module if module is not None else meta_module(read_module_config(model_dir), model_dir))
    return dict(sorted(shapes.items()))


def _unpacked(shapes: Shapes) -> Shapes:
    """Replaces blocks (experts, rows, n, bytes) of MXFP4 and their scales by (experts, columns, rows)."""
    result = dict(shapes)
    for name, shape in shapes.items():
        stack = name.removesuffix(BLOCKS)
        if stack != name and len(shape) == 4 and stack + SCALES in shapes:
            del result[name], result[stack + SCALES]
            result[stack] = (shape[0], shape[2] * shape[3] * ELEMENTS_OF_BYTE, shape[1])
    return result


def _files(model_dir: Path) -> list[Path]:
    """Returns the files that the index names; without an index all."""
    files = weight_map(model_dir)
    if files is None:
        return sorted(model_dir.glob("*.safetensors"))
    return [model_dir / name for name in sorted(set(files.values()))]


def _saved_shapes(module: PreTrainedModel) -> Shapes:
    """Returns the tensors that `save_pretrained` would write: it does the same to the state dict."""
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    kept = remove_tied_weights_from_state_dict(module.state_dict(), module)
    return {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(module, kept).items()}
