"""INT4 weights in the order of SGLang's kernel (Marlin), written in place; called inside SGLang's schedulers.

SGLang rearranges packed weights and their scales once, when a model is loaded, and has no way back for linear layers:
processing them again at the end of an update would be an error. Here each shard is rearranged by SGLang's own functions
and copied into the memory that its kernel and its graphs use, and the model is marked as one whose weights SGLang does
not process after an update.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

# Attributes of a model by which SGLang's loader knows that an update leaves weights in the form of their kernels.
MARKS = {"original_weights_rebuild_keys": {}, "recorded_loader": {}, "flash_rl_initial_load_complete": True}


def marlin_layers(model: Any) -> Mapping[str, Any]:
    """Returns the layers with INT4 weights by the names of the parameters that are rearranged; {} without any."""
    from sglang.srt.layers.quantization.compressed_tensors.schemes import CompressedTensorsWNA16

    return {
        f"{prefix}.{name}": module
        for prefix, module in model.named_modules()
        if isinstance(getattr(module, "scheme", None), CompressedTensorsWNA16)
        for name in (module.scheme.w_q_name, module.scheme.w_s_name)
    }


def keep_order(model: Any) -> None:
    """Marks a model, so that SGLang's loader does not process its weights after an update."""
    for name, value in MARKS.items():
        setattr(model, name, value)


def write_marlin(layer: Any, name: str, shard: Tensor) -> None:
    """Rearranges a shard and writes it into the parameter of a layer that SGLang has processed.

    Shards are (rows, columns / 8) int32 of packed values, or (rows, columns / group) scales.
    """
    from sglang.srt.layers.quantization.compressed_tensors.schemes import compressed_tensors_wNa16
    from sglang.srt.layers.quantization.marlin_utils import marlin_permute_scales

    form, attribute = layer.scheme.kernel_config, name.rpartition(".")[2]
    columns, rows = form.partition_weight_shape
    turned = shard.t().contiguous()  # in GPTQ's orientation, which both functions take
    if attribute == layer.scheme.w_q_name:
        bits = form.weight_type.size_bits
        arranged = compressed_tensors_wNa16.gptq_marlin_repack(
            turned, perm=layer.g_idx_sort_indices, size_k=columns, size_n=rows, num_bits=bits
        )
    else:
        arranged = marlin_permute_scales(turned, size_k=columns, size_n=rows, group_size=form.group_size)
    getattr(layer, attribute).data.copy_(arranged)  # the same memory, of which graphs have the address
