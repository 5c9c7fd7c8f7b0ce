"""Plans of the FSDP backend against real runs of it: bytes of what a rank stores, and of its collectives."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.rank_pool import RankPool
from tests.helpers.tiny_models import random_rows
from tests.megatron.layout_models import make_model
from tests.megatron.training import OPTIMIZER, token_loss
from verl_mg.batch import Batch
from verl_mg.config import FsdpConfig
from verl_mg.fsdp.mesh import MeshGroups
from verl_mg.fsdp.model_runner import ModuleRunner
from verl_mg.fsdp.trainer import ModuleTrainer
from verl_mg.layout import Layout, Placement
from verl_mg.models.hf_config import read_config
from verl_mg.planner.inputs import OPTIMIZER_STATES, PlanInputs
from verl_mg.planner.memory import micro_batch_bytes, sharded_module, train_memory
from verl_mg.planner.training_options import fsdp_options
from verl_mg.sharding.module_table import module_table

CASES = [
    ("dense", "dp2", FsdpConfig()),
    ("mixture", "dp4", FsdpConfig(replicas=2)),
]
NIGHTLY_CASES = [
    ("dense", "dp4", FsdpConfig(reshard_after_forward=False)),
    ("mixture", "dp2", FsdpConfig()),
    ("mixture", "dp4", FsdpConfig()),
    ("mixture", "tp2-dp2", FsdpConfig()),
    ("dense", "cp2-dp2", FsdpConfig()),
    ("tied", "dp4", FsdpConfig(replicas=2)),
    ("latent", "dp2", FsdpConfig()),
]
MICRO_BATCHES = 2


class Collectives(TorchDispatchMode):
    """Counts the bytes of collectives by name and size of their group: outputs of gathers, inputs of all others."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace == "c10d" and name in ("_allgather_base_", "_reduce_scatter_base_", "allreduce_"):
            group = next(dist.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject))
            tensors = {"_allgather_base_": args[:1], "_reduce_scatter_base_": args[1:2]}.get(name, args[0])
            self.bytes[name, group.size()] += sum(tensor.nbytes for tensor in tensors)
        return func(*args, **(kwargs or {}))


@dataclass
class Run:
    """Bytes of a role's memory on this rank, and of the collectives of inference and of an update."""

    weights: int
    gradients: int
    moments: int
    inference: Counter[tuple[str, int]] = field(default_factory=Counter)
    update: Counter[tuple[str, int]] = field(default_factory=Counter)


def run(model: Path, layout: str, options: FsdpConfig, rows: Batch) -> Run:
    """Two micro-batches in bfloat16, whose weights are gathered in it."""
    groups = MeshGroups(Placement.on(Layout.parse(layout), dist.get_world_size()), options.replicas)
    runner = ModuleRunner(model, groups, torch.bfloat16, options=options)
    micro_batches = [rows] * MICRO_BATCHES
    with Collectives() as inference:
        runner.infer(micro_batches, 1.0)
    trainer = ModuleTrainer(runner, OPTIMIZER)
    scored = int((rows["loss_mask"] & (rows.positions > 0)).sum())
    with Collectives() as update:
        trainer.update(micro_batches, 1.0, token_loss, "token-mean", scored, scored)
    found = (runner.weight_storages(), trainer.gradient_storages(), trainer.state_storages())
    return Run(*(sum(storage.nbytes() for storage in part) for part in found), inference.bytes, update.bytes)


def planned(model: Path, ranks: int, options: FsdpConfig, **fields: Any) -> PlanInputs:
    return PlanInputs(module_table(model), ranks, options=fsdp_options(options, "bfloat16"), **fields)


@pytest.mark.parametrize(
    ("name", "layout", "options"), [*CASES, *(pytest.param(*case, marks=pytest.mark.nightly) for case in NIGHTLY_CASES)]
)
def test_plan_equals_bytes_of_a_run(
    ranks: RankPool, tmp_path: Path, name: str, layout: str, options: FsdpConfig
) -> None:
    model, count = make_model(tmp_path / "model", name), 2 if layout == "dp2" else 4
    inputs, fitted = planned(model, count, options), Layout.parse(layout).fit(count)
    parts = {part: size for part, (size,) in train_memory(inputs, fitted).parts.items()}
    runs = ranks.run(count, run, model, layout, options, random_rows(6, read_config(model).vocab))
    assert {found.weights for found in runs} == {parts["weights"]}
    assert {found.gradients for found in runs} == {parts["gradients"]}
    # Adam's moments have no padding: the first rank, whose parts are whole, has the most.
    assert runs[0].moments == parts[OPTIMIZER_STATES] == max(found.moments for found in runs)
    sharding, module = fitted.dp * fitted.cp // options.replicas, sharded_module(inputs, fitted)
    assert module.sharding == sharding
    update, inference = micro_batch_bytes(inputs, fitted), micro_batch_bytes(inputs, fitted, trains=False)
    for found in runs:
        assert found.update["_allgather_base_", sharding] == MICRO_BATCHES * update.gathered
        assert found.update["_reduce_scatter_base_", sharding] == MICRO_BATCHES * update.reduced
        if options.replicas > 1:
            assert found.update["allreduce_", options.replicas] == MICRO_BATCHES * update.replicated > 0
        # What is not freed after its pass stays gathered until the last micro-batch.
        repeated = inference.gathered - 2 * sharding * module.rest.sharded if options.reshard_after_forward else 0
        assert found.inference["_allgather_base_", sharding] == inference.gathered + (MICRO_BATCHES - 1) * repeated
