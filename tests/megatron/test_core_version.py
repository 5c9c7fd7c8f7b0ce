"""Internals of megatron-core that are used: the installed version has them, with the parameters that are given."""

import inspect

import pytest
from megatron.core import parallel_state
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import multi_latent_attention

from verl_mg.megatron import core_version

MLA = multi_latent_attention.MLASelfAttention
METHODS = [
    (DistributedOptimizer._get_model_param_range_map, ["self", "param"]),
    (parallel_state.RankGenerator.get_ranks, ["self", "token"]),
]
if core_version.VERSION.startswith("0.19"):
    METHODS += [
        (MLA._resolve_qk_norm_config, ["self", "submodules"]),
        (MLA._run_core_attention, list(inspect.signature(MLA._run_core_attention).parameters)),
    ]


@pytest.mark.parametrize(("method", "parameters"), METHODS)
def test_method_of_megatron_core_has_the_parameters_that_are_used(method, parameters):
    found = list(inspect.signature(method).parameters)
    assert found == parameters, f"megatron-core {core_version.VERSION}: {method.__qualname__}{tuple(found)}"


def test_group_globals_include_all_groups_of_megatron_core():
    groups = {name for name in vars(parallel_state) if name.endswith(("_GROUP", "_GROUPS", "_group_list"))}
    assert groups and groups <= core_version.group_globals().keys(), f"megatron-core {core_version.VERSION}"


def test_replaced_functions_are_those_that_megatron_core_calls():
    assert core_version._norm_on_device is clip_grads.l2_norm_impl or "multi_tensor" in str(clip_grads.l2_norm_impl)
    assert layers._grad_accum_fusion_available and callable(layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32)
