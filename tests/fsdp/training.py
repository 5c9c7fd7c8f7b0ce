"""Two optimizer steps of the FSDP backend on this rank, in the form in which those of Megatron are compared."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode

from tests.megatron.training import OPTIMIZER, STEPS, TEMPERATURE, Trained, parts_of, update
from verl_mg.batch import Batch
from verl_mg.config import FsdpConfig
from verl_mg.fsdp.mesh import MeshGroups
from verl_mg.fsdp.model import local_part
from verl_mg.fsdp.model_runner import FsdpRunner
from verl_mg.fsdp.trainer import FsdpTrainer
from verl_mg.layout import Layout, Placement
from verl_mg.training.model_spec import ModelSpec


def train(
    model: Path,
    layout: str,
    replicas: int,
    rows: Batch,
    recompute: bool = False,
    options: FsdpConfig | None = None,
    dtype: torch.dtype = torch.float32,
) -> Trained:
    """Every rank is given all rows."""
    groups = MeshGroups(Placement.on(Layout.parse(layout), dist.get_world_size()), replicas)
    replays = "routed_experts" in rows
    spec = ModelSpec(model, dtype, recompute=recompute, replays_routing=replays, fsdp=options or FsdpConfig())
    runner = FsdpRunner(spec, groups)
    rows = rows.select_columns(rows.names())
    if replays:  # as ranks get them: for layers with experts only
        rows["routed_experts"] = rows["routed_experts"][:, sorted(runner.table.config.experts.layers)]
    at = groups.coordinates
    own = list(range(at.dp, len(rows), groups.layout.dp))
    last = at.dp == groups.layout.dp - 1 > 0
    share = [own, [], []] if last else [own[:-2], own[-2:-1], own[-1:]]  # uneven, and empty ones
    micro_batches = [rows.select(numbers) for numbers in share]
    outputs = _outputs(runner, micro_batches, share)
    trainer, gradients = FsdpTrainer(runner, OPTIMIZER), []
    step = trainer._step

    def seen() -> float:
        gradient = trainer._with_gradient
        shards = runner.trained_shards()
        named = {n: shards[n].described(local_part(gradient(p))) for n, p in trainer._parameters.items()}
        gradients.extend([] if gradients else parts_of(runner, named))
        return step()

    trainer._step = seen  # type: ignore[method-assign]
    metrics = [update(trainer, micro_batches, rows) for _ in range(STEPS)]
    norms, losses = ([of_step[name] for of_step in metrics] for name in ("grad_norm", "loss"))
    return Trained(outputs, gradients, parts_of(runner, runner.parameters()), norms, losses)


def gathers(model: Path, layout: str, rows: Batch, options: FsdpConfig) -> int:
    """All-gathers of an update with one micro-batch on this rank."""
    groups = MeshGroups(Placement.on(Layout.parse(layout), dist.get_world_size()))
    trainer = FsdpTrainer(FsdpRunner(ModelSpec(model, torch.float32, fsdp=options), groups), OPTIMIZER)
    own = rows.select(list(range(groups.coordinates.dp, len(rows), groups.layout.dp)))
    with CommDebugMode() as communication:
        update(trainer, [own], rows)
    return sum(count for name, count in communication.get_comm_counts().items() if "gather" in str(name))


def _outputs(runner: FsdpRunner, micro_batches: list[Batch], share: list[list[int]]) -> dict[int, Tensor]:
    def report(_: Any, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return output.sum(), {"output": output.detach().cpu().clone()}

    with torch.no_grad():
        reports = runner.run(micro_batches, TEMPERATURE, report, forward_only=True)
    found: dict[int, Tensor] = {}
    for of_micro, rows, numbers in zip(reports, micro_batches, share, strict=True):
        counts = [int(rows.row("loss_mask", i)[1:].sum()) for i in range(len(rows))]
        found |= dict(zip(numbers, of_micro["output"].split(counts, dim=1), strict=True))
    return found
