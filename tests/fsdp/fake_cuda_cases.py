"""The FSDP backend on the fake GPU: one rank of a fake process group, with weights on the device or in host memory."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param

from tests.helpers.cuda_tensors import FakeCuda
from tests.megatron.fake_cuda_cases import TEMPERATURE, LocalDirectories, join_fake_group, policy_loss, rows_of
from verl_mg.config import FsdpConfig, OptimizerConfig
from verl_mg.fsdp.mesh import MeshGroups
from verl_mg.fsdp.model_runner import FsdpRunner
from verl_mg.fsdp.trainer import FsdpTrainer
from verl_mg.layout import Layout, Placement
from verl_mg.training import storages
from verl_mg.training.model_spec import ModelSpec
from verl_mg.training.trainer import MiniBatch, Objective


@dataclass
class Trained:
    """Results on the rank; moved: tensors that an offload of the role copies or frees; pinned: all host weights are."""

    logprobs: Tensor
    grad_norms: list[float]
    changed: int
    moved: int
    pinned: bool
    devices: dict[str, set[str]]


def _free(tensor: Any) -> None:
    """Stands for the release of memory: nothing reads the values until the next gather."""
    tensor.values.fill_(torch.nan)


def chosen(_: FakeCuda, model: Path) -> dict[str, list[str]]:
    """What a trained module computes with on the GPU, by part, and after it the warning if there is one."""
    join_fake_group()
    torch.cuda.current_device = lambda: 0  # type: ignore[method-assign]
    runner = FsdpRunner(ModelSpec(model, torch.bfloat16), MeshGroups(Placement.on(Layout(), 1)), LocalDirectories())
    return {part: [how, *([warning] if warning else [])] for part, how, warning in runner.chosen()}


def train(_: FakeCuda, model: Path, layout: str, ranks: int, host: bool) -> Trained:
    """Inference and two updates on rank 0; other ranks are assumed to send what it sends."""
    _fsdp_param.free_storage, _fsdp_param.alloc_storage = _free, lambda _: None
    join_fake_group(ranks=ranks)
    torch.cuda.current_device = lambda: 0  # type: ignore[method-assign]
    groups = MeshGroups(Placement.on(Layout.parse(layout), ranks))
    options = FsdpConfig(cpu_offload=host)
    runner = FsdpRunner(ModelSpec(model, torch.bfloat16, fsdp=options), groups, LocalDirectories())
    if ranks > 1:  # ranks read parts of the weights and send them to each other
        generator = torch.Generator().manual_seed(0)
        for weight in runner.parameters().values():
            weight.copy_(0.1 * torch.randn(weight.shape, generator=generator))
    rows = rows_of(model)
    inferred = runner.infer([rows], TEMPERATURE)
    assert inferred[0] is not None
    trainer = FsdpTrainer(runner, OptimizerConfig())
    before = {name: weight.detach().clone() for name, weight in runner.parameters().items()}
    norms = []
    for _step in range(2):
        metrics = trainer.update(
            MiniBatch([rows, rows], None, 50, 6), Objective(policy_loss, "seq-mean-token-mean", TEMPERATURE)
        )
        norms.append(metrics["grad_norm"])
    weights = runner.parameters()
    changed = sum(not torch.equal(weight, before[name]) for name, weight in weights.items())
    storages.storages = list  # memory of the fake GPU has no addresses
    parts = (runner.weight_storages, trainer.state_storages, trainer.gradient_storages)
    moved = sum(len(part()) for part in parts)
    moments = [value for state in trainer.optimizer.state.values() for value in state.values()]
    kinds = {
        "weights": weights.values(),
        "gradients": trainer._gradients(),
        "moments": moments,
        "served": dict(runner.served_parameters()).values(),
    }
    devices = {kind: {tensor.device.type for tensor in tensors} for kind, tensors in kinds.items()}
    on_host = [weight for weight in weights.values() if weight.device.type == "cpu"]
    return Trained(inferred[0][1], norms, changed, moved, all(weight.is_pinned() for weight in on_host), devices)
