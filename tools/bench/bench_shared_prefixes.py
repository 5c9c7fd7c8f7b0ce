"""Compares the seconds of an update in which shared prefixes are computed once, and in which rows are computed whole.

    python -m tools.bench.bench_shared_prefixes [--segments 2 4 8] [--prefix 512] [--suffix 64] [--rounds 5]
        [--threads 1]

A trajectory has segments that all begin with the same tokens, after which each has different ones. Both sides
train the same random model on the same rows in float32 on one rank, on the CPU or its GPU; they take turns, and the
figures are medians over the rounds after a warm-up. Gradient norms of both sides are compared, so that what is timed is
the same update. Rows are packed as in a job, for the budget of tokens of a micro-batch that is printed.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tools.bench.bench_update import MODELS, make_model
from verl_mg.algorithms.losses import clipped_policy_loss
from verl_mg.batch import Batch
from verl_mg.config import OptimizerConfig
from verl_mg.distributed.world import World
from verl_mg.layout import Layout, Placement
from verl_mg.layout.packing import pack
from verl_mg.layout.shared_prefixes import PrefixLinks, SharingRows, join_groups
from verl_mg.megatron.model_runner import MegatronRunner
from verl_mg.megatron.process_groups import ParallelGroups
from verl_mg.megatron.trainer import MegatronTrainer
from verl_mg.models.flops import RowFlops, key_share, row_flops
from verl_mg.roles.role import mark_shared
from verl_mg.training.loss_inputs import LossInputs
from verl_mg.training.model_spec import ModelSpec
from verl_mg.training.trainer import MiniBatch, Objective

ROWS = 16
"""Rows of an update."""


@dataclass(frozen=True)
class Side:
    """Micro-batches of an update, and what they compute."""

    micro_batches: list[Batch]
    """Rows of each micro-batch."""
    tokens: int
    """Tokens that are computed."""
    flops: float
    """FLOPs of a forward pass."""


def main() -> None:
    """Prints a line for each number of segments."""
    options = _options()
    World.join()  # takes all cores
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / options.model, *MODELS[options.model])
        groups = ParallelGroups(Placement(Layout.parse("tp1").fit(1), (0,)))
        runner = MegatronRunner(ModelSpec(model, torch.float32), groups)
    trainer = MegatronTrainer(runner, OptimizerConfig(lr=1e-12))
    print(
        f"{options.model}, {ROWS} rows of {options.prefix} shared and {options.suffix} other tokens, "
        f"micro-batches of up to {options.budget} tokens"
    )
    for segments in options.segments:
        _report(segments, runner, trainer, options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="dense")
    parser.add_argument("--segments", type=int, nargs="+", default=[2, 4, 8, 16], help="segments of a trajectory")
    parser.add_argument("--prefix", type=int, default=512, help="tokens that the segments share")
    parser.add_argument("--suffix", type=int, default=64, help="tokens of each segment after them")
    parser.add_argument("--budget", type=int, default=4096, help="tokens of a micro-batch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def _report(segments: int, runner: MegatronRunner, trainer: MegatronTrainer, options: argparse.Namespace) -> None:
    rows = _rows(segments, options.prefix, options.suffix, runner.table.config.vocab)
    length = options.prefix + options.suffix
    parents = [row // segments * segments for row in range(ROWS)]
    links = PrefixLinks([length] * ROWS, parents, [0 if row % segments == 0 else options.prefix for row in range(ROWS)])
    flops = row_flops(runner.table.config, runner.table.tensor_index)
    sides = {
        "whole": _side(rows, links, None, flops, 1.0, options.budget),
        "shared": _side(rows, links, links, flops, key_share(runner.table.config), options.budget),
    }
    rounds = [{name: _update(trainer, side) for name, side in sides.items()} for _ in range(options.rounds + 1)]
    differ = max(abs(pair["shared"][1] / pair["whole"][1] - 1) for pair in rounds)
    whole, shared = (statistics.median(pair[name][0] for pair in rounds[1:]) for name in sides)
    tokens, work = ([getattr(side, name) for side in sides.values()] for name in ("tokens", "flops"))
    print(
        f"{segments:3} segments: {tokens[1]:6} instead of {tokens[0]} tokens ({tokens[1] / tokens[0]:.2f}), "
        f"{work[1] / work[0]:.2f} of the FLOPs, {len(sides['shared'].micro_batches)} instead of "
        f"{len(sides['whole'].micro_batches)} micro-batches, {shared:.2f} instead of {whole:.2f} s of the CPU "
        f"({statistics.median(pair['shared'][0] / pair['whole'][0] for pair in rounds[1:]):.2f}); "
        f"gradient norms differ by at most {differ:.0e}",
        flush=True,
    )


def _rows(segments: int, prefix: int, suffix: int, vocab: int) -> Batch:
    draw = torch.Generator().manual_seed(0)
    prefixes = torch.randint(vocab, (ROWS // segments, prefix), generator=draw).repeat_interleave(segments, 0)
    tokens = torch.cat([prefixes, torch.randint(vocab, (ROWS, suffix), generator=draw)], dim=1)
    rows = Batch([prefix + suffix] * ROWS, {"tokens": tokens.flatten()})
    rows["loss_mask"] = rows.positions >= prefix
    rows["advantages"] = torch.randn(rows.total_tokens, generator=draw)
    return rows


def _side(
    rows: Batch, every: PrefixLinks, links: PrefixLinks | None, flops: RowFlops, share: float, budget: int
) -> Side:
    """Packs rows as a job does, with the prefixes of `links` computed once."""
    used = links or PrefixLinks(every.lengths, range(len(rows)), [0] * len(rows))
    groups: list[list[int]] = [[row] for row in range(len(rows))]
    units = join_groups(groups, used, lambda length, shared: length - shared + share * shared, flops, 1, budget)
    (steps,) = pack([unit.tokens for unit in units], [unit.cost for unit in units], 1, budget)
    micro_batches: list[Batch] = []
    tokens, work = 0, 0.0
    for step in steps:
        numbers = sorted(row for unit in step for row in units[unit].rows)
        shared = SharingRows.of(used, numbers).shared
        micro_batches.append(mark_shared(rows.select(numbers), numbers, shared))
        sizes: Sequence[tuple[int, int]] = [(used.lengths[row], shared.get(row, (row, 0))[1]) for row in numbers]
        tokens += sum(length - count for length, count in sizes)
        work += sum(flops(*size) for size in sizes)
    return Side(micro_batches, tokens, work)


def _update(trainer: MegatronTrainer, side: Side) -> tuple[float, float]:
    """Returns the seconds that the process computed, and the gradient norm."""

    def loss(tokens: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        old = tokens.logprobs.detach()
        return clipped_policy_loss(tokens.logprobs, old, tokens["advantages"], tokens.mask, 0.2, 0.2)

    scored = sum(int(micro["loss_mask"].sum()) for micro in side.micro_batches)
    begin = time.process_time()
    metrics = trainer.update(MiniBatch(side.micro_batches, None, scored, 0), Objective(loss, "token-mean", 1.0))
    return time.process_time() - begin, metrics["grad_norm"]


if __name__ == "__main__":
    main()
