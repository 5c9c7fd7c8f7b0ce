"""Memory of a device: what a role takes, and that its offload returns it."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.helpers.machine import free_memory
from tests.helpers.tiny_models import CHARACTERS, random_rows
from tests.megatron.training import token_loss
from verl_mg import device
from verl_mg.config import FsdpConfig, OptimizerConfig
from verl_mg.fsdp.mesh import MeshGroups
from verl_mg.fsdp.model_runner import FsdpRunner
from verl_mg.fsdp.trainer import FsdpTrainer
from verl_mg.layout import Layout, Placement
from verl_mg.megatron.model_runner import MegatronRunner
from verl_mg.megatron.process_groups import ParallelGroups
from verl_mg.megatron.trainer import MegatronTrainer
from verl_mg.models.hf_config import read_config
from verl_mg.models.tiny_model import make_tiny_model
from verl_mg.training.model_spec import ModelSpec
from verl_mg.training.offload import CpuOffload
from verl_mg.training.runner import Runner
from verl_mg.training.trainer import MiniBatch, Objective, Trainer

SIZES = {"gpu": {"hidden": 1024, "layers": 4, "ffn": 4096, "heads": 8}, "cpu": {"hidden": 64, "layers": 2}}
ALLOWED = 2**28  # bytes that kernels keep for themselves: workspaces, compiled code


@dataclass
class Offloaded:
    """Results on the rank.

    elements: of all weights; held: bytes of weights, optimizer state and gradients; free: bytes of the device that
    nobody has, before the role, with it, while it is on the host, and with it again; 0 on the CPU.
    """

    elements: int
    held: int
    free: list[int]
    same_weights: bool
    losses: list[float]


def trained_role(model: Path, backend: str, host: bool = False) -> tuple[Runner, Trainer]:
    """A model and its trainer; `host`: with `fsdp.cpu_offload`."""
    placement, config = Placement.on(Layout(), 1), OptimizerConfig(lr=1e-3)
    if backend == "megatron":
        runner = MegatronRunner(ModelSpec(model, torch.bfloat16), ParallelGroups(placement))
        return runner, MegatronTrainer(runner, config)
    module = FsdpRunner(ModelSpec(model, torch.bfloat16, fsdp=FsdpConfig(cpu_offload=host)), MeshGroups(placement))
    return module, FsdpTrainer(module, config)


def offloaded(model: Path, backend: str) -> Offloaded:
    """An update, the role to the host and back, another update."""
    free = [free_memory()]
    runner, trainer = trained_role(model, backend)
    rows = random_rows(6, read_config(model).vocab)
    scored = int((rows["loss_mask"] & (rows.positions > 0)).sum())

    def update() -> float:
        return trainer.update(MiniBatch([rows], None, scored, 0), Objective(token_loss, "token-mean", 1.0))["loss"]

    losses = [update()]
    offload = CpuOffload(runner, trainer)
    held = [*runner.weight_storages(), *trainer.state_storages()]
    held += trainer.gradient_storages()
    size = sum(storage.nbytes() for storage in held)
    weights = {name: weight.detach().cpu().clone() for name, weight in runner.parameters().items()}
    free.append(free_memory())
    offload.to_host()
    assert not any(storage.nbytes() for storage in held)
    free.append(free_memory())
    offload.to_device()
    free.append(free_memory())
    same = all(torch.equal(weight.cpu(), weights[name]) for name, weight in runner.parameters().items())
    elements = sum(weight.numel() for weight in weights.values())
    return Offloaded(elements, size, free, same, [*losses, update()])


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_offload_of_role_returns_its_memory_to_the_device(ranks, machine, tmp_path, backend):
    sizes = SIZES["gpu" if machine.gpus else "cpu"]
    model = make_tiny_model(tmp_path / "model", "qwen3", characters=CHARACTERS, **sizes)
    ((found),) = ranks.run(1, offloaded, model, backend)
    assert found.same_weights and found.losses[0] != found.losses[1]
    assert found.held >= 12 * found.elements  # a weight and two moments of float32 at least
    if machine.gpus:
        before, loaded, left, back = found.free
        assert found.held > 3 * ALLOWED
        assert before - loaded == pytest.approx(found.held, abs=ALLOWED)
        assert left - loaded == pytest.approx(found.held, abs=ALLOWED)
        assert left - back == pytest.approx(found.held, abs=ALLOWED)


@dataclass
class InHostMemory:
    """Bytes on the device that an offload of the role would move, and those that a step has taken of the device."""

    storages: int
    taken: int
    pinned: bool
    devices: set[str]


def in_host_memory(model: Path) -> InHostMemory:
    """An update with weights, gradients and moments in host memory."""
    before = free_memory()
    runner, trainer = trained_role(model, "fsdp", host=True)
    rows = random_rows(6, read_config(model).vocab)
    scored = int((rows["loss_mask"] & (rows.positions > 0)).sum())
    trainer.update(MiniBatch([rows, rows], None, scored, 0), Objective(token_loss, "token-mean", 1.0))
    parts = (runner.weight_storages(), trainer.state_storages(), trainer.gradient_storages())
    size = sum(storage.nbytes() for part in parts for storage in part)
    states = [value for state in trainer.optimizer.state.values() for value in state.values()]
    stored = [*runner.parameters().values(), *states]
    pinned = all(weight.is_pinned() for weight in runner.parameters().values())
    offload = CpuOffload(runner, trainer)
    offload.to_host()
    offload.to_device()
    served = {tensor.device.type for tensor in dict(runner.served_parameters()).values()}
    assert served == {device.current_device().type}
    trainer.update(MiniBatch([rows], None, scored, 0), Objective(token_loss, "token-mean", 1.0))
    return InHostMemory(size, before - free_memory(), pinned, {tensor.device.type for tensor in stored})


def test_weights_in_host_memory_take_none_of_the_device(ranks, machine, tmp_path):
    sizes = SIZES["gpu" if machine.gpus else "cpu"]
    model = make_tiny_model(tmp_path / "model", "qwen3", characters=CHARACTERS, **sizes)
    ((found),) = ranks.run(1, in_host_memory, model)
    assert found.devices == {"cpu"}
    if machine.gpus:
        assert found.storages < 2**20 and found.taken < ALLOWED and found.pinned
