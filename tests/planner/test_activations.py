"""Activations against Korthikanti's formulas and against numbers counted by hand."""

import pytest

from tests.planner.tiny_inputs import DENSE, LATENT, MIXTURE, tiny
from verl_mg.layout import Layout
from verl_mg.models.hf_config import parse_config
from verl_mg.planner.activations import activation_bytes, chunks_in_flight, kept_elements


def test_kept_elements_dense_layer_equals_korthikanti():
    """His 34 h bytes a token, less 2 h of dropout masks; our gate adds an output of width 4 h."""
    h = 64
    raw = DENSE | {"hidden_size": h, "num_key_value_heads": 4, "intermediate_size": 4 * h}
    gate = 2 * 4 * h
    assert 2 * (kept_elements(parse_config(raw), False, 1).all - 2 * 4) == (34 - 2) * h + gate


def test_kept_elements_layer_with_experts_equals_hand_count():
    """Norms 4 x 32; q 32, k and v 16 each, before their norms 48, output 32, normalisers 8; router 2 x 8.

    Two copies of the hidden state, whole on each rank that cuts the expert, and three widths of 16.
    """
    c = parse_config(MIXTURE)
    assert kept_elements(c, True, 1).all == 128 + 32 + 32 + 48 + 32 + 8 + 16 + 2 * (32 + 48)
    assert kept_elements(c, True, 2).all - kept_elements(c, True, 1).all == 2 * 32


def test_kept_elements_latent_attention_equals_hand_count():
    """Low ranks 2 x 24 + 2 x 12 + 4; queries and keys 4 heads x 10, values and output 4 x 8; normalisers 8."""
    assert kept_elements(parse_config(LATENT), False, 1).all == 128 + (48 + 24 + 4) + 80 + 64 + 8 + 3 * 64


def test_activation_bytes_of_a_stage_equal_hand_count():
    """64 tokens over tp2, bf16; stage 0 of 2 has two micro-batches in flight, each of two layers."""
    inputs, layout = tiny(DENSE, recompute=False), Layout.parse("tp2-pp2").fit(8)
    each = kept_elements(inputs.weights.config, False, 2).all
    assert activation_bytes(inputs, layout, 0) == 2 * 2 * each * 64 * 2 // 2
    output = 2 * 2 * 64 * 32 + 4 * 32 * 32 + 3 * 4 * 32 * 64  # hidden states, the projection's gradient, logits
    assert activation_bytes(inputs, layout, 1) == 1 * 2 * each * 64 * 2 // 2 + output


def test_activation_bytes_with_recompute_keep_inputs_and_one_layer():
    inputs, layout = tiny(DENSE), Layout.parse("tp2-pp2").fit(8)
    each = kept_elements(inputs.weights.config, False, 2).all - 32
    assert activation_bytes(inputs, layout, 0) == (2 * 2 * 32 + each) * 64 * 2 // 2


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("vpp", [2, 3])
def test_chunks_in_flight_interleaved_equals_korthikantis_factor(pp, vpp):
    layout = Layout(pp=pp, vpp=vpp)
    assert chunks_in_flight(layout, 0, 10**6) / vpp == pytest.approx(pp * (1 + (pp - 1) / (pp * vpp)))
    assert chunks_in_flight(layout, 0, 1) == vpp


def test_chunks_in_flight_few_micro_batches_is_bounded():
    assert [chunks_in_flight(Layout(pp=4), stage, 3) for stage in range(4)] == [3, 3, 2, 1]


def test_activation_bytes_shrink_with_tp_and_cp_and_grow_with_micro_batch():
    def size(text, **options):
        return activation_bytes(tiny(MIXTURE, **options), Layout.parse(text).fit(8), 0)

    assert size("tp2-pp2") < size("pp2") > size("pp2-cp2")
    assert size("pp2", micro_batch=128) > size("pp2") > size("pp2", tokens_per_iteration=1)
    assert size("pp2", recompute=False) > size("pp2")
