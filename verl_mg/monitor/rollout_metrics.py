"""Metrics of the rollouts of an iteration, over all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verl_mg.algorithms import mismatch
from verl_mg.algorithms.segments import segment_totals
from verl_mg.batch import Batch
from verl_mg.distributed.collectives import all_gather_json, sum_over_ranks


def rollout_metrics(batches: Sequence[Batch], version: int) -> dict[str, float]:
    """Computes means over all samples of all ranks; staleness in optimizer steps before `version`, which is trained."""
    sums = sum_over_ranks([_sums(batch, version) for batch in batches])
    if not sums.get("samples"):
        return {}
    samples = sums["samples"]
    metrics = {
        "response/length": sums["tokens"] / samples,
        "response/truncated": sums["truncated"] / samples,
        "response/samples": samples,
        "rollout/staleness": sums["staleness"] / max(sums["tokens"], 1.0),
    }
    if "reward" in sums:
        mean = sums["reward"] / samples
        metrics["reward/mean"] = mean
        metrics["reward/std"] = max(sums["reward_squared"] / samples - mean**2, 0.0) ** 0.5
    for name in sums:
        if name.startswith("reward."):
            # Not every reward has every part: the mean is over those that have it.
            metrics[f"reward/{name.removeprefix('reward.')}"] = sums[name] / max(sums[f"count.{name}"], 1.0)
    return metrics


def _sums(batch: Batch, version: int) -> dict[str, Tensor]:
    mask, samples = batch["loss_mask"], batch.one_per_trajectory()
    truncated = segment_totals(batch["truncated"], batch.trajectory_index)[batch.first_rows] > 0
    # In double precision, since the variance is a difference of two sums.
    sums = {
        "samples": torch.tensor(float(len(samples))),
        "tokens": mask.double().sum(),
        "truncated": truncated.double().sum(),
        "staleness": (version - batch["policy_versions"][mask]).double().sum(),
    }
    if "reward" in batch:
        reward = samples["reward"].double()
        sums |= {"reward": reward.sum(), "reward_squared": reward.square().sum()}
        for name in (name for name in batch.names() if name.startswith("reward.")):
            sums |= {name: samples[name].double().nansum(), f"count.{name}": (~samples[name].isnan()).sum()}
    return sums


def mismatch_metrics(batches: Sequence[Batch]) -> dict[str, float]:
    """Computes the difference of `old_logprobs` and `rollout_logprobs` over all ranks, which all call it."""
    parts = [
        mismatch.statistics(batch["old_logprobs"], batch["rollout_logprobs"], batch["loss_mask"])
        for batch in batches
        if "old_logprobs" in batch and batch["old_logprobs"] is not batch["rollout_logprobs"]
    ]
    whole = mismatch.merge(all_gather_json(mismatch.merge(parts)))
    return {f"mismatch/{name}": value for name, value in mismatch.summarize(whole).items()}
