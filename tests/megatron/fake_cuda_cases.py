"""What runs on the fake GPU: a model and its trainer on one rank of a fake process group, and losses."""

import importlib.util
import sys
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import attention
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.helpers.cuda_tensors import CUDA, CudaTensor, FakeCuda
from tests.helpers.rank_pool import refusal
from tests.helpers.tiny_models import random_rows
from tests.megatron import training
from verl_mg import device
from verl_mg.algorithms.aggregation import MODES, aggregate
from verl_mg.algorithms.divergence import Divergence
from verl_mg.algorithms.losses import clipped_policy_loss, gspo_loss
from verl_mg.batch import Batch, ColumnKind
from verl_mg.checkpoint.model_directory import ModelDirectories, ModelDirectory
from verl_mg.config import MegatronConfig, OptimizerConfig
from verl_mg.layout import Layout, Placement
from verl_mg.megatron.model_runner import MegatronRunner
from verl_mg.megatron.process_groups import ParallelGroups
from verl_mg.megatron.trainer import MegatronTrainer
from verl_mg.megatron.transformer_config import block_spec
from verl_mg.models.hf_config import read_config
from verl_mg.training import logprobs, output_layer
from verl_mg.training import trainer as trainer_module
from verl_mg.training.logprobs import TeacherDivergence, TokenOutputs, load_teacher_layer
from verl_mg.training.loss_inputs import LossInputs
from verl_mg.training.microbatch import TEACHER, TEACHER_HIDDEN, TEACHER_TOP
from verl_mg.training.model_spec import ModelSpec
from verl_mg.training.output_layer import Draw, OutputLayer
from verl_mg.training.packed_attention import PACKAGE
from verl_mg.training.trainer import MiniBatch, Objective
from verl_mg.training.vocabulary_rows import TorchRows

Waits = Counter[tuple[str, str]]
Traffic = list[tuple[str, int]]
TEMPERATURE = 0.8


@dataclass
class Trained:
    """Results on the rank; `waits` by phase: "infer", and "update 1" and "update 2" with so many micro-batches."""

    logprobs: Tensor | None = None
    waits: dict[str, Waits] = field(default_factory=dict)
    grad_norm: float = 0.0
    changed: int = 0
    """Weights that an update has changed."""

    def for_a_micro_batch(self, package: str) -> Waits:
        """Waits that the second micro-batch of an update adds."""
        return in_package(self.waits["update 2"] - self.waits["update 1"], package)


class LocalDirectories(ModelDirectories):
    """Each rank reads the headers, which it would get from rank 0."""

    def open(self, folder: Path, *options: Any) -> ModelDirectory:
        return self._checked(folder, *options)


def join_fake_group(rank: int = 0, ranks: int = 1) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    device.group_backend = lambda: "fake"  # this process ends with the case


def runner_of(model: Path, layout: str = "tp1", ranks: int = 1, rank: int = 0, **options: Any) -> MegatronRunner:
    """A model in bfloat16 on one rank of a fake group."""
    join_fake_group(rank, ranks)
    groups = ParallelGroups(Placement.on(Layout.parse(layout), ranks))
    return MegatronRunner(ModelSpec(model, torch.bfloat16, **options), groups, LocalDirectories())


def chosen(_: FakeCuda, model: Path, deterministic: bool = False) -> dict[str, list[str]]:
    """What a trained model computes with on the GPU, by part, and after it the warning if there is one."""
    torch.use_deterministic_algorithms(deterministic)
    rows = runner_of(model).chosen()
    return {part: [how, *([warning] if warning else [])] for part, how, warning in rows}


def in_package(waits: Waits, package: str) -> Waits:
    return Counter({wait: count for wait, count in waits.items() if wait[1].startswith(package + "/")})


def rows_of(model: Path) -> Batch:
    """Few tokens: Triton's interpreter takes milliseconds for the kernels of each."""
    return random_rows(3, read_config(model).vocab, longest=12)


def policy_loss(tokens: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    return clipped_policy_loss(tokens.logprobs, tokens["noise"], tokens["advantages"], tokens.mask, 0.2, 0.2)


def train(
    fake: FakeCuda,
    model: Path,
    layout: str,
    ranks: int,
    rank: int,
    recompute: bool,
    megatron: MegatronConfig | None = None,
    rows: Batch | None = None,
) -> Trained:
    """Inference and two updates; what other ranks would send is made up. rows: those of `rows_of` by default."""
    runner = runner_of(model, layout, ranks, rank, recompute=recompute, megatron=megatron or MegatronConfig())
    weights = runner.parameters()
    assert weights and all(isinstance(weight, CudaTensor) for weight in weights.values())
    if ranks > 1:  # ranks read parts of the weights and send them to each other
        with torch.no_grad():
            for weight in weights.values():
                weight.normal_(std=0.1)
    rows, trained = rows_of(model) if rows is None else rows, Trained()
    hidden = [-(-rows.total_tokens // runner.layout.tp), 1, read_config(model).hidden]
    fake.receive = lambda sent: sent.copy_(torch.tensor(hidden)) if sent.dtype is torch.int64 else sent.fill_(0.1)

    def counted(phase: str) -> None:
        trained.waits[phase] = Counter(fake.waits)
        fake.waits.clear()

    fake.waits.clear()
    inferred = runner.infer([rows, rows], TEMPERATURE)
    counted("infer")
    trained.logprobs = next((report[1] for report in inferred if report is not None), None)
    trainer = MegatronTrainer(runner, OptimizerConfig())
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    summed = trainer_module.sum_over_ranks
    # Losses are those of the last stage only.
    with mock.patch.object(trainer_module, "sum_over_ranks", lambda *given: {"loss": 0.0} | summed(*given)):
        for count in (1, 2):
            fake.waits.clear()
            metrics = trainer.update(
                MiniBatch([rows] * count, None, 50, 6), Objective(policy_loss, "seq-mean-token-mean", TEMPERATURE)
            )
            counted(f"update {count}")
    trained.grad_norm = metrics["grad_norm"]
    trained.changed = sum(not torch.equal(weight, before[name]) for name, weight in runner.parameters().items())
    return trained


def distill(fake: FakeCuda, model: Path, divergence: Divergence) -> dict[str, Waits]:
    """A student learns from its own model as a teacher: the teacher's outputs, and updates with one and two rows.

    Returns:
        Waits by phase, "infer", "update 1" and "update 2" with so many micro-batches.
    """
    runner = runner_of(model)
    rows, head = rows_of(model), runner.output_head
    wanted = TokenOutputs(top=divergence.top_k or 0, hidden=0 if divergence.top_k else head.hidden)
    waits: dict[str, Waits] = {}
    fake.waits.clear()
    (inferred,) = runner.infer([rows], TEMPERATURE, outputs=wanted)
    waits["infer"] = Counter(fake.waits)
    assert inferred is not None
    entries, values = inferred
    column = torch.zeros(rows.total_tokens, *wanted.shape)
    column[entries] = values.view(-1, *wanted.shape)
    layers = None
    if divergence.top_k:
        rows.put(TEACHER_TOP, column, ColumnKind.TOKEN)
    else:
        rows.put(TEACHER_HIDDEN, column.to(runner.dtype), ColumnKind.TOKEN)
        rows.put(TEACHER, torch.zeros(len(rows), dtype=torch.int64), ColumnKind.SEQUENCE)
        directory = ModelDirectories().open(model, {head.tensor: runner.table.huggingface()[head.tensor]})
        shard = runner.vocabulary_shard()
        assert shard is not None
        layers = [load_teacher_layer(directory, head, runner.dtype, shard)]
        assert layers[0].weight.device == CUDA
    trainer = MegatronTrainer(runner, OptimizerConfig())
    likeliest = TEACHER_TOP if divergence.top_k else None
    outputs = TokenOutputs(teacher=TeacherDivergence(divergence, layers), likeliest=likeliest)
    for count in (1, 2):
        fake.waits.clear()
        metrics = trainer.update(
            MiniBatch([rows] * count, None, 50, 0),
            Objective(lambda tokens: (tokens.divergence, {}), "token-mean", TEMPERATURE, outputs),
        )
        waits[f"update {count}"] = Counter(fake.waits)
        # The student is its teacher, until its first update.
        assert abs(metrics["loss"]) < 1e-3 if count == 1 and not divergence.top_k else metrics["grad_norm"] > 0
    return waits


def two_steps(_: FakeCuda, model: Path) -> training.Trained:
    """What tests/gpu does on GPUs, in float32."""
    join_fake_group()
    return training.train(model, "tp1", rows_of(model))


@dataclass
class LayerPasses:
    """What the forward passes of a model's layers do; kernels and waits as in `FakeCuda`, of each layer."""

    kernels: list[list[tuple[str, str]]] = field(default_factory=list)
    waits: list[list[tuple[str, str]]] = field(default_factory=list)


def passes_of_layers(fake: FakeCuda, model: Path) -> LayerPasses:
    """One training pass over rows of different lengths in bfloat16, on one rank."""
    runner, passes = runner_of(model), LayerPasses()

    def before(*_: object) -> None:
        fake.kernels.clear()
        fake.waits.clear()

    def after(*_: object) -> None:
        passes.kernels.append(list(fake.kernels))
        passes.waits.append(list(fake.waits))

    chunk: Any = runner.chunks[0]
    for layer in chunk.decoder.layers:
        layer.register_forward_pre_hook(before)
        layer.register_forward_hook(after)
    rows = rows_of(model)
    assert len(set(rows.lengths.tolist())) > 1
    trainer = MegatronTrainer(runner, OptimizerConfig())
    trainer.update(MiniBatch([rows], None, 50, 6), Objective(policy_loss, "seq-mean-token-mean", TEMPERATURE))
    return passes


def activations(
    _: FakeCuda, model: Path, capability: tuple[int, int], installed: bool, deterministic: bool
) -> list[str]:
    """Implementations of attention that are activated while a model is built twice."""
    activated: list[str] = []
    attention.register_flash_attention_impl("FA3", register_fn=lambda: activated.append("FA3") or mock.Mock())  # type: ignore[func-returns-value]
    found = mock.Mock() if installed else None
    torch.use_deterministic_algorithms(deterministic)
    with (
        mock.patch.object(torch.cuda, "get_device_capability", lambda *_: capability),
        mock.patch.object(importlib.util, "find_spec", lambda name: found if name == "flash_attn_interface" else None),
    ):
        for _ in range(2):
            block_spec(read_config(model), range(2))
    return activated


def with_package_of_flash_attention_3(_: FakeCuda, model: Path, folder: Path, source: str) -> tuple[str | None, str]:
    """The active implementation of attention and the refusal, with a module of this source as the package."""
    (folder / f"{PACKAGE}.py").write_text(source)
    sys.path.insert(0, str(folder))
    refused = refusal(block_spec, read_config(model), range(2))
    return attention.current_flash_attention_impl(), refused


def passes_with_flash_attention_3(fake: FakeCuda, model: Path) -> LayerPasses:
    """As `passes_of_layers`, where it is active."""
    with mock.patch.object(attention, "current_flash_attention_impl", lambda: "FA3"):
        return passes_of_layers(fake, model)


def passes_over_vocabulary(fake: FakeCuda, by_torch: bool, sizes: tuple[int, int, int, int]) -> list[Traffic]:
    """Kernels of log-probs with entropies and of their gradients in bfloat16, and the bytes that each moves.

    sizes: tokens, hidden size, vocabulary, and chunks of the logits.
    """
    tokens, hidden, vocab, chunks = sizes
    states, weight = (torch.randn(n, hidden).bfloat16().cuda().requires_grad_() for n in (tokens, vocab))
    targets, results = torch.randint(vocab, (tokens,)).cuda(), []
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(output_layer.CHUNK_BYTES, cuda=4 * tokens * vocab // chunks))
        if by_torch:
            stack.enter_context(mock.patch.object(logprobs, "rows_on", lambda _: TorchRows))
        fake.traffic.clear()
        layer = OutputLayer(weight, 0, vocab, None)
        outputs = logprobs.vocab_parallel_logprobs(states, targets, layer, Draw(TEMPERATURE))
        results.append(list(fake.traffic))
        gradients = [torch.randn(tokens).cuda() for _ in outputs]
        fake.traffic.clear()
        torch.autograd.backward(outputs, gradients)
        results.append(list(fake.traffic))
    assert states.grad is not None and states.grad.values.any() and weight.grad is not None
    return results


def losses(fake: FakeCuda) -> dict[str, list[tuple[str, str]]]:
    """Waits of value and gradient of losses and aggregations."""
    ids = torch.tensor([0, 0, 2, 2, 2, 5]).cuda()
    mask = torch.tensor([True, True, False, True, True, True]).cuda()
    old, advantages = torch.zeros(6).cuda(), torch.ones(6).cuda()
    waits = {}
    for mode in MODES:
        logprobs = torch.linspace(-1, 0, 6).cuda().requires_grad_()
        fake.waits.clear()
        loss, _ = clipped_policy_loss(logprobs, old, advantages, mask, 0.2, 0.2)
        aggregate(loss, mask, ids, mode, 6.0).backward()
        waits[mode] = list(fake.waits)
        assert logprobs.grad is not None and logprobs.grad.device == CUDA
    logprobs = torch.linspace(-1, 0, 6).cuda().requires_grad_()
    fake.waits.clear()
    loss, _ = gspo_loss(logprobs, old, advantages, mask, ids, 0.2, 0.2)
    loss.sum().backward()
    waits["sequence"] = list(fake.waits)
    return waits


def waiting_operations(fake: FakeCuda) -> list[str]:
    """Operations for which the host waits, and others, in this order."""
    x, on_host = torch.arange(4.0, device="cuda"), torch.ones(4)
    index, pinned = torch.tensor([1, 2]).cuda(), on_host.pin_memory()
    fake.waits.clear()
    x.sum().item()
    x[x > 1]
    x.nonzero()
    x.cpu()
    on_host.to("cuda")
    on_host.copy_(x)
    x.tolist()
    x.repeat_interleave(index.repeat(2))
    waited = [operation for operation, _ in fake.waits]
    fake.waits.clear()
    x[x > 1] = 0.0
    pinned.to("cuda", non_blocking=True)
    pinned.copy_(x, non_blocking=True)
    torch.where(x > 1, x, 0.0)
    x[index]
    assert not fake.waits, fake.waits
    return waited


def mixed_devices(_: FakeCuda) -> None:
    """Raises where tensors of two devices meet."""
    x = torch.ones(4, device="cuda")
    assert (x * torch.tensor(2.0)).device == CUDA
    with pytest.raises(RuntimeError, match="on the CPU those of shapes"):
        x + torch.ones(4)
    with pytest.raises(RuntimeError, match="on the CPU those of shapes"):
        torch.nn.functional.embedding(torch.tensor([1]), x[:, None])
