"""A linear layer with a norm behind it, cut over ranks, against the formula."""

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig

from verl_mg.layout import Layout, Placement
from verl_mg.megatron.groups import ParallelGroups
from verl_mg.megatron.linear import NormedRowParallelLinear

EPSILON = 0.3  # large, so that it shows


def whole():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in ((6, 1, 8), (4, 8), (4,))]


def forward(tp):
    x, weight, norm = whole()
    groups = ParallelGroups(Placement.on(Layout(tp=tp), tp))
    config = TransformerConfig(
        num_layers=1, hidden_size=4, num_attention_heads=2, layernorm_epsilon=EPSILON, use_cpu_initialization=True,
        perform_initialization=False, tensor_model_parallel_size=tp, sequence_parallel=tp > 1,
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


@pytest.mark.parametrize("tp", [1, 2])
def test_the_whole_output_is_normalised(ranks, tp):
    x, weight, norm = whole()
    y = x @ weight.T
    expected = y * (y.square().mean(-1, keepdim=True) + EPSILON).rsqrt() * norm
    assert torch.allclose(torch.cat(ranks.run(tp, forward, tp)), expected, atol=1e-5)
