"""The layers of Transformer Engine: their parameters, and training, on the CPU.

Transformer Engine's Python and megatron-core's are real, the compiled extension is `tests.transformer_engine`'s.
"""

import inspect
import re
from pathlib import Path
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
from verl_mg.config import MegatronConfig
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
    from verl_mg.training import output_layer

    runner = megatron_runner(model, dtype=torch.bfloat16, kernels=kernels)
    with mock.patch.object(output_layer, "CHUNK_BYTES", {"cpu": 2**11}):
        unclipped = OPTIMIZER.model_copy(update={"clip_grad": 0.0})
        update(MegatronTrainer(runner, unclipped), [batch], batch)
    return runner.chunks[0].output_weight().main_grad.clone()


def test_gradient_of_an_output_layer_in_bfloat16_is_not_rounded(transformer_engine, families):
    """As with torch's kernels: chunks are summed in the float32 buffer, which is not a copy of a sum in bfloat16."""
    model = families["qwen3"]
    for kernels in ("transformer_engine", "torch"):
        (gradient,) = transformer_engine.run(1, gradient_by_chunks, model, rows_for(model), kernels)
        assert gradient.any() and not torch.equal(gradient, gradient.bfloat16().float()), kernels


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
