"""The CUDA path of every family and layout on a fake GPU: devices, dtypes and shapes, values, and waits of the host."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.fake_cuda import ROOT, recorded_cuda_calls
from tests.helpers.tiny_models import (
    LATENT,
    MIXTURES,
    SPARSE,
    VARIANTS,
    daily_of,
    nightly,
    oracle,
    oracle_outputs,
    tiny_model,
)
from tests.megatron import fake_cuda_cases as cases
from tests.megatron.layout_models import ModelFolders
from tests.megatron.shared_rows import sharing_micro_batch
from tests.megatron.training import assert_equal, assert_logprobs_near, train_in_plain_torch
from verl_mg.algorithms.divergence import Divergence
from verl_mg.batch import Batch
from verl_mg.config import MegatronConfig
from verl_mg.models.hf_config import read_config

LAYERS = 2
FFN = 64
"""A multiple of 8 for each expert too, as grouped products on GPUs need."""
KERNELS = {
    "llama": 13,
    "qwen2": 14,
    "qwen3": 15,
    "gemma2": 15,
    "qwen3_moe": 30,
    "mixtral": 28,
    "deepseek_v2": 41,
    "deepseek_v3": 43,
    "glm4_moe": 35,
    "gpt_oss": 44,
}
"""Kernels of the forward pass of a layer, two of a mixture to count the loads of experts; docs/benchmarks.md has the
same numbers."""
PRODUCTS = {"mm", "addmm"}
LOGIT_TRAFFIC = {False: ([1, 1], [4, 6]), True: ([8, 9], [52, 74])}
"""Kernels for each chunk of logits and bytes for each logit besides products, forward and backward, by whether torch
computes rows; docs/benchmarks.md has the same numbers."""
COPIES_OF_HEADS = {"repeat_interleave", "repeat", "expand_copy", "constant_pad_nd"}
NORM = ("_local_scalar_dense", "megatron/core/optimizer/clip_grads.py:get_grad_norm_fp32")
EVERY_UPDATE = ("_to_copy", "verl_mg/training/trainer.py:to_host")
EXCHANGED_SIZES = ("_to_copy", "verl_mg/megatron/experts.py:_exchange_sizes")
"""A wait of each pass over a layer whose experts are on several ranks."""
LAYOUTS = ("tp2", "cp2", "pp2", "tp2-cp2", "tp2-pp2")
EXPERT_LAYOUTS = ("tp1-ep2", "tp2-ep2-etp1", "tp2-ep1-etp2")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> ModelFolders:
    folder = tmp_path_factory.mktemp("models")
    return ModelFolders(folder, lambda folder, family: tiny_model(folder, family, LAYERS, FFN))


def assert_trains(trained: cases.Trained) -> None:
    """Weights change, and the host waits for nothing of ours but once for the inferred values and for the metrics.

    Where ranks exchange tokens of experts it waits for their sizes too, in each micro-batch: update 2 has two of them.
    """
    assert trained.grad_norm > 0 and trained.changed > 0
    ours = {phase: cases.in_package(waits, "verl_mg") for phase, waits in trained.waits.items()}
    exchanges = {phase: waits.pop(EXCHANGED_SIZES, 0) for phase, waits in ours.items()}
    assert exchanges["update 2"] == 2 * exchanges["update 1"]
    assert ours["update 1"] == ours["update 2"] == {EVERY_UPDATE: 1}
    inferred = 0 if trained.logprobs is None else 2  # one copy for each of two micro-batches, after both
    assert sum(ours["infer"].values()) == inferred


def assert_like_transformers(trained: cases.Trained, model: Path, rows: Batch | None = None) -> None:
    """Log-probs differ by the rounding of bfloat16."""
    rows = cases.rows_of(model) if rows is None else rows
    scored = rows["loss_mask"] & (rows.positions > 0)
    with torch.no_grad():
        expected, _ = oracle_outputs(oracle(model), rows, cases.TEMPERATURE)
    assert trained.logprobs is not None
    assert_logprobs_near((trained.logprobs - expected[scored]).abs())


def assert_no_wait_for_a_micro_batch(trained: cases.Trained) -> None:
    assert_trains(trained)
    assert not trained.for_a_micro_batch("verl_mg") and not trained.for_a_micro_batch("megatron")


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_train_on_cuda_needs_no_wait_for_a_micro_batch(fake_cuda, models, family):
    trained = fake_cuda.run(cases.train, models[family], "tp1", 1, 0, False)
    assert_no_wait_for_a_micro_batch(trained)
    assert family != "qwen2" or cases.in_package(trained.waits["update 2"], "megatron") == {NORM: 1}
    assert_like_transformers(trained, models[family])


@pytest.mark.parametrize("divergence", [Divergence(), Divergence(top_k=4)], ids=["whole", "top"])
def test_distillation_on_cuda_needs_no_wait_for_a_micro_batch(fake_cuda, models, divergence):
    waits = fake_cuda.run(cases.distill, models["qwen2"], divergence)
    ours = {phase: cases.in_package(of_phase, "verl_mg") for phase, of_phase in waits.items()}
    assert sum(ours["infer"].values()) == 1  # the copy of the outputs
    assert ours["update 1"] == ours["update 2"] == {EVERY_UPDATE: 1}


@pytest.mark.parametrize("family", daily_of(KERNELS, "qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss"))
def test_forward_of_a_layer_on_cuda_launches_at_most_these_kernels_and_waits_for_none(fake_cuda, models, family):
    """`-s` prints them."""
    passes = fake_cuda.run(cases.passes_of_layers, models[family])
    print(f"{family}: {[len(kernels) for kernels in passes.kernels]}", *passes.kernels[-1], sep="\n    ")
    assert passes.waits == [[]] * LAYERS
    assert max(len(kernels) for kernels in passes.kernels) <= KERNELS[family]
    copies = {operation for kernels in passes.kernels for operation, _ in kernels} & COPIES_OF_HEADS
    assert copies == ({"constant_pad_nd"} if family in LATENT else set())  # FlashAttention-2 has one width


@pytest.mark.parametrize(
    ("capability", "installed", "deterministic", "expected"),
    [
        ((9, 0), True, False, ["FA3"]),
        ((9, 0), False, False, []),
        ((8, 0), True, False, []),
        ((10, 0), True, False, []),
        ((9, 0), True, True, []),
    ],
)
def test_flash_attention_3_is_activated_once_where_it_can_run(
    fake_cuda, models, capability, installed, deterministic, expected
):
    """In deterministic jobs it is not: its backward pass may ignore that they are."""
    assert fake_cuda.run(cases.activations, models["llama"], capability, installed, deterministic) == expected


OPERATORS = """
import torch
library = torch.library.Library("flash_attn_3", "DEF")
for name in {names}:
    library.define(f"{{name}}(Tensor q, Tensor k, Tensor v) -> Tensor[]")
"""


def test_flash_attention_3_is_used_by_torch_or_refused(fake_cuda, models, tmp_path):
    """torch itself takes the operators that the package registers when it is imported."""

    def found(*names: str) -> tuple[str | None, str]:
        source = OPERATORS.format(names=names)
        return fake_cuda.run(cases.with_package_of_flash_attention_3, models["llama"], tmp_path, source)

    assert found("fwd", "bwd") == ("FA3", "")
    active, refused = found("fwd")
    assert active is None and "flash_attn_interface is installed and torch cannot use it" in refused
    assert "does not expose FA3 backward kernels" in refused


def test_latent_attention_on_cuda_with_flash_attention_3_copies_no_values(fake_cuda, models):
    passes = fake_cuda.run(cases.passes_with_flash_attention_3, models["deepseek_v3"])
    assert max(len(kernels) for kernels in passes.kernels) <= KERNELS["deepseek_v3"] - 2
    assert "constant_pad_nd" not in {operation for operation, _ in passes.kernels[-1]}


def test_train_with_gathered_keys_on_cuda_needs_no_wait_for_a_micro_batch(fake_cuda, models):
    gathered = MegatronConfig(transformer={"cp_comm_type": "all_gather"})
    assert_no_wait_for_a_micro_batch(fake_cuda.run(cases.train, models["gemma2"], "cp2", 2, 1, False, gathered))


@pytest.mark.parametrize("family", ["qwen2", *nightly("gemma2", "deepseek_v3")])
def test_train_shared_prefixes_on_cuda_needs_no_wait_for_a_micro_batch(fake_cuda, models, family):
    rows = sharing_micro_batch(read_config(models[family]).vocab)
    trained = fake_cuda.run(cases.train, models[family], "tp1", 1, 0, False, None, rows)
    assert_no_wait_for_a_micro_batch(trained)
    assert_like_transformers(trained, models[family], rows)


def test_two_steps_in_float32_on_cuda_equal_transformers(fake_cuda, models, tmp_path):
    """Results arrive in host memory. Gemma 2: the fake GPU has no kernel of attention in float32."""
    trained = fake_cuda.run(cases.two_steps, models["gemma2"])
    rows = cases.rows_of(models["gemma2"])
    assert_equal([trained], train_in_plain_torch(oracle(models["gemma2"]), rows, tmp_path), 2e-5)


@pytest.mark.parametrize("by_torch", [False, True], ids=["kernels", "torch"])
def test_passes_over_the_vocabulary_on_cuda_move_each_logit_as_often_as_documented(fake_cuda, by_torch):
    """`-s` prints them."""
    tokens, hidden, vocab, chunks = 32, 16, 512, 4
    passes = fake_cuda.run(cases.passes_over_vocabulary, by_torch, (tokens, hidden, vocab, chunks))
    large = [[each for each in traffic if each[1] > tokens * vocab // chunks] for traffic in passes]
    print(*large, sep="\n")
    rows = [[each for each in traffic if each[0] not in PRODUCTS] for traffic in large]
    assert [sum(name in PRODUCTS for name, _ in traffic) for traffic in large] == [chunks, 3 * chunks]
    counts = [len(traffic) // chunks for traffic in rows]
    moved = [round(sum(size for _, size in traffic) / (tokens * vocab)) for traffic in rows]
    assert (counts, moved) == LOGIT_TRAFFIC[by_torch]


def test_losses_on_cuda_need_no_wait(fake_cuda):
    assert all(waits == [] for waits in fake_cuda.run(cases.losses).values())


def test_fake_cuda_counts_operations_that_wait(fake_cuda):
    waited = fake_cuda.run(cases.waiting_operations)
    assert waited == [
        "_local_scalar_dense",
        "index",
        "nonzero",
        "_to_copy",
        "_to_copy",
        "copy_",
        "_to_copy",
        "repeat_interleave",
    ]


def test_fake_cuda_refuses_tensors_on_two_devices(fake_cuda):
    fake_cuda.run(cases.mixed_devices)


def test_recorded_cuda_calls_keep_their_order():
    with recorded_cuda_calls() as calls:
        event = torch.cuda.Event()
        torch.cuda.current_stream().wait_event(event)
        event.synchronize()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    assert calls == ["stream.wait_event", "event.synchronize", "synchronize", "empty_cache"]


@pytest.mark.nightly
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", VARIANTS)
def test_train_family_on_cuda_has_values_of_transformers(fake_cuda, models, family, recompute):
    trained = fake_cuda.run(cases.train, models[family], "tp1", 1, 0, recompute)
    assert_trains(trained)
    assert_like_transformers(trained, models[family])


@pytest.mark.nightly
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", [family for family in VARIANTS if family not in SPARSE])
def test_train_layout_on_cuda_runs_on_every_rank(fake_cuda, models, family, layout):
    """Without sparse attention: its ranks need each other's selections, and here each gets its own as the others'."""
    ranks = 4 if "-" in layout else 2
    for rank in range(ranks):
        assert_trains(fake_cuda.run(cases.train, models[family], layout, ranks, rank, False))


@pytest.mark.nightly
@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
@pytest.mark.parametrize("family", [*MIXTURES, *LATENT])
def test_train_experts_on_cuda_runs_on_every_rank(fake_cuda, models, family, layout):
    for rank in range(2):
        assert_trains(fake_cuda.run(cases.train, models[family], layout, 2, rank, False))


@pytest.mark.nightly
def test_compiled_functions_equal_themselves_and_are_compiled_once_for_all_sizes():
    done = subprocess.run(
        [sys.executable, "-m", "tests.megatron.compiled_cases"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("compilations") == 14
