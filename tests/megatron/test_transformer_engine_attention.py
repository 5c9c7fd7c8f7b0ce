"""Attention of Transformer Engine's layers: which kernel computes it, its values, and where torch's takes its place."""

import os
import sys
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.helpers.roles import megatron_runner, refusal
from verl_mg import device
from verl_mg.config import MegatronConfig, TrainableConfig
from verl_mg.layout import Layout
from verl_mg.megatron.transformer_config import transformer_config
from verl_mg.training.model_spec import ModelSpec


def attended(latent, window, scaling, shares=False):
    """Output and gradients of attention with Transformer Engine's kernels, and with torch's."""
    from verl_mg.megatron.attention import PackedAttention
    from verl_mg.megatron.latent_attention import PackedMLA
    from verl_mg.megatron.packed_sequences import describe_sequences
    from verl_mg.megatron.transformer_engine_spec import FusedAttention, FusedMLA

    config = SimpleNamespace(softmax_scale=None, qk_head_dim=8, v_head_dim=6)
    keys = (torch.tensor([5, 3, 11]), torch.tensor([*range(5), 0, 1, 5, *range(4), *range(6, 13)])) if shares else ()
    packed = describe_sequences(torch.tensor([5, 1, 7]), torch.tensor([1.0, 0.3]), scaling, *keys)
    packed.cp_group = dist.group.WORLD
    shapes = ((13, 4, 12), (13, 1, 4), (13, 4, 14)) if latent else ((13, 4, 4), (13, 2, 4), (13, 2, 4))
    drawn = [torch.randn(shape, generator=torch.Generator().manual_seed(9)) for shape in shapes]
    results = []
    for kind in (FusedMLA, PackedMLA) if latent else (FusedAttention, PackedAttention):
        module = kind(config, window=window, **({"interleaved": latent == "interleaved"} if latent else {}))
        inputs = [values.clone().requires_grad_() for values in drawn]
        output = module(*inputs, None, packed_seq_params=packed)
        output.square().sum().backward()
        results.append([output.detach(), *(values.grad for values in inputs)])
    return results


def attention_modules(configs, capability, deterministic=False, path=(), flash_attention_2=False):
    """Names of the classes of attention of families on a GPU; path: further folders of packages."""
    from verl_mg.megatron import transformer_engine_spec

    with pytest.MonkeyPatch.context() as patch, determinism(deterministic):
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        patch.setattr(sys, "path", [*path, *sys.path])
        patch.delitem(sys.modules, "flash_attn", raising=False)  # another library may have left None there
        patch.setattr(transformer_engine_spec.FlashAttentionUtils, "is_installed", flash_attention_2)
        specs = [transformer_engine_spec.block_spec(config, range(1)).layer_specs[0] for config in configs]
    return [spec.submodules.self_attention.submodules.core_attention.module.__name__ for spec in specs]


@contextmanager
def determinism(enabled):
    """Deterministic kernels as in a job, or not."""
    with mock.patch.dict(os.environ):
        if enabled:
            device.compute_deterministically()
        yield
    torch.use_deterministic_algorithms(False)


OF_TRANSFORMER_ENGINE, OF_TORCH = ["FusedAttention", "FusedMLA"], ["PackedAttention", "PackedMLA"]


@pytest.mark.parametrize(
    ("capability", "deterministic", "flash_attention_2", "expected"),
    [
        ((9, 0), False, False, OF_TRANSFORMER_ENGINE),
        ((8, 0), False, False, OF_TORCH),
        ((8, 0), False, True, OF_TRANSFORMER_ENGINE),
        ((9, 0), True, True, OF_TORCH),
        ((10, 0), True, False, OF_TORCH),
    ],
)
def test_attention_before_hopper_or_deterministic_is_that_of_torch(
    transformer_engine, configs, tmp_path, capability, deterministic, flash_attention_2, expected
):
    """FlashAttention 4 is a part of a package without files, `flash_attn`, and has no kernel before Hopper either."""
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    families = [configs["qwen2"], configs["deepseek_v3"]]
    arguments = families, capability, deterministic, (str(tmp_path),), flash_attention_2
    assert transformer_engine.run(1, attention_modules, *arguments) == [expected]


MULTIPROCESSORS = 132  # of an H100
SIZES = {"0.6B": (16, 8), "1.7B": (16, 8), "8B": (32, 8)}  # heads and heads of keys of Qwen3, of 128 elements each
TOKENS = TrainableConfig.model_fields["tokens_per_micro_batch"].default
LONGEST = (256, 1024, 2048, 8192)


class AskedError(Exception):
    """The memory in bytes that a kernel asks for in its backward pass, besides inputs and outputs."""


def of_transformer_engine(given, choose):
    """Its own choice for deterministic passes, and its figure for cuDNN (`SM90_DET_FUSED_THD_BWD_MAX_BHSS`)."""
    choice = choose(given)
    assert given.deterministic and given.is_training and given.qkv_layout.startswith("thd")
    if choice[2]:  # cuDNN
        raise AskedError(128 * given.batch_size * given.num_heads * given.max_seqlen_q * given.max_seqlen_kv)
    return choice


def of_torch(query, key, value, sequences, scores):
    """As `mha_varlen_bwd` of torch's flash_api.cpp allocates: sums of the queries' gradients, one for each group of
    blocks that is added up in order, and gradients of keys and values of each head."""
    assert torch.are_deterministic_algorithms_enabled() and query.dtype is torch.bfloat16
    (total, heads, width), rows = query.shape, len(sequences.lengths)
    padded = total + 128 * rows
    groups = -(-MULTIPROCESSORS // (rows * heads))
    repeated = 2 * key.shape[0] * heads * width * 2 if key.shape[1] < heads else 0
    raise AskedError(4 * padded * heads * (groups * width + 1) + repeated)


def workspaces(config, fused):
    """Bytes that attention asks for in a deterministic job on an H100, by longest row; `fused`: that of Transformer
    Engine, otherwise that of the layers."""
    from transformer_engine.pytorch.attention.dot_product_attention import utils

    from verl_mg.megatron.packed_sequences import describe_sequences
    from verl_mg.megatron.transformer_engine_spec import FusedAttention, block_spec
    from verl_mg.training import packed_attention

    found, cudnn = [], utils.FusedAttnBackend.F16_arbitrary_seqlen.value
    with determinism(True), pytest.MonkeyPatch.context() as patch:
        spec = block_spec(config, range(1)).layer_specs[0].submodules.self_attention.submodules.core_attention
        patch.setenv("NVTE_UNFUSED_ATTN", "0")
        patch.setattr(
            utils, "get_attention_backend", partial(of_transformer_engine, choose=utils.get_attention_backend)
        )
        patch.setattr(utils, "get_device_compute_capability", lambda: (9, 0))
        patch.setattr(utils, "get_cudnn_version", lambda: (9, 24, 0))
        patch.setattr(utils, "_get_fused_attn_backend", lambda **_: (cudnn, ""))  # it has a kernel for such rows
        patch.setattr(packed_attention, "_with_ragged_kernel", of_torch)
        for longest in LONGEST:
            packed = describe_sequences(torch.full((TOKENS // longest,), longest), torch.tensor([1.0]), 1.0)
            query, key = (torch.zeros(TOKENS, n, 128, dtype=torch.bfloat16) for n in (config.heads, config.kv_heads))
            packed.cp_group = dist.group.WORLD
            module = (FusedAttention if fused else spec.module)(SimpleNamespace(softmax_scale=None))
            with pytest.raises(AskedError) as asked:
                module._attend(query, key, key, packed)
            found += asked.value.args
    return found


@pytest.mark.parametrize("size", SIZES)
def test_attention_of_deterministic_jobs_asks_for_less_than_a_gibibyte(transformer_engine, configs, size):
    """For a default micro-batch, also of a single row. cuDNN would ask for more where Transformer Engine chooses it."""
    heads, kv_heads = SIZES[size]
    config = replace(configs["qwen3"], heads=heads, kv_heads=kv_heads, head_dim=128)
    (chosen,) = transformer_engine.run(1, workspaces, config, False)
    assert len(chosen) == len(LONGEST) and max(chosen) < 2**30
    (fused,) = transformer_engine.run(1, workspaces, config, True)
    gibibytes = [asked / 2**30 for asked in fused]
    assert gibibytes[:3] == [heads / 16 * each for each in (4, 16, 32)] and gibibytes[3] < 1  # 2**30 pairs: not cuDNN


@pytest.mark.parametrize(
    ("latent", "window", "scaling"),
    [(None, None, 1.0), (None, 3, 1.0), (None, None, 1.3), ("halves", None, 1.3), ("interleaved", None, 1.0)],
)
@pytest.mark.parametrize("shares", [False, True])
def test_attention_of_transformer_engine_equals_that_of_torch(transformer_engine, latent, window, scaling, shares):
    ((found, expected),) = transformer_engine.run(1, attended, latent, window, scaling, shares)
    assert_close(found, expected)


def assert_close(found, expected):
    assert found[0].any()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)


@contextmanager
def counted_calls():
    """A list that grows with each call of Transformer Engine's attention."""
    from transformer_engine.pytorch import DotProductAttention

    calls, forward = [], DotProductAttention.forward
    counting = lambda *a, **o: (calls.append(1), forward(*a, **o))[1]  # noqa: E731
    with mock.patch.object(DotProductAttention, "forward", counting):
        yield calls


def attended_without_kernels():
    """As `attended`, where Transformer Engine has no kernel, and how often it was called in three passes."""
    with mock.patch.dict(os.environ, {"NVTE_UNFUSED_ATTN": "0"}), counted_calls() as calls:
        results = [attended(None, None, 1.0), attended("halves", None, 1.3)]
    return results, len(calls)


def test_attention_without_a_kernel_of_transformer_engine_is_that_of_torch(transformer_engine):
    """Its own products of whole matrices are never a substitute."""
    ((results, calls),) = transformer_engine.run(1, attended_without_kernels)
    assert calls == len(results)
    for found, expected in results:
        assert_close(found, expected)


def calls_of_two_shapes():
    """Calls of Transformer Engine in three passes of one module: a shape without a kernel twice, one with a kernel."""
    from verl_mg.megatron.packed_sequences import describe_sequences
    from verl_mg.megatron.transformer_engine_spec import FusedAttention

    packed = describe_sequences(torch.tensor([5, 1, 7]), torch.tensor([1.0, 0.3]), 1.0)
    packed.cp_group = dist.group.WORLD
    module = FusedAttention(SimpleNamespace(softmax_scale=None))
    with counted_calls() as called:
        for allowed, heads in (("0", 4), ("1", 4), ("1", 2)):
            with mock.patch.dict(os.environ, {"NVTE_UNFUSED_ATTN": allowed}):
                query, key = torch.ones(13, heads, 4), torch.ones(13, 2, 4)
                module(query, key, key, None, packed_seq_params=packed)
    return len(called)


def test_shape_without_a_kernel_of_transformer_engine_leaves_others_theirs(transformer_engine):
    """The first shape is tried once; the second one has its kernel."""
    assert transformer_engine.run(1, calls_of_two_shapes) == [2]


def chosen(model, unfused):
    """Rows of a model with Transformer Engine, whose products of whole matrices are allowed, or not, or not set."""
    from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention

    # Transformer Engine chooses again only for other inputs than the last ones.
    kept = mock.patch.dict(dot_product_attention._attention_backends, attention_params=None)
    with mock.patch.dict(os.environ), kept:
        os.environ.pop("NVTE_UNFUSED_ATTN")
        os.environ.update({} if unfused is None else {"NVTE_UNFUSED_ATTN": unfused})
        return megatron_runner(model, megatron=UNFUSED, kernels="transformer_engine").chosen()


UNFUSED = MegatronConfig(transformer={"moe_permute_fusion": False})  # the fused permutation is a kernel of Triton
WHOLE, OF_TORCH = "whole matrices by Transformer Engine", "torch's "


@pytest.mark.parametrize(
    ("unfused", "attention", "remedy"),
    [("1", WHOLE, "Unset NVTE_UNFUSED_ATTN."), ("0", OF_TORCH, "cuDNN"), (None, OF_TORCH, "cuDNN")],
)
def test_model_with_transformer_engine_says_which_attention_it_has_chosen(
    transformer_engine, families, unfused, attention, remedy
):
    """Whole matrices only where a user asks for them: megatron-core would allow them for every model that it builds."""
    ((*rows,),) = transformer_engine.run(1, chosen, families["qwen3_moe"], unfused)
    found = {part: (how, warning) for part, how, warning in rows}
    how, warning = found.pop("attention, full")
    assert how.startswith(attention) and remedy in warning
    experts = "Transformer Engine's grouped product, separate permutation"
    assert {part: how for part, (how, _) in found.items()} == {
        "precision": "float32",
        "kernels": "Transformer Engine",
        "experts": experts,
        "weight gradients": found["weight gradients"][0],
    }
    assert "Transformer Engine" in found["weight gradients"][0]


def refusal_of_deterministic(*arguments):
    with determinism(True):
        return refusal(transformer_config, *arguments)


def test_exchange_of_keys_by_p2p_in_deterministic_job_is_refused(transformer_engine, configs):
    """Attention is torch's there, which gathers keys and values."""
    fields = MegatronConfig(transformer={"cp_comm_type": "p2p"})
    spec = ModelSpec(Path(), torch.bfloat16, kernels="transformer_engine", megatron=fields)
    (said,) = transformer_engine.run(1, refusal_of_deterministic, configs["qwen2"], Layout(cp=2), spec)
    assert said == (
        "megatron.transformer.cp_comm_type=p2p: with job.deterministic attention is torch's, without it. "
        "Write a2a or all_gather."
    )
