"""A linear layer with a norm behind it, cut over ranks, against the formula."""

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig

from verl_mg.layout import Layout, Placement
from verl_mg.megatron.layers import NormedRowParallelLinear
from verl_mg.megatron.process_groups import ParallelGroups

EPSILON = 0.3  # large, so that it shows


def whole():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in ((6, 1, 8), (4, 8), (4,))]


def forward(tp, zero_centered):
    x, weight, norm = whole()
    groups = ParallelGroups(Placement.on(Layout(tp=tp), tp))
    config = TransformerConfig(
        num_layers=1, hidden_size=4, num_attention_heads=2, layernorm_epsilon=EPSILON, use_cpu_initialization=True,
        perform_initialization=False, tensor_model_parallel_size=tp, sequence_parallel=tp > 1,
        layernorm_zero_centered_gamma=zero_centered,
    )  # fmt: skip
    with groups.active(), torch.no_grad():
        layer = NormedRowParallelLinear(
            8, 4, config=config, init_method=None, bias=False, input_is_parallel=True, skip_bias_add=True
        )
        layer.weight.copy_(weight.chunk(tp, dim=1)[dist.get_rank()])
        layer.post_layernorm.weight.copy_(norm)
        output, bias = layer(x.chunk(tp, dim=2)[dist.get_rank()])
    assert bias is None and layer.post_layernorm.weight.sequence_parallel is (tp > 1)
    return output


@pytest.mark.parametrize(("tp", "zero_centered"), [(1, False), (2, False), (2, True)])
def test_normed_row_parallel_linear_normalizes_the_summed_output(ranks, tp, zero_centered):
    x, weight, norm = whole()
    y = x @ weight.T
    expected = y * (y.square().mean(-1, keepdim=True) + EPSILON).rsqrt() * (norm + zero_centered)
    assert torch.allclose(torch.cat(ranks.run(tp, forward, tp, zero_centered)), expected, atol=1e-5)
