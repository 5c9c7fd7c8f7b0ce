"""What SGLang's own loader makes of a quantized checkpoint.

    python -m tests.engines.sglang.quantized_probe FOLDER RANK

FOLDER has config.json with its quantization_config, and job.json. The model is built as for a GPU; its parameters
become float32, so that they can hold codes of positions.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from verl_mg.engines.sglang.internals import DERIVED, unloaded_model
from verl_mg.engines.sglang.weight_loader import as_loaded, restore_shapes
from verl_mg.layout import EngineLayout
from verl_mg.sharding.traced_table import write_rank_shards
from verl_mg.tracing.position_codes import PositionCodes
from verl_mg.tracing.trace_rank import traced_shards

OF_THE_CACHE = ("k_scale", "v_scale")
"""Scales of a quantized key-value cache, which SGLang drops when it has loaded the weights. It reads no shapes."""


def quantized(build: Any, fields: dict[str, Any]) -> Any:
    """Wraps SGLang's function that builds a model."""
    from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
    from sglang.srt.layers.quantization.fp8 import Fp8Config
    from sglang.srt.layers.quantization.w8a8_fp8 import W8A8Fp8Config

    kinds = {"w8a8_fp8": W8A8Fp8Config, "compressed-tensors": CompressedTensorsConfig}
    kind = kinds.get(fields["quant_method"], Fp8Config)
    if kind is CompressedTensorsConfig:  # its scheme asks for the GPU
        torch.cuda.get_device_capability = lambda *_: (9, 0)

    def build_quantized(model_config: Any, load_config: Any) -> Any:
        config = kind.from_config(fields)
        if fields["quant_method"] == "mxfp8":  # else always blocks of 32
            config.weight_block_size = fields["weight_block_size"]
        model = build(model_config, load_config, config)
        for name, parameter in list(model.named_parameters()):
            parameter.data = parameter.data.float()
            if name.endswith((*OF_THE_CACHE, "weight_shape")):
                module = model.get_submodule(name.rpartition(".")[0])
                delattr(module, name.rpartition(".")[2])
        return model

    return build_quantized


def main(folder: Path, rank: int) -> None:
    from sglang.srt.model_loader import loader

    job = json.loads((folder / "job.json").read_text())
    fields = json.loads((folder / "config.json").read_text())["quantization_config"]
    loader._initialize_model = quantized(loader._initialize_model, fields)
    layout = EngineLayout.parse(job["layout"])
    codes = PositionCodes({name: tuple(shape) for name, shape in job["shapes"].items()})
    with torch.no_grad(), unloaded_model(str(folder), layout, rank, folder / "store") as model:
        write_rank_shards(folder / f"{rank}.json", traced_shards(model, codes, {}, DERIVED))
        if fields["quant_method"] == "w8a8_fp8":
            check_transposed(model)


def check_transposed(model: Any) -> None:
    """Matrices are transposed in place after the first load and after each update of an engine or of a server."""
    from sglang.srt.layers.quantization.w8a8_fp8 import W8A8Fp8LinearMethod

    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, W8A8Fp8LinearMethod):
            before = module.weight.data
            method.process_weights_after_loading(module)
            for of_server in (False, False, True, False):
                if of_server:  # in two sessions, see RemoteEngine.update_shards
                    method.process_weights_after_loading(module)
                else:
                    restore_shapes(model)
                    assert module.weight.shape == before.shape and module.weight.is_contiguous()
                method.process_weights_after_loading(module)
                memory = as_loaded(module.weight)
                assert module.weight.shape == before.t().shape and not module.weight.is_contiguous()
                assert memory.data_ptr() == before.data_ptr() and memory.shape == before.shape


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
