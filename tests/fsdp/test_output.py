"""From hidden states to logits in any family: measured on its code, by no name of a field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from verl_mg.errors import UserError
from verl_mg.fsdp.model import build_module, sharded_blocks
from verl_mg.fsdp.output import LogitScale, body_of, read_logit_scale
from verl_mg.models.shrunk_config import shrink
from verl_mg.models.transformers_module import meta_module, module_class


def copy_of(folder: Path, model_type: str, **fields: Any) -> Path:
    """A directory with the configuration of a narrow copy."""
    shrink(CONFIG_MAPPING[model_type](**fields), 1024).config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "logits, expected",
    [
        (lambda z: z, LogitScale()),
        (lambda z: z / 12, LogitScale(1 / 12)),
        (lambda z: 0.0625 * z, LogitScale(0.0625)),
        (lambda z: 30 * torch.tanh(z / 30), LogitScale(1.0, 30.0)),
        (lambda z: 7 * torch.tanh(-2.5 * z / 7), LogitScale(-2.5, 7.0)),
        (lambda z: z + 1, None),
        (lambda z: z.clamp(max=5), None),
        (lambda z: z**3, None),
    ],
)
def test_scale_and_softcap_are_measured_and_any_other_function_is_none(
    logits: Any, expected: LogitScale | None
) -> None:
    found = LogitScale.measured(logits)
    if expected is None:
        assert found is None
    else:
        assert found is not None and found.softcap == pytest.approx(expected.softcap)
        assert found.scale == pytest.approx(expected.scale, rel=1e-6)


@pytest.mark.parametrize(
    "model_type, fields, expected",
    [
        ("falcon_h1", {"lm_head_multiplier": 0.3}, LogitScale(0.3)),  # a field of the body
        ("llama4_text", {}, LogitScale()),  # whose body has another name than the class says
        ("bart", {}, LogitScale()),  # whose body is a decoder within a wrapper
        ("gemma3n_text", {"final_logit_softcapping": 9.0}, LogitScale(1.0, 9.0)),
    ],
)
def test_logit_scale_of_a_family_is_that_of_its_configuration(
    tmp_path: Path, model_type: str, fields: dict[str, Any], expected: LogitScale
) -> None:
    config = CONFIG_MAPPING[model_type](**fields)
    copy = shrink(config, 1024).config
    module = meta_module(copy, tmp_path)
    assert body_of(module) is not module
    found = read_logit_scale(module, tmp_path)
    assert found.scale == pytest.approx(expected.scale) and found.softcap == pytest.approx(expected.softcap)


def test_family_that_megatron_does_not_have_is_refused_without_naming_it(tmp_path: Path) -> None:
    folder = copy_of(tmp_path, "phi")  # with a bias of the output layer
    with pytest.raises(UserError, match=r"its output layer has a bias or is no matrix. Use another model.$"):
        read_logit_scale(build_module(folder, "language", torch.float32, is_packed=False), folder)


@pytest.mark.parametrize("model_type", ["falcon_h1", "gemma3n_text"])  # a model computes buffers of its layers
def test_buffers_that_no_checkpoint_has_are_those_of_the_family(tmp_path: Path, model_type: str) -> None:
    folder = copy_of(tmp_path, model_type)
    module = build_module(folder, "language", torch.float32, is_packed=False)
    oracle = dict(module_class(module.config).from_config(module.config).named_buffers())
    stored = module.state_dict().keys()
    for name, buffer in module.named_buffers():
        assert name in stored or torch.equal(buffer, oracle[name]), name


def test_layers_that_share_parameters_or_are_within_another_are_not_gathered_by_themselves(tmp_path: Path) -> None:
    kinds = ["linear_attention", "hybrid"] * 2
    folder = copy_of(tmp_path, "zamba2", num_hidden_layers=4, layers_block_type=kinds, num_mem_blocks=1)
    module = meta_module(CONFIG_MAPPING["zamba2"].from_pretrained(folder), folder)
    blocks = list(sharded_blocks(module))
    inside = [parameter for block in blocks for parameter in block.parameters()]
    assert blocks and len(inside) == len(set(inside))
    assert not any(inner is not block and inner in blocks for block in blocks for inner in block.modules())
