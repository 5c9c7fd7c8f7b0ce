"""Two optimizer steps under any layout, the same in plain torch over `transformers`, and how they are compared.

The loss has parts of each kind: of a token, of its entropy, and of a whole sequence.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from tests.helpers.roles import megatron_runner
from tests.helpers.tiny_models import oracle_outputs, unstacked
from verl_mg.batch import Batch
from verl_mg.config import MegatronConfig, OptimizerConfig, Recompute
from verl_mg.layout import Layout
from verl_mg.megatron.model_runner import MegatronRunner
from verl_mg.megatron.trainer import MegatronTrainer
from verl_mg.roles.models import TrainableRole
from verl_mg.sharding.boxes import Box, slices
from verl_mg.sharding.megatron import Kernels
from verl_mg.sharding.weight_table import Head
from verl_mg.training.loss_inputs import LossInputs
from verl_mg.training.microbatch import MicroBatch
from verl_mg.training.trainer import MiniBatch, Objective, TokenLoss, Trainer

ROUTER_BIAS = "e_score_correction_bias"  # a buffer
INDEXER = ".indexer."  # without gradients
TEMPERATURE, STEPS = 0.8, 2
# A large eps makes Adam's step proportional to small gradients, so that weights compare like gradients do.
OPTIMIZER = OptimizerConfig(lr=0.02, eps=0.1, betas=(0.9, 0.99), clip_grad=0.5, weight_decay=0.0)

Parts = list[tuple[str, Box, Tensor]]
"""(tensor of the checkpoint, box in it, values there), replicas included."""


@dataclass(frozen=True)
class Trained:
    """Results of one rank.

    outputs: {row: (2 + vocab, scored)} log-probs, entropies and logits, or (1, scored) values, where
    the rank has outputs.
    """

    outputs: dict[int, Tensor]
    gradients: Parts
    weights: Parts
    norms: list[float]
    losses: list[float]


@dataclass(frozen=True)
class Expected:
    """The same of the whole model. outputs: of each row, with logits or without."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    norms: list[float]
    losses: list[float]

    def idle(self) -> set[str]:
        """The tensors without a gradient."""
        return {name for name, gradient in self.gradients.items() if not gradient.any()}


def token_loss(tokens: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Of each scored token; a sequence's log-prob enters through every one of them. Of values: their squares."""
    if len(tokens.output) == 1:
        return (tokens.values - 5 * tokens["noise"]) ** 2, {}
    rows = int(tokens.sequence_ids.max()) + 1 if len(tokens.sequence_ids) else 0
    whole = tokens.logprobs.new_zeros(rows).index_add(0, tokens.sequence_ids, tokens.logprobs)[tokens.sequence_ids]
    return _loss(tokens.logprobs, tokens.entropy, whole, tokens["advantages"]), {}


def _loss(logprobs: Tensor, entropy: Tensor, whole: Tensor, advantages: Tensor) -> Tensor:
    return 0.01 * whole**2 - advantages * logprobs - 0.1 * entropy


def update(
    trainer: Trainer,
    micro_batches: list[Batch],
    rows: Batch,
    loss: TokenLoss = token_loss,
    temperature: float = TEMPERATURE,
) -> dict[str, float]:
    """An update on the rows of all ranks, of which the micro-batches are this rank's."""
    scored = int((rows["loss_mask"] & (rows.positions > 0)).sum())
    return trainer.update(MiniBatch(micro_batches, None, scored, 0), Objective(loss, "token-mean", temperature))


def train(
    model: Path,
    layout: str | Layout,
    rows: Batch,
    recompute: Recompute = False,
    head: Head = "language",
    hidden_offset: int = 1,
    dtype: torch.dtype = torch.float32,
    megatron: MegatronConfig | None = None,
    kernels: Kernels = "torch",
    optimizer: OptimizerConfig = OPTIMIZER,
) -> Trained:
    """On this rank and its device; every rank is given all rows."""
    sizes = Layout.parse(layout) if isinstance(layout, str) else layout
    options = {"recompute": recompute, "head": head, "hidden_offset": hidden_offset, "kernels": kernels}
    runner = megatron_runner(model, sizes, dtype, megatron=megatron or MegatronConfig(), **options)
    assert_built(runner, sizes.fit(dist.get_world_size()), recompute)
    share = _deal(len(rows), runner.layout.dp, runner.groups.coordinates.dp)
    local = _with_choices_of_stage(rows, runner)
    micro_batches = [local.select(numbers) for numbers in share]
    outputs = _outputs(runner, micro_batches, share)
    trainer = MegatronTrainer(runner, optimizer)
    gradients = recorded_gradients(trainer)
    seen_by = [update(trainer, micro_batches, rows) for _ in range(STEPS)]
    norms, losses = ([metrics[name] for metrics in seen_by] for name in ("grad_norm", "loss"))
    return Trained(outputs, gradients[0], parts_of(runner, runner.parameters()), norms, losses)


def _with_choices_of_stage(rows: Batch, runner: MegatronRunner) -> Batch:
    """The rows as the ranks of a pipeline stage get them: with the prescribed experts and keys of its layers only."""
    local = rows.select_columns(rows.names())
    layers = runner.stage(runner.groups.coordinates.pp).layers
    if "selected_keys" in rows:
        selecting = sorted(set(runner.table.config.indexer.sources))
        here = [number for number, layer in enumerate(selecting) if layer in layers]
        local["selected_keys"] = rows["selected_keys"][:, here]
    if "routed_experts" in rows:
        experts = [layer for layer in layers if layer in runner.table.config.experts.layers]
        local["routed_experts"] = rows["routed_experts"][:, experts]
    return local


def assert_built(runner: MegatronRunner, layout: Layout, recompute: Recompute) -> None:
    """The network, its groups and its modules are really those of the layout."""
    assert runner.layout == layout
    groups = runner.groups.collection
    sizes = (groups.tp, groups.pp, groups.cp, groups.dp, groups.dp_cp, groups.ep, groups.expt_tp, groups.expt_dp)
    assert [group.size() for group in sizes] == [
        *(layout.tp, layout.pp, layout.cp, layout.dp, layout.dp * layout.cp, layout.ep, layout.etp, layout.edp)
    ]
    at = runner.groups.coordinates
    layers = [list(layout.layers(runner.table.config.layers, at.pp, chunk)) for chunk in range(layout.vpp)]
    assert [[layer.layer_number - 1 for layer in chunk.decoder.layers] for chunk in runner.chunks] == layers
    for chunk in runner.chunks:
        assert chunk.config.sequence_parallel == (layout.tp > 1)
        granularity = "selective" if isinstance(recompute, list) else "full" if recompute else None
        assert chunk.config.recompute_granularity == granularity


def _deal(rows: int, ranks: int, rank: int) -> list[list[int]]:
    """Three micro-batches a rank, uneven ones; of several ranks the last one's second and third are empty."""
    own = list(range(rank, rows, ranks))
    return [own, [], []] if rank == ranks - 1 > 0 else [own[:-2], own[-2:-1], own[-1:]]


def _outputs(runner: MegatronRunner, micro_batches: list[Batch], share: list[list[int]]) -> dict[int, Tensor]:
    logits = _watch_logits(runner)

    def report(micro: MicroBatch, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return output.sum(), {"output": torch.cat([output, *logits]).to("cpu", copy=True)}

    with torch.no_grad():
        reports = runner.run(micro_batches, TEMPERATURE, report, forward_only=True)
    runner.chunks[-1].__dict__.pop("_logprobs", None)
    found: dict[int, Tensor] = {}
    for report, rows, numbers in zip(reports, micro_batches, share, strict=bool(reports)):
        counts = [int(rows.row("loss_mask", i)[1:].sum()) for i in range(len(rows))]
        found |= dict(zip(numbers, report["output"].split(counts, dim=1), strict=True))
    return found


def _watch_logits(runner: MegatronRunner) -> list[Tensor]:
    """A list that holds, after the last stage's forward pass, the (vocab, n) logits of the scored tokens."""
    chunk, groups, found = runner.chunks[-1], runner.groups.collection, []
    if not chunk.post_process or chunk.has_value_head:
        return found
    logprobs = chunk._logprobs

    def watched(hidden: Tensor, micro: MicroBatch, *options: Any) -> Tensor:
        shard = chunk.output_weight() @ chunk.gather_sequence(hidden)[micro.hidden_index].T
        parts = [torch.empty_like(shard) for _ in range(groups.tp.size())]
        dist.all_gather(parts, shard, group=groups.tp)
        own = torch.cat(parts)[: runner.table.config.vocab]
        whole = own.new_zeros(len(own), len(micro.token_index)).index_copy(1, micro.local_index, own)
        dist.all_reduce(whole, group=groups.cp)
        found[:] = [whole]
        return logprobs(hidden, micro, *options)

    chunk._logprobs = watched
    return found


def gradients_here(runner: MegatronRunner) -> Parts:
    """Whole, as the optimizer will take them: the distributed one has left each rank a shard of every buffer."""
    for model in runner.model_chunks:
        for bucket_group in [*model.bucket_groups, *model.expert_parallel_bucket_groups]:
            group = bucket_group.intra_distributed_optimizer_instance_group
            for bucket in bucket_group.buckets:
                shards = list(bucket.grad_data.chunk(group.size()))
                dist.all_gather(shards, shards[group.rank()].clone(), group=group)
    trained = {name: weight for name, weight in runner.parameters().items() if weight.requires_grad}
    return parts_of(runner, {name: weight.main_grad for name, weight in trained.items()})


def recorded_gradients(trainer: MegatronTrainer) -> list[Parts]:
    """A list that grows by the gradients of all weights with each step of the trainer."""
    # The closure does not keep the trainer: the model refers to the optimizer.
    recorded, step, runner = [], trainer.optimizer.step, trainer.runner

    def recording() -> tuple[bool, float, int]:
        recorded.append(gradients_here(runner))
        return step()

    trainer.optimizer.step = recording
    return recorded


def parts_of(runner: MegatronRunner, values: dict[str, Tensor]) -> Parts:
    shards = runner.shard_map().shards(dist.get_rank())
    return [
        (piece.tensor, piece.source, values[name][slices(piece.target)].detach().to("cpu", copy=True))
        for name, shard in shards.items()
        if name in values
        for piece in shard.pieces
    ]


def train_in_plain_torch(model: torch.nn.Module, rows: Batch, folder: Path) -> Expected:
    """Serial and unpacked. The module writes its tensors to `folder`: so they come back as checkpoints name them."""
    net = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(
        net.parameters(), lr=OPTIMIZER.lr, eps=OPTIMIZER.eps, betas=OPTIMIZER.betas, weight_decay=0.0
    )
    outputs, gradients, norms, seen = [], {}, [], []
    for step in range(STEPS):
        logprobs, entropy = oracle_outputs(net, rows, TEMPERATURE)
        scored = rows["loss_mask"] & (rows.positions > 0)
        per_row = [
            torch.stack([column[keep] for column in (lp, h)])
            for lp, h, keep in zip(*(c.split(rows.lengths.tolist()) for c in (logprobs, entropy, scored)), strict=True)
        ]
        losses = [
            _loss(lp, h, lp.sum(), rows.row("advantages", i)[rows.row("loss_mask", i)])
            for i, (lp, h) in enumerate(per_row)
        ]
        optimizer.zero_grad()
        loss = torch.cat(losses).sum() / scored.sum()
        loss.backward()
        seen.append(loss.item())
        if step == 0:
            outputs = [output.detach() for output in per_row]
            gradients = _as_checkpoint(net, _gradient, folder / "gradients")
            gradients = {name: x for name, x in gradients.items() if not name.endswith(ROUTER_BIAS)}
            gradients = {name: x for name, x in gradients.items() if INDEXER not in name}
        norms.append(torch.nn.utils.clip_grad_norm_(net.parameters(), OPTIMIZER.clip_grad).item())
        optimizer.step()
    return Expected(outputs, gradients, _as_checkpoint(net, lambda weight: weight, folder / "weights"), norms, seen)


def _gradient(weight: Tensor) -> Tensor:
    return torch.zeros_like(weight) if weight.grad is None else weight.grad


def _as_checkpoint(net: torch.nn.Module, values: Callable[[Tensor], Tensor], folder: Path) -> dict[str, Tensor]:
    filled = copy.deepcopy(net)
    with torch.no_grad():
        for of, weight in zip(filled.parameters(), net.parameters(), strict=True):
            of.copy_(values(weight))
    filled.save_pretrained(folder)
    return unstacked(load_file(folder / "model.safetensors"))


def uneven_micro_batches(runner: MegatronRunner, batch: Batch) -> list[Batch]:
    """This rank's rows of a batch: in two micro-batches, and a third one without rows."""
    own = list(range(runner.groups.coordinates.dp, len(batch), runner.layout.dp))
    return [batch.select(own[:-2]), batch.select(own[-2:]), batch.select([])]


def zero_loss(tokens: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """A recipe's loss beside which only those of layers have gradients."""
    return tokens.logprobs * 0, {}


def restored(stopped: TrainableRole, build: Callable[..., TrainableRole]) -> TrainableRole:
    """A role that is built for a checkpoint of another one, and restored from it."""
    stored = {part.key: part.values.clone() for part in stopped.parts()}
    role = build(from_checkpoint=True)
    role.load(lambda part: part.values.copy_(stored[part.key]), stopped.counts())
    assert not role.runner.unrestored
    return role


def one_rank(trained: Trained) -> Expected:
    """What a single rank saw, as the measure of many."""
    outputs = [trained.outputs[row] for row in sorted(trained.outputs)]
    return Expected(outputs, assembled(trained.gradients), assembled(trained.weights), trained.norms, trained.losses)


def assembled(parts: Parts) -> dict[str, Tensor]:
    sizes: dict[str, list[int]] = {}
    for name, box, _ in parts:
        known = sizes.get(name, [0] * len(box))
        sizes[name] = [max(size, stop) for size, (_, stop) in zip(known, box, strict=True)]
    whole = {name: torch.full(size, torch.nan) for name, size in sizes.items()}
    for name, box, values in parts:
        whole[name][slices(box)] = values.reshape(whole[name][slices(box)].shape)
    return whole


def assert_logprobs_near(error: Tensor) -> None:
    """Asserts that absolute errors of log-probs are of the size that bfloat16 gives: (T,).

    The largest one has no bound: where two experts are nearly as likely, rounding chooses the other one for a token.
    """
    assert error.median() < 0.03 and error.mean() < 0.06


def assert_equal(results: list[Trained], expected: Expected, tolerance: float) -> None:
    """Outputs of each kind, every copy of every gradient and weight on every rank relative to the largest; losses."""
    for result in results:
        assert (result.norms, result.losses) == (results[0].norms, results[0].losses)
        for norm, wanted in zip(result.norms, expected.norms, strict=True):
            assert abs(norm - wanted) < tolerance * wanted and wanted > OPTIMIZER.clip_grad
        assert result.losses == pytest.approx(expected.losses, rel=tolerance)
    _assert_outputs_equal(results, expected, tolerance)
    for parts, wanted in (("gradients", expected.gradients), ("weights", expected.weights)):
        found = [part for result in results for part in getattr(result, parts)]
        assert {name for name, _, _ in found} == set(wanted)
        assert_parts_near(found, wanted, tolerance, 0.0)


def assert_parts_near(parts: Parts, wanted: dict[str, Tensor], tolerance: float, least: float = 1e-8) -> None:
    """Errors are bounded by a part of the tensor's largest value; `least` where it may be 0."""
    for name, box, values in parts:
        largest, expected = wanted[name].abs().max(), wanted[name][slices(box)]
        error = (values.reshape(expected.shape) - expected).abs().max()
        assert error <= tolerance * largest + least, f"{name} {box} is {error / largest:.1e} of the largest off"


def _assert_outputs_equal(results: list[Trained], expected: Expected, tolerance: float) -> None:
    """Each row is the output of one rank."""
    assert {row for result in results for row in result.outputs} == set(range(len(expected.outputs)))
    largest = torch.cat(expected.outputs, dim=1).abs().amax(dim=1, keepdim=True)
    if len(largest) > 2:  # logits are of one kind
        largest[2:] = largest[2:].max()
    for result in results:
        for row, output in result.outputs.items():
            error = ((output[: len(largest)] - expected.outputs[row]).abs() / largest).max()
            assert error <= tolerance, f"outputs of row {row} are {error:.1e} of the largest off"


def assert_near(results: Sequence[Trained], wanted: Expected) -> None:
    """Log-probs differ by the rounding of bfloat16, and so does the direction of the gradient."""
    outputs = {row: output for result in results for row, output in result.outputs.items()}
    assert outputs.keys() == set(range(len(wanted.outputs)))
    error = torch.cat([(outputs[row][0] - output[0]).abs() for row, output in enumerate(wanted.outputs)])
    assert_logprobs_near(error)
    found = assembled([part for result in results for part in result.gradients])
    pairs = [(found[name].flatten(), gradient.flatten()) for name, gradient in wanted.gradients.items()]
    ours, theirs = (torch.cat(side) for side in zip(*pairs, strict=True))
    assert torch.cosine_similarity(ours, theirs, dim=0) > 0.97
    assert all(result.norms[0] == pytest.approx(wanted.norms[0], rel=0.1) for result in results)
