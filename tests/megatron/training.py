"""Two optimizer steps under any layout, the same in plain torch over `transformers`, and how they are compared.

The loss has parts of each kind: of a token, of its entropy, and of a whole sequence.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from tests.tiny_models import oracle_outputs
from verl_mg.batch import Batch
from verl_mg.config import OptimizerConfig
from verl_mg.layout import Layout, Placement
from verl_mg.megatron.groups import ParallelGroups
from verl_mg.megatron.microbatch import LossTokens
from verl_mg.megatron.network import Network
from verl_mg.megatron.trainer import Trainer
from verl_mg.weights.boxes import Box, slices

TEMPERATURE, STEPS = 0.8, 2
# A large eps makes Adam's step proportional to small gradients, so that weights compare like gradients do.
OPTIMIZER = OptimizerConfig(lr=0.02, eps=0.1, betas=(0.9, 0.99), clip_grad=0.5, weight_decay=0.0)

Parts = list[tuple[str, Box, Tensor]]
"""(tensor of the checkpoint, box in it, values there), replicas included."""


@dataclass(frozen=True)
class Trained:
    """What one rank saw. outputs: {row: (2, judged)}, log-probs and entropies, where the rank speaks."""

    outputs: dict[int, Tensor]
    gradients: Parts
    weights: Parts
    norms: list[float]


@dataclass(frozen=True)
class Expected:
    """The same of the whole model. outputs: (2, judged) of each row."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    norms: list[float]

    def idle(self) -> set[str]:
        """The tensors without a gradient."""
        return {name for name, gradient in self.gradients.items() if not gradient.any()}


def token_loss(tokens: LossTokens) -> tuple[Tensor, dict[str, Tensor]]:
    """Of each judged token; a sequence's log-prob enters through every one of them."""
    rows = int(tokens.sequence_ids.max()) + 1 if len(tokens.sequence_ids) else 0
    whole = tokens.logprobs.new_zeros(rows).index_add(0, tokens.sequence_ids, tokens.logprobs)[tokens.sequence_ids]
    return _loss(tokens.logprobs, tokens.entropy, whole, tokens["advantages"]), {}


def _loss(logprobs: Tensor, entropy: Tensor, whole: Tensor, advantages: Tensor) -> Tensor:
    return 0.01 * whole**2 - advantages * logprobs - 0.1 * entropy


def train(model: Path, layout: str, rows: Batch, recompute: bool = False) -> Trained:
    """On this rank; every rank is given all rows."""
    groups = ParallelGroups(Placement.on(Layout.parse(layout), dist.get_world_size()))
    network = Network(model, groups, torch.float32, recompute)
    share = _deal(len(rows), groups.layout.dp, groups.coordinates.dp)
    micro_batches = [rows.select(numbers) for numbers in share]
    outputs = _outputs(network, micro_batches, share)
    trainer = Trainer(network, OPTIMIZER)
    gradients: Parts = []
    step = trainer.optimizer.step

    def seen() -> tuple[bool, float, int]:
        gradients.extend([] if gradients else gradients_here(network))
        return step()

    trainer.optimizer.step = seen
    judged = int((rows["loss_mask"] & (rows.positions > 0)).sum())
    norms = [
        trainer.update(micro_batches, TEMPERATURE, token_loss, "token-mean", judged, judged)["grad_norm"]
        for _ in range(STEPS)
    ]
    return Trained(outputs, gradients, _parts(network, network.parameters()), norms)


def _deal(rows: int, ranks: int, rank: int) -> list[list[int]]:
    """Two micro-batches a rank, uneven ones; of several ranks the last one's second is empty."""
    own = list(range(rank, rows, ranks))
    return [own, []] if rank == ranks - 1 > 0 else [own[:-1], own[-1:]]


def _outputs(network: Network, micro_batches: list[Batch], share: list[list[int]]) -> dict[int, Tensor]:
    with torch.no_grad():
        reports = network.run(
            micro_batches, TEMPERATURE, lambda micro, output: (output.sum(), {"output": output}), forward_only=True
        )
    found: dict[int, Tensor] = {}
    for report, rows, numbers in zip(reports, micro_batches, share, strict=bool(reports)):
        counts = [int(rows.row("loss_mask", i)[1:].sum()) for i in range(len(rows))]
        found |= dict(zip(numbers, report["output"].split(counts, dim=1), strict=True))
    return found


def gradients_here(network: Network) -> Parts:
    """Whole, as the optimizer will take them: the distributed one has left each rank a shard of every buffer."""
    for model in network.runnable:
        for bucket_group in [*model.bucket_groups, *model.expert_parallel_bucket_groups]:
            group = bucket_group.intra_distributed_optimizer_instance_group
            for bucket in bucket_group.buckets:
                shards = list(bucket.grad_data.chunk(group.size()))
                dist.all_gather(shards, shards[group.rank()].clone(), group=group)
    return _parts(network, {name: weight.main_grad for name, weight in network.parameters().items()})


def _parts(network: Network, values: dict[str, Tensor]) -> Parts:
    shards = network.holdings().shards(dist.get_rank())
    return [
        (piece.tensor, piece.source, values[name][slices(piece.target)].detach().clone())
        for name, shard in shards.items()
        for piece in shard.pieces
    ]


def train_in_plain_torch(model: torch.nn.Module, rows: Batch, folder: Path) -> Expected:
    """Serial and unpacked. The module writes its tensors to `folder`: so they come back as checkpoints name them."""
    net = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(
        net.parameters(), lr=OPTIMIZER.lr, eps=OPTIMIZER.eps, betas=OPTIMIZER.betas, weight_decay=0.0
    )
    outputs, gradients, norms = [], {}, []
    for step in range(STEPS):
        logprobs, entropy = oracle_outputs(net, rows, TEMPERATURE)
        judged = rows["loss_mask"] & (rows.positions > 0)
        per_row = [
            torch.stack([column[keep] for column in (lp, h)])
            for lp, h, keep in zip(*(c.split(rows.lengths.tolist()) for c in (logprobs, entropy, judged)), strict=True)
        ]
        losses = [
            _loss(lp, h, lp.sum(), rows.row("advantages", i)[rows.row("loss_mask", i)])
            for i, (lp, h) in enumerate(per_row)
        ]
        optimizer.zero_grad()
        (torch.cat(losses).sum() / judged.sum()).backward()
        if step == 0:
            outputs = [output.detach() for output in per_row]
            gradients = _as_checkpoint(net, lambda weight: weight.grad, folder / "gradients")
        norms.append(torch.nn.utils.clip_grad_norm_(net.parameters(), OPTIMIZER.clip_grad).item())
        optimizer.step()
    return Expected(outputs, gradients, _as_checkpoint(net, lambda weight: weight, folder / "weights"), norms)


def _as_checkpoint(net: torch.nn.Module, values: Callable[[Tensor], Tensor], folder: Path) -> dict[str, Tensor]:
    filled = copy.deepcopy(net)
    with torch.no_grad():
        for of, weight in zip(filled.parameters(), net.parameters(), strict=True):
            of.copy_(values(weight))
    filled.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def one_rank(trained: Trained) -> Expected:
    """What a single rank saw, as the measure of many."""
    outputs = [trained.outputs[row] for row in sorted(trained.outputs)]
    return Expected(outputs, assembled(trained.gradients), assembled(trained.weights), trained.norms)


def assembled(parts: Parts) -> dict[str, Tensor]:
    sizes: dict[str, list[int]] = {}
    for name, box, _ in parts:
        known = sizes.get(name, [0] * len(box))
        sizes[name] = [max(size, stop) for size, (_, stop) in zip(known, box, strict=True)]
    whole = {name: torch.full(size, torch.nan) for name, size in sizes.items()}
    for name, box, values in parts:
        whole[name][slices(box)] = values.reshape(whole[name][slices(box)].shape)
    return whole


def assert_equal(results: list[Trained], expected: Expected, tolerance: float) -> None:
    """Outputs to 1e-4; every copy of every gradient and weight on every rank relative to the largest of its tensor."""
    outputs = {row: output for result in results for row, output in result.outputs.items()}
    assert sorted(outputs) == list(range(len(expected.outputs)))
    for row, wanted in enumerate(expected.outputs):
        assert (outputs[row] - wanted).abs().max() < 1e-4, f"row {row}"
    for norms in (result.norms for result in results):
        assert norms == results[0].norms
        for norm, wanted in zip(norms, expected.norms, strict=True):
            assert abs(norm - wanted) < tolerance * wanted and wanted > OPTIMIZER.clip_grad
    for parts, wanted in (("gradients", expected.gradients), ("weights", expected.weights)):
        found = [part for result in results for part in getattr(result, parts)]
        assert {name for name, _, _ in found} == set(wanted)
        for name, box, values in found:
            largest = wanted[name].abs().max()
            error = (values.reshape(wanted[name][slices(box)].shape) - wanted[name][slices(box)]).abs().max()
            assert error <= tolerance * largest, f"{parts}: {name} {box} is {error / largest:.1e} of the largest off"
