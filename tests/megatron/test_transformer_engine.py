"""The layers of Transformer Engine: their parameters, and training, on the CPU.

Transformer Engine's Python and megatron-core's are real, the compiled extension is `tests.transformer_engine`'s.
"""

import inspect
import os
import re
import sys
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import get_args
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from tests.helpers.roles import megatron_runner, refusal
from tests.helpers.tiny_models import SPARSE, VARIANTS, nightly, oracle, rows_for
from tests.megatron.built_parameters import differences
from tests.megatron.layout_models import LOW_RANK_QUERIES
from tests.megatron.training import OPTIMIZER, assert_equal, one_rank, train, train_in_plain_torch, update
from verl_mg import device
from verl_mg.config import MegatronConfig, TrainableConfig
from verl_mg.config.roles import RecomputeModule
from verl_mg.layout import Layout
from verl_mg.megatron.model_runner import MegatronRunner
from verl_mg.megatron.trainer import MegatronTrainer
from verl_mg.megatron.transformer_config import transformer_config
from verl_mg.models.hf_config import read_config
from verl_mg.sharding.boxes import slices
from verl_mg.training.microbatch import TokenShard, token_order
from verl_mg.training.model_spec import ModelSpec
from verl_mg.training.offload import CpuOffload

# (layout, ranks); the models have 4 layers, so that 3 stages are uneven runs of them.
LAYOUTS = [("tp2", 2), *nightly(("tp1", 1), ("pp3", 3), ("tp2-pp2-vpp2", 4))]
WITH_EXPERTS = [("tp2-pp2-ep2-etp1", 4), *nightly(("ep2", 2), ("tp2-ep2", 4), ("pp3-ep2", 6))]
FAMILIES = [family for family in VARIANTS if family not in ("gpt_oss", *SPARSE)]
"""Those with layers of Transformer Engine: its attention has no sinks here."""
OF_EXPERTS = [("ep2", 2), ("tp2-etp1", 2), ("tp2-ep2", 4), ("pp2-ep2", 4), ("cp2-ep2", 2), ("tp2-pp2-ep2-etp1", 4)]
TRAINED = [
    ("deepseek_v3", "tp2-cp2-ep2-etp1", 4, False),
    ("qwen2", "tp2-cp2", 4, False),
    *nightly(
        ("qwen3_moe", "tp2-pp2", 4, True),
        *((family, "tp1", 1, False) for family in FAMILIES),
        *((family, "tp2-cp2", 4, False) for family in FAMILIES if family != "qwen2"),
        *((name, *layout, "pp2" in layout[0]) for name in ("mixtral", "deepseek_v3") for layout in OF_EXPERTS),
        *(("deepseek_v3", "tp2", 2, [part]) for part in get_args(RecomputeModule)),
    ),
]


@pytest.mark.parametrize(("layout", "count"), LAYOUTS)
def test_parameters_of_transformer_engine_equal_the_weight_table(transformer_engine, configs, layout, count):
    fitting = {name: configs[name] for name in (*FAMILIES, LOW_RANK_QUERIES)}
    assert transformer_engine.run(count, differences, fitting, layout, "transformer_engine") == [{}] * count


@pytest.mark.parametrize(("layout", "count"), WITH_EXPERTS)
def test_parameters_of_grouped_experts_equal_the_weight_table(transformer_engine, configs, layout, count):
    mixtures = {name: configs[name] for name in (*FAMILIES, LOW_RANK_QUERIES) if configs[name].experts}
    assert transformer_engine.run(count, differences, mixtures, layout, "transformer_engine") == [{}] * count


def options(model):
    """Options of `train`; the kernels of the fused permutation are Triton's."""
    unfused = {"moe_permute_fusion": False} if read_config(model).experts else {}
    return {"megatron": MegatronConfig(transformer=unfused), "kernels": "transformer_engine"}


@pytest.mark.parametrize(("name", "layout", "count", "recompute"), TRAINED)
def test_train_with_transformer_engine_equals_transformers(
    transformer_engine, families, tmp_path, name, layout, count, recompute
):
    model, rows = families[name], rows_for(families[name])
    expected = train_in_plain_torch(oracle(model), rows, tmp_path)
    assert not expected.idle()
    results = transformer_engine.run(count, train, model, layout, rows, recompute, **options(model))
    assert_equal(results, expected, 2e-5)


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


LINEAR_WEIGHT = re.compile(r"(linear_\w+|output_layer)\.weight\d*$")
"""Names of the weights of linear layers, one for each expert, and of an output layer that is not the embedding."""


def written_by_products(model, batch):
    """Weights of linear layers and of the output layer; those whose gradient a matrix product has added to its buffer;
    and those of which DDP knows that it is there, after an update with two micro-batches."""
    import transformer_engine_torch

    from verl_mg.training import logprobs

    runner = megatron_runner(model, **options(model))
    trainer, buffers = MegatronTrainer(runner, OPTIMIZER), set()

    def recorded(product, place):
        def called(*arguments, **named):
            given = arguments[place] if isinstance(arguments[place], list) else [arguments[place]]
            buffers.update(tensor.data_ptr() for tensor in given if tensor is not None)
            return product(*arguments, **named)

        return called

    with pytest.MonkeyPatch.context() as patch:
        for module, name, place in (
            (transformer_engine_torch, "generic_gemm", 4),
            (transformer_engine_torch, "te_general_grouped_gemm", 4),
            (logprobs, "wgrad_gemm_accum_fp32", 2),
        ):
            patch.setattr(module, name, recorded(getattr(module, name), place))
        update(trainer, [batch, batch], batch)
    tied = runner.chunks[0].share_embeddings_and_output_weights
    weights = {name: weight for name, weight in runner.parameters().items() if weight.requires_grad}
    linear = {name for name in weights if LINEAR_WEIGHT.search(name) or (tied and "word_embeddings" in name)}
    written = {name for name, weight in weights.items() if weight.main_grad.data_ptr() in buffers}
    marked = {name for name, weight in weights.items() if getattr(weight, "grad_added_to_main_grad", False)}
    return linear, written, marked


@pytest.mark.parametrize("name", ["qwen2", "deepseek_v3", *nightly("qwen3", "qwen3_moe", "gemma2")])
def test_weight_gradients_are_added_to_their_buffers_by_matrix_products(transformer_engine, families, name):
    """Those of an output layer too, tied to the embedding as of Qwen2 or not, and those of each expert."""
    model = families[name]
    ((linear, written, marked),) = transformer_engine.run(1, written_by_products, model, rows_for(model))
    assert len(linear) > 2 * 4 and written == marked == linear


def gradient_by_chunks(model, batch, kernels):
    """Gradient of the output layer of a model in bfloat16, after one micro-batch in several chunks of logits."""
    from verl_mg.training import logprobs

    runner = megatron_runner(model, dtype=torch.bfloat16, kernels=kernels)
    with mock.patch.object(logprobs, "CHUNK_BYTES", {"cpu": 2**11}):
        unclipped = OPTIMIZER.model_copy(update={"clip_grad": 0.0})
        update(MegatronTrainer(runner, unclipped), [batch], batch)
    return runner.chunks[0].output_weight().main_grad.clone()


def test_gradient_of_an_output_layer_in_bfloat16_is_not_rounded(transformer_engine, families):
    """As with torch's kernels: chunks are summed in the float32 buffer, which is not a copy of a sum in bfloat16."""
    model = families["qwen3"]
    for kernels in ("transformer_engine", "torch"):
        (gradient,) = transformer_engine.run(1, gradient_by_chunks, model, rows_for(model), kernels)
        assert gradient.any() and not torch.equal(gradient, gradient.bfloat16().float()), kernels


def chosen(model, unfused):
    """Rows of a model with Transformer Engine, whose products of whole matrices are allowed, or not, or not set."""
    from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention

    # Transformer Engine chooses again only for other inputs than the last ones.
    kept = mock.patch.dict(dot_product_attention._attention_backends, attention_params=None)
    with mock.patch.dict(os.environ), kept:
        os.environ.pop("NVTE_UNFUSED_ATTN")
        os.environ.update({} if unfused is None else {"NVTE_UNFUSED_ATTN": unfused})
        return megatron_runner(model, **options(model)).chosen()


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


BF16_LAYERS = {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 1}
"""Of a model with two layers: FP8 is configured, and no layer computes in it, which the CPU cannot."""


def train_configured_for_fp8(model, layout, batch):
    """What `train` returns, and the tokens of this rank's micro-batches."""
    tokens, pack = [], MegatronRunner.pack

    def recorded(*arguments, **options):
        micro = pack(*arguments, **options)
        tokens.append(micro.input_ids.shape[1])
        return micro

    fields = MegatronConfig(transformer={"fp8": "hybrid", "fp8_recipe": "tensorwise", **BF16_LAYERS})
    with mock.patch.object(MegatronRunner, "pack", recorded):
        return train(model, layout, batch, megatron=fields, kernels="transformer_engine"), tokens


def test_micro_batches_for_fp8_have_rows_for_its_products_and_the_same_outputs(transformer_engine, families, tmp_path):
    model, rows = families["qwen3"], rows_for(families["qwen3"])
    results = transformer_engine.run(4, train_configured_for_fp8, model, "tp2-cp2", rows)
    assert_equal([trained for trained, _ in results], train_in_plain_torch(oracle(model), rows, tmp_path), 2e-5)
    for _, tokens in results:
        assert tokens and all(count % (16 * 2) == 0 for count in tokens)  # 16 on each tensor-parallel rank


def copies_in_fp8(model):
    """Copies of weights in FP8 before and after a model is offloaded."""
    runner = megatron_runner(model, kernels="transformer_engine")
    linears = [module for module in runner.chunks[0].modules() if hasattr(module, "_fp8_workspaces")]
    for linear in linears:
        linear._fp8_workspaces["weight"] = torch.zeros(1)  # as its forward pass does
    CpuOffload(runner).to_host()
    return len(linears), sum(len(linear._fp8_workspaces) for linear in linears)


def test_offload_frees_the_copies_of_weights_in_fp8(transformer_engine, families):
    assert transformer_engine.run(1, copies_in_fp8, families["qwen3"]) == [(2 * 4, 0)]


def exchanged(kernel, query, key, value, attention_mask=None, **options):
    """What Transformer Engine's attention with an exchange of keys and values computes, by gathering everything."""
    group, lengths = kernel.cp_group, options["cu_seqlens_q"].diff().tolist()
    assert kernel.cp_global_ranks == dist.get_process_group_ranks(group) and kernel.attn_mask_type == "padding_causal"
    assert options["cu_seqlens_q_padded"] is options["cu_seqlens_q"] is options["cu_seqlens_kv"]
    assert options["max_seqlen_q"] == options["max_seqlen_kv"] == max(lengths)
    places = torch.arange(sum(lengths))[None]
    from transformer_engine.pytorch.attention.dot_product_attention.context_parallel import get_batch_on_this_cp_rank

    (local, *_) = get_batch_on_this_cp_rank(options["cu_seqlens_q"], places, places, places[0], group)
    parts = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(parts, local, group=group)
    order = torch.cat([part.flatten() for part in parts]).argsort()
    query, key, value = (gather_from_sequence_parallel_region(x, group=group)[order] for x in (query, key, value))
    contexts = []
    for q, k, v in zip(*(x.split(lengths) for x in (query, key, value)), strict=True):
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        context = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=kernel.softmax_scale, enable_gqa=len(q) > len(k)
        )
        contexts.append(context.transpose(0, 1).flatten(1))
    return torch.cat(contexts)[local.flatten()]


def train_with_exchange(kind, *arguments):
    """What `train` returns, and how attention was called."""
    kinds = []

    def recorded(kernel, *tensors, **options):
        kinds.append((kernel.cp_comm_type, kernel.cp_group.size()))
        inspect.signature(real).bind(kernel, *tensors, **options)
        return exchanged(kernel, *tensors, **options)

    from transformer_engine.pytorch import DotProductAttention

    real = DotProductAttention.forward
    fields = MegatronConfig(transformer={"cp_comm_type": kind, "moe_permute_fusion": False})
    with mock.patch.object(DotProductAttention, "forward", recorded):
        trained = train(*arguments, megatron=fields, kernels="transformer_engine")
    return trained, set(kinds)


@pytest.mark.parametrize(
    ("name", "layout", "count", "kind"),
    [
        ("qwen2", "cp2", 2, "p2p"),
        *nightly(("qwen2", "tp2-cp4", 8, "all_gather"), ("deepseek_v3", "tp2-cp2", 4, "p2p")),
    ],
)
def test_attention_that_exchanges_keys_gets_its_order_of_tokens(
    transformer_engine, families, tmp_path, name, layout, count, kind
):
    """Its kernels need a GPU: in their place is what they are documented to compute."""
    model, rows = families[name], rows_for(families[name])
    results = transformer_engine.run(count, train_with_exchange, kind, model, layout, rows)
    assert_equal([trained for trained, _ in results], train_in_plain_torch(oracle(model), rows, tmp_path), 2e-5)
    assert all(kinds == {(kind, int(layout[-1]))} for _, kinds in results)


@pytest.mark.parametrize(
    ("name", "kernels", "kind", "message"),
    [
        ("qwen2", "torch", "p2p", "it needs the kernels of Transformer Engine. Write a2a or all_gather"),
        ("gemma2", "transformer_engine", "p2p", "neither windows nor a softcap, which the model has. Write a2a or"),
        ("qwen2", "transformer_engine", "a2a+p2p", "it is not supported. Write a2a, all_gather or p2p"),
    ],
)
def test_exchange_of_keys_missing_in_the_kernels_is_refused(transformer_engine, configs, name, kernels, kind, message):
    fields = MegatronConfig(transformer={"cp_comm_type": kind})
    spec = ModelSpec(Path(), torch.bfloat16, kernels=kernels, megatron=fields)
    (said,) = transformer_engine.run(1, refusal, transformer_config, configs[name], Layout(cp=2), spec)
    assert said.startswith(f"megatron.transformer.cp_comm_type={kind}: ") and message in said


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


def resumed_with_transformer_engine(model, batch):
    """Losses and norms of two steps with torch, and of the second one resumed from the state after the first."""
    first = MegatronTrainer(megatron_runner(model), OPTIMIZER)

    def step(trainer):
        metrics = update(trainer, [batch], batch)
        return metrics["loss"], metrics["grad_norm"]

    before, stored = step(first), {}
    for part in first.stored_boxes():
        shape = first.runner.table.tensor_index.tensors[part.tensor].shape
        stored.setdefault((part.namespace, part.tensor), torch.zeros(shape))[slices(part.box)] = part.values
    runner = megatron_runner(model, from_checkpoint=True, **options(model))
    second = MegatronTrainer(runner, OPTIMIZER)
    second.load(lambda part: part.values.copy_(stored[part.namespace, part.tensor][slices(part.box)]), first.counters())
    assert not runner.unrestored
    return before, step(first), step(second)


@pytest.mark.parametrize("name", ["qwen2", pytest.param("deepseek_v3", marks=pytest.mark.nightly)])
def test_training_resumes_with_other_kernels(transformer_engine, families, name):
    ((before, expected, found),) = transformer_engine.run(
        1, resumed_with_transformer_engine, families[name], rows_for(families[name])
    )
    assert found == pytest.approx(expected, rel=1e-5) and expected[0] < before[0]


@pytest.mark.nightly
def test_train_value_head_with_transformer_engine_equals_torch(ranks, transformer_engine, families):
    model = families["gemma2"]
    alone = one_rank(ranks.run(1, train, model, "tp1", rows_for(model), head="value")[0])
    results = transformer_engine.run(4, train, model, "tp2-pp2", rows_for(model), head="value", **options(model))
    assert_equal(results, alone, 2e-5)


@pytest.mark.nightly
def test_train_with_muon_and_transformer_engine_equals_torch(ranks, transformer_engine, families):
    """Each expert has a parameter of its own there, and ranks have copies of projections that torch divides."""
    model, muon = families["deepseek_v3"], OPTIMIZER.model_copy(update={"kind": "muon"})
    alone = one_rank(ranks.run(1, train, model, "tp1", rows_for(model), optimizer=muon)[0])
    given = options(model) | {"optimizer": muon}
    results = transformer_engine.run(4, train, model, "tp2-ep2-etp1", rows_for(model), **given)
    assert_equal(results, alone, 2e-5)


def cut_by_transformer_engine():
    """This rank's tokens by Transformer Engine's own function for loaders of data, and by ours."""
    from transformer_engine.pytorch.attention.dot_product_attention.context_parallel import get_batch_on_this_cp_rank

    lengths = torch.tensor([5, 16, 1, 9])
    order = token_order(lengths, TokenShard(1, dist.get_world_size(), 0, dist.get_rank()), 1, True)
    cumulative = torch.cat([torch.zeros(1, dtype=torch.int64), order.lengths.cumsum(0)]).int()
    places = torch.arange(order.total)[None]
    (found, *_) = get_batch_on_this_cp_rank(cumulative, places, places, places[0], dist.group.WORLD)
    return found.flatten().tolist(), order.local.tolist()


@pytest.mark.parametrize("cp", [2, 4])
def test_zigzag_order_is_that_of_transformer_engine(transformer_engine, cp):
    for theirs, ours in transformer_engine.run(cp, cut_by_transformer_engine):
        assert theirs == ours
