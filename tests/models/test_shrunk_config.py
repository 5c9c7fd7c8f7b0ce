"""Copies of configurations: of every family of `transformers`, with its kinds of layers and its bounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from verl_mg.errors import UserError
from verl_mg.models.shrunk_config import LONGEST_ROW, narrow_module, shrink
from verl_mg.models.transformers_module import module_class

SECTIONS = {"rope_type": "default", "rope_theta": 1e4}
WIDEST = 400  # elements of the widest matrix of a copy along either dimension


def _text(model_type: str, longest_row: int, **fields: Any) -> PretrainedConfig:
    return shrink(CONFIG_MAPPING[model_type](**fields), longest_row).config.get_text_config(decoder=True)


@pytest.mark.parametrize(
    "model_type, fields, expected",
    [
        (  # 80 layers of 64 heads and 8 key-value heads
            "llama",
            {"num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8},
            {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
        ),
        (  # layers of each kind, the width of a head by layer, a softcap that stays
            "gemma4_text",
            {"final_logit_softcapping": 30.0, "num_key_value_heads": 1},
            {"num_key_value_heads": 1, "final_logit_softcapping": 30.0, "sliding_window": 8},
        ),
        (  # four groups of experts, of which two are chosen from one group
            "deepseek_v3",
            {},
            {
                "n_routed_experts": 8,
                "num_experts_per_tok": 2,
                "n_group": 2,
                "topk_group": 1,
                "routed_scaling_factor": 2.5,
            },
        ),
        (  # states and attention, and a part of all sizes that must fit each other
            "falcon_h1",
            {"num_hidden_layers": 24, "attention_in_multiplier": 1.5},
            {"num_hidden_layers": 2, "mamba_d_conv": 4, "attention_in_multiplier": 1.5},
        ),
        # so many heads score keys that their scores are not all zero: of equal keys a longer row selects others
        ("deepseek_v32", {}, {"index_n_heads": 16, "num_attention_heads": 4, "index_topk": 4}),
        (  # pairs of a head whose positions are in time, height and width
            "cohere_compass_text",
            {"rope_parameters": {"full_attention": {**SECTIONS, "mrope_section": [22, 22, 20]}}},
            {"rope_parameters": {"full_attention": {**SECTIONS, "mrope_section": [3, 3, 2]}}},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_copy_is_narrow_and_keeps_the_shape_and_the_scalars_of_its_family(
    model_type: str, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    text = _text(model_type, 4096, **fields)
    assert {name: getattr(text, name) for name in expected} == expected
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(text)
    assert max(size for parameter in module.parameters() for size in parameter.shape) <= WIDEST


@pytest.mark.parametrize(
    "window, longest_row, expected",
    [
        (512, 2048, (16, True)),  # 2048 tokens are 32 times the longest row of a copy
        (2048, 2048, (72, False)),  # a row as long as the window does not cross it
        (4096, 2048, (128, False)),
        (32, 48, (32, True)),  # rows that are short already
        (4, 131072, (2, True)),  # a window that has less than one token of the copy
    ],
)
def test_rows_of_a_copy_cross_a_window_exactly_where_the_rows_of_a_job_do(
    window: int, longest_row: int, expected: tuple[int, bool]
) -> None:
    copy = _text("mistral", longest_row, sliding_window=window)
    assert (copy.sliding_window, copy.sliding_window < LONGEST_ROW) == expected


def test_original_length_of_rope_and_longest_row_are_divided_alike() -> None:
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 4096, "rope_theta": 1e4}
    factors = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    config = CONFIG_MAPPING["phi3"](max_position_embeddings=131072, rope_parameters=rope | factors)
    copy = shrink(config, 16384)
    assert copy.factor == 256.0
    assert copy.config.rope_parameters["original_max_position_embeddings"] == 16
    assert copy.config.max_position_embeddings == 512
    assert copy.config.hidden_size <= 64
    half = copy.config.hidden_size // copy.config.num_attention_heads // 2
    assert [len(copy.config.rope_parameters[name]) for name in factors] == [half, half]


def test_copy_has_every_kind_of_layer_that_the_whole_depth_has() -> None:
    # Of Gemma 3n 35 layers: sparse or not, with a window or without, and the last 15 use the keys of earlier ones.
    text = _text("gemma3n_text", 1024)
    shared = text.num_hidden_layers - text.num_kv_shared_layers
    kinds = {
        (kind, bool(sparse), layer >= shared)
        for layer, (kind, sparse) in enumerate(zip(text.layer_types, text.activation_sparsity_pattern, strict=True))
    }
    window, full = "sliding_attention", "full_attention"
    assert kinds == {(kind, sparse, False) for kind in (window, full) for sparse in (True, False)} | {
        (kind, False, True) for kind in (window, full)
    }


def test_family_without_layers_that_can_be_counted_is_refused_in_one_line() -> None:
    with pytest.raises(
        UserError, match="model_type 'blt': no narrow copy of it runs with rows in proportion to 1024 tokens"
    ) as error:
        shrink(CONFIG_MAPPING["blt"](), 1024)
    assert "\n" not in str(error.value)


def test_no_token_ends_a_row_of_a_narrow_module() -> None:
    ending = list(range(256))
    module = narrow_module(shrink(CONFIG_MAPPING["llama"](eos_token_id=ending), 64).config)
    assert module.generate(torch.tensor([[5, 6]]), max_new_tokens=9, pad_token_id=0).shape == (1, 11)


def test_buffers_that_a_family_computes_stay_and_those_that_training_fills_vary() -> None:
    decays = narrow_module(shrink(CONFIG_MAPPING["minimax"](), 64).config).model.layers[1].self_attn.diagonal_decay
    assert not decays.triu(1).any() and (decays.diagonal(dim1=-2, dim2=-1) == 1).all()
    routers = [
        buffer
        for name, buffer in narrow_module(shrink(CONFIG_MAPPING["glm4_moe"](), 64).config).named_buffers()
        if name.endswith("e_score_correction_bias")
    ]
    assert routers and all(len(set(bias.tolist())) == len(bias) for bias in routers)


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_family_that_can_be_built_has_a_copy(model_type: str) -> None:
    try:
        config = CONFIG_MAPPING[model_type]()
        with torch.device("meta"):
            module = module_class(config).from_config(config)
        positions = config.get_text_config(decoder=True).max_position_embeddings
    except Exception as error:
        pytest.skip(f"its defaults build no language model: {str(error).splitlines()[0]}")
    with torch.device("meta"):
        copy = module_class(config).from_config(shrink(config, min(positions, 4096)).config)
    assert type(copy) is type(module)
    assert sum(p.numel() for p in copy.parameters()) < 5e6
