"""INT4 weights written in place, against SGLang's own processing of layers that it has loaded."""

from types import SimpleNamespace

import pytest
import torch

from tests.helpers.traces import needs_sglang
from verl_mg.engines.sglang.arguments import QUANTIZATIONS
from verl_mg.engines.sglang.internals import keep_order, marlin_layers, write_marlin

pytestmark = needs_sglang
ROWS, COLUMNS = (128, 64, 64), 256


def repacked(words, perm, size_k, size_n, num_bits):
    """In place of SGLang's kernel, which needs a GPU: another order in its shape, in which each word is visible."""
    assert words.is_contiguous() and words.shape == (size_k * num_bits // 32, size_n) and not perm.numel()
    return words.flip(0).reshape(size_k // 16, size_n * 16 * num_bits // 32)


@pytest.fixture
def wna16(monkeypatch):
    from sglang.srt.layers.quantization.compressed_tensors.schemes import compressed_tensors_wNa16 as module

    monkeypatch.setattr(module, "gptq_marlin_repack", repacked, raising=False)
    monkeypatch.setattr(module, "marlin_make_workspace", lambda device: None)
    return module


def method_of(layer):
    """SGLang's method and scheme for a linear layer of an engine with `rollout.wire=int4`."""
    from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsConfig,
        CompressedTensorsLinearMethod,
    )

    config = CompressedTensorsConfig.from_config(QUANTIZATIONS["int4"])
    parts = config.target_scheme_map["Linear"]
    layer.scheme = config._get_scheme_from_parts(parts["weights"], parts["input_activations"])
    return CompressedTensorsLinearMethod(config)


def loaded_model(seed):
    """A model of one layer as SGLang has it when its weights are loaded; and these weights."""
    model, layer = torch.nn.Module(), torch.nn.Module()
    model.add_module("proj", layer)
    layer.quant_method = method_of(layer)
    layer.scheme.create_weights(
        layer, output_size=sum(ROWS), input_size=COLUMNS, output_partition_sizes=list(ROWS),
        input_size_per_partition=COLUMNS, params_dtype=torch.bfloat16, weight_loader=lambda *_: None,
    )  # fmt: skip
    layer.scheme.kernel_config.weight_type = SimpleNamespace(size_bits=4)  # a name on the CPU
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**31), 2**31, layer.weight_packed.shape, generator=generator).int()
    scales = torch.rand(layer.weight_scale.shape, generator=generator).bfloat16()
    layer.weight_packed.data.copy_(words)
    layer.weight_scale.data.copy_(scales)
    layer.quant_method.process_weights_after_loading(layer)
    return model, {"proj.weight_packed": words, "proj.weight_scale": scales}


def test_weights_written_in_place_equal_those_that_sglang_has_loaded_and_processed(wna16):
    (expected, wanted), (model, _) = loaded_model(1), loaded_model(2)
    layers = marlin_layers(model)
    assert layers.keys() == wanted.keys()
    memory = {name: getattr(model.proj, name.rpartition(".")[2]).data_ptr() for name in wanted}
    for name, shard in wanted.items():
        write_marlin(layers[name], name, shard)
    for name in wanted:
        ours, theirs = (getattr(m.proj, name.rpartition(".")[2]) for m in (model, expected))
        assert torch.equal(ours, theirs) and ours.shape != wanted[name].shape
        assert ours.data_ptr() == memory[name]  # SGLang's graphs read it there


def test_end_of_an_update_leaves_weights_that_were_written_in_place(wna16):
    from sglang.srt.model_loader.loader import DefaultModelLoader

    model, _ = loaded_model(3)
    before = model.proj.weight_packed.clone()
    with pytest.raises(AssertionError):  # what SGLang would do at the end of an update
        DefaultModelLoader.postprocess_weights(model, torch.device("cpu"))
    model, _ = loaded_model(3)
    DefaultModelLoader.restore_weights_before_loading(model, torch.device("cpu"))  # the first update begins
    keep_order(model)
    for _ in range(2):
        DefaultModelLoader.restore_weights_before_loading(model, torch.device("cpu"))
        DefaultModelLoader.postprocess_weights(model, torch.device("cpu"))
    assert torch.equal(model.proj.weight_packed, before)
