"""The metrics of rollouts against loops over rows, with the rows spread over reports of ranks."""

import json
import math
from statistics import correlation, fmean

import pytest
import torch

from verl_mg.batch import SUPPORT_IDS, SUPPORT_SIZES, Batch
from verl_mg.monitor.metrics import mismatch_metrics, mismatch_statistics, rollout_metrics, rollout_sums

ROWS, VERSION = 11, 6
LONG_ROWS = {2: 1030, 5: 2100}  # of these lengths


def rows() -> Batch:
    """Rows of 2 to 9 tokens, and two long ones, with prompts of 1 or 2; the last row's answer is empty."""
    generator = torch.Generator().manual_seed(4)
    lengths = torch.randint(2, 10, (ROWS,), generator=generator)
    lengths[list(LONG_ROWS)] = torch.tensor(list(LONG_ROWS.values()))
    total = int(lengths.sum())
    batch = Batch(lengths, {"tokens": torch.randint(1, 9, (total,), generator=generator)})
    prompts = torch.randint(1, 3, (ROWS,), generator=generator)
    prompts[-1] = lengths[-1]
    batch["loss_mask"] = batch.positions >= batch.expand_to_tokens(prompts)
    rollout = torch.where(batch["loss_mask"], torch.rand(total, generator=generator).log(), 0)
    noise = torch.where(batch["loss_mask"], torch.randn(total, generator=generator) * 0.3, 0)
    batch["rollout_logprobs"], batch["old_logprobs"] = rollout, rollout + noise
    batch["reward"] = torch.randn(ROWS, generator=generator)
    versions = torch.randint(2, VERSION + 1, (total,), generator=generator)
    batch["policy_versions"] = torch.where(batch["loss_mask"], versions, -1)
    batch["truncated"] = torch.rand(ROWS, generator=generator) < 0.5
    batch[SUPPORT_SIZES] = torch.where(batch["loss_mask"], batch["tokens"], 0).int()
    batch[SUPPORT_IDS] = torch.arange(int(batch[SUPPORT_SIZES].sum()), dtype=torch.int32)
    return batch


def differences_by_depth(batch: Batch) -> dict[str, list[float]]:
    """Of each scored token, by its place in its row."""
    found: dict[str, list[float]] = {"0-1k": [], "1k-2k": [], "2k-4k": []}
    for row in range(ROWS):
        old, rollout, scored = (
            batch.row(name, row).tolist() for name in ("old_logprobs", "rollout_logprobs", "loss_mask")
        )
        for place, (a, b, is_scored) in enumerate(zip(old, rollout, scored, strict=True)):
            if is_scored:
                found["0-1k" if place < 1024 else "1k-2k" if place < 2048 else "2k-4k"].append(abs(a - b))
    return found


def by_hand() -> dict[str, float]:
    batch = rows()
    scored = batch["loss_mask"]
    old, rollout = (batch[name][scored].tolist() for name in ("old_logprobs", "rollout_logprobs"))
    lengths = [sum(batch.row("loss_mask", row).tolist()) for row in range(ROWS)]
    ages = [VERSION - version for version in batch["policy_versions"][scored].tolist()]
    differences = [a - b for a, b in zip(old, rollout, strict=True)]
    ratios = [math.exp(d) for d in differences]
    rewards = batch["reward"].tolist()
    return {
        "response/length": fmean(lengths),
        "response/truncated": fmean(batch["truncated"].tolist()),
        "response/samples": ROWS,
        "rollout/staleness": fmean(ages),
        "rollout/candidates": fmean(batch["tokens"][scored].tolist()),
        "reward/mean": fmean(rewards),
        "reward/std": math.sqrt(fmean((r - fmean(rewards)) ** 2 for r in rewards)),
        "mismatch/mean_abs": fmean(abs(d) for d in differences),
        "mismatch/max_abs": max(abs(d) for d in differences),
        "mismatch/mean_ratio": fmean(ratios),
        "mismatch/max_ratio": max(ratios),
        "mismatch/k1": fmean(-d for d in differences),
        "mismatch/k3": fmean(r - 1 - d for r, d in zip(ratios, differences, strict=True)),
        "mismatch/rollout_perplexity": math.exp(-fmean(rollout)),
        "mismatch/trainer_perplexity": math.exp(-fmean(old)),
        "mismatch/effective_samples": fmean(ratios) ** 2 / fmean(r * r for r in ratios),
        "mismatch/correlation": correlation([math.exp(x) for x in old], [math.exp(x) for x in rollout]),
        **{f"mismatch/by_depth/{name}": fmean(values) for name, values in differences_by_depth(batch).items()},
    }


def metrics(shares: list[list[list[int]]], names: tuple[str, ...] = ()) -> dict[str, float]:
    """shares[rank]: the rows of each of its batches, without the columns `names`."""
    kept = rows().select_columns(set(rows().names()) - set(names))
    of_ranks = [[kept.select(part) for part in share] for share in shares]
    sums = json.loads(json.dumps([rollout_sums(batches, VERSION) for batches in of_ranks]))
    return rollout_metrics(sums) | mismatch_metrics([mismatch_statistics(batches) for batches in of_ranks])


@pytest.mark.parametrize(
    "shares",
    [
        [[[*range(ROWS)]]],
        [[[10, 3], [0, 1, 2]], [[4, 5, 6, 7], [], [9, 8]]],
        [[[0, 2, 4, 6], [8, 10]], [[]], [[9, 7, 5], [3, 1]]],
        [[[10]], [], [[*range(10)]]],
    ],
)
def test_rollout_metrics_do_not_depend_on_the_distribution_of_rows(shares):
    expected, found = by_hand(), metrics(shares)
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected, rel=1e-6)


def test_rollout_metrics_without_samples_or_columns():
    assert metrics([[], [[]]]) == {}
    empty = metrics([[[ROWS - 1]]])
    assert empty["response/length"] == 0 and not [name for name in empty if name.startswith("mismatch")]
    found = metrics([[[0, 1]], [[2]]], ("old_logprobs", "reward", SUPPORT_SIZES, SUPPORT_IDS))
    assert found.keys() == {"response/length", "response/truncated", "response/samples", "rollout/staleness"}


def rows_of_trajectories() -> Batch:
    """Six trajectories of one to three rows, with equal rewards in each; the parts of reward are those of some."""
    batch, numbers = rows(), torch.tensor([0, 0, 0, 1, 2, 2, 3, 4, 4, 5, 5])
    batch["trajectory"], batch["sample_id"] = numbers, torch.arange(ROWS)
    batch["reward"] = numbers.float().sin()
    batch["truncated"] = (torch.arange(ROWS) == 1) | (torch.arange(ROWS) == 3)
    batch["reward.form"] = torch.where(numbers % 2 == 0, numbers.float(), torch.nan)
    batch["agent"] = (numbers == 2).long()
    return batch


@pytest.mark.parametrize("shares", [[[*range(ROWS)]], [[10, 3, 9], [2, 0, 1, 4, 5, 8, 7, 6]]])
def test_rollout_metrics_of_trajectories_count_each_once(shares):
    batch = rows_of_trajectories()
    members = [[row for row in range(ROWS) if batch["trajectory"][row] == number] for number in range(6)]
    tokens = [sum(int(batch.row("loss_mask", row).sum()) for row in part) for part in members]
    rewards = [math.sin(number) for number in range(6)]
    cut = [any(batch["truncated"][row] for row in part) for part in members]
    assert sum(cut) == 2
    sums = [rollout_sums([batch.select(share)], VERSION) for share in shares]
    found = rollout_metrics(sums, ("solver", "critic", "absent"))
    assert found["response/samples"] == 6 and found["response/length"] == pytest.approx(fmean(tokens))
    assert found["response/truncated"] == pytest.approx(sum(cut) / 6)
    assert found["reward/mean"] == pytest.approx(fmean(rewards), rel=1e-6)
    assert found["reward/std"] == pytest.approx(math.sqrt(fmean((r - fmean(rewards)) ** 2 for r in rewards)))
    assert found["reward/form"] == pytest.approx(2.0)
    of_solver = fmean(reward for number, reward in enumerate(rewards) if number != 2)
    assert found["reward/agent/solver"] == pytest.approx(of_solver, rel=1e-6)
    assert found["reward/agent/critic"] == pytest.approx(rewards[2], rel=1e-6)
    assert "reward/agent/absent" not in found
