"""Recipes that sample in rounds or draw from a buffer, on ranks with scripted rollouts: DAPO, PRIME, PF-PPO."""

import io
import logging
import re
import statistics

import pytest
import torch.distributed as dist

from tests.recipes.scripted_job import ScriptedJob, rows
from verl_mg.batch import Batch
from verl_mg.distributed import collectives
from verl_mg.job import job as running_job
from verl_mg.recipes import dapo, pf_ppo, prime

# DAPO: groups of two samples, by round, and whether each has rewards that differ.
ROUNDS = [(True, False, False), (False, False, False), (True, True, True), (True, True, True)]


def dapo_round(round_: int) -> Batch:
    """This rank's rows of a round, whose groups are distributed over the ranks in turn."""
    groups = [(6 * round_ + 2 * i, differs) for i, differs in enumerate(ROUNDS[round_])]
    mine = groups[dist.get_rank() :: dist.get_world_size()]
    return rows(
        [g + i for g, _ in mine for i in (0, 1)],
        [g for g, _ in mine for _ in (0, 1)],
        [float(i and differs) for _, differs in mine for i in (0, 1)],
    )


def run_dapo(max_rounds: int | None, first_round: int = 0) -> tuple[list[tuple[int, int]], dict[str, float], str]:
    """Groups and samples that this rank trains on, the metrics, and what it says."""
    job = ScriptedJob(lambda round_: dapo_round(first_round + round_))
    cfg = dapo.Config(prompts_per_iteration=3, group_size=2, max_sampling_rounds=max_rounds)
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    logging.getLogger(running_job.__name__).addHandler(handler)
    try:
        metrics = dapo.iteration(job, cfg)
    finally:
        logging.getLogger(running_job.__name__).removeHandler(handler)
    assert metrics["dapo/rounds"] == job.rounds and job.requested_prompts == [3] * job.rounds
    (batch,) = job.actor.batches
    return list(zip(batch["group"].tolist(), batch["sample_id"].tolist(), strict=True)), metrics, said.getvalue()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_dapo_with_equal_rewards_samples_until_enough_groups_differ(ranks, count):
    results = ranks.run(count, run_dapo, None if count == 2 else 10)
    assert all(metrics == {"dapo/rounds": 3.0, "dapo/groups": 3.0} for _, metrics, _ in results)
    assert not any(said for _, _, said in results)
    # The third round has three such groups, and the last of them is one too many.
    trained = sorted(row for rows_, _, _ in results for row in rows_)
    assert trained == [(group, group + i) for group in (0, 12, 14) for i in (0, 1)]
    # Samples of a group stay together on one rank.
    assert sum(len({group for group, _ in rows_}) for rows_, _, _ in results) == 3


@pytest.mark.parametrize(
    ("arguments", "groups", "trained", "said"),
    [
        ((2,), 1.0, [(0, 0), (0, 1)], "1 of 3 groups have rewards that differ .*; its update has only these"),
        ((1, 1), 0.0, [], "0 of 3 groups .*; its update has no sample and leaves the policy as it is"),
    ],
)
def test_dapo_after_the_last_round_trains_on_the_groups_so_far_and_says_so_once(
    ranks, arguments, groups, trained, said
):
    (_, metrics, first), (_, others, second) = results = ranks.run(2, run_dapo, *arguments)
    assert metrics == others == {"dapo/rounds": float(arguments[0]), "dapo/groups": groups}
    assert sorted(row for rows_, _, _ in results for row in rows_) == trained
    assert re.fullmatch(rf"scripted: {said}\. Look at reward/mean .*\n", first) and second == ""


def run_prime() -> tuple[list[int], dict[str, float], list[str], list[str]]:
    """Groups of the rows that this rank trains on, the metrics, and calls of the process reward model either way."""
    calls = []
    for order in ("before", "after"):
        job = ScriptedJob(dapo_round)
        cfg = prime.Config(
            prompts_per_iteration=3, group_size=2, accuracy_low=0.2, accuracy_high=0.8, process_update=order
        )
        metrics = prime.iteration(job, cfg)
        calls.append(job.process_reward.calls)
    return job.actor.batches[0]["group"].tolist(), metrics, *calls


@pytest.mark.parametrize("count", [1, 2])
def test_prime_samples_until_enough_prompts_have_an_accuracy_in_the_band(ranks, count):
    results = ranks.run(count, run_prime)
    # A group with rewards 0 and 1 has accuracy 0.5.
    assert sorted(group for groups, *_ in results for group in groups) == [0, 0, 12, 12, 14, 14]
    for _, metrics, before, after in results:
        assert metrics["prime/rounds"] == 3.0 and metrics["prime/groups"] == 3.0
        assert before == ["update", "compute_logprobs"] and after == ["compute_logprobs", "update"]


def run_prime_with_process_rewards() -> list[dict[int, float]]:
    """This rank's advantages by sample, where rewards rise with the sample: plain, bounded, whitened."""
    found = []
    for options in ({}, {"bound_process": True}, {"whiten": True}):
        job = ScriptedJob(dapo_round)
        job.process_reward.compute_logprobs = lambda batch: batch.expand_to_tokens(batch["sample_id"]) * 2.0 - 1.0
        prime.iteration(job, prime.Config(prompts_per_iteration=3, group_size=2, accuracy_low=0.2, **options))
        (batch,) = job.actor.batches
        advantages = batch["advantages"][batch["loss_mask"]].tolist()
        found.append(dict(zip(batch["sample_id"].tolist(), advantages, strict=True)))
    return found


@pytest.mark.parametrize("count", [1, 2])
def test_prime_bounds_process_rewards_and_whitens_over_all_ranks(ranks, count):
    results = ranks.run(count, run_prime_with_process_rewards)
    plain, bounded, whitened = ({k: v for found in results for k, v in found[i].items()} for i in range(3))
    pairs = [(0, 1), (12, 13), (14, 15)]
    assert sorted(plain) == [sample for pair in pairs for sample in pair]
    for low, high in pairs:
        # beta 0.05, log-ratio 2 for each sample number; the largest reward is that of sample 15.
        outcome = plain[high] - 0.1
        assert abs(outcome) == pytest.approx(1.0) and plain[low] == pytest.approx(-plain[high])
        assert bounded[high] == pytest.approx(0.1 / 1.5 + outcome, rel=1e-5)
        assert bounded[low] == pytest.approx(-bounded[high])
    deviation = statistics.stdev(plain.values())
    assert whitened == pytest.approx({sample: value / deviation for sample, value in plain.items()}, rel=1e-5)


ROWS, GROUP, ITERATIONS = 12, 4, 3


def pf_ppo_round(round_: int) -> Batch:
    """This rank's groups of four rows, in turn, with rewards 0 to 4."""
    groups = range(ROWS * round_, ROWS * (round_ + 1), GROUP)[dist.get_rank() :: dist.get_world_size()]
    mine = [group + i for group in groups for i in range(GROUP)]
    batch = rows(mine, [row - row % GROUP for row in mine], [float(i % 5) for i in mine])
    batch["sampled_as"] = batch["sample_id"].clone()
    return batch


def run_pf_ppo(resampling: str) -> list[tuple[list[int], int]]:
    """For each iteration the samples that this rank drew, and the size of its buffer: two rounds, but for two rows."""
    job, ranked = ScriptedJob(pf_ppo_round), resampling.startswith("best")
    sizes = {"buffer_samples": 2 * ROWS - 2, "draws_per_prompt": 2 if ranked else None, "group_size": GROUP}
    cfg, results = pf_ppo.Config(**sizes, resampling=resampling), []
    for job.iteration in range(1, ITERATIONS + 1):
        pf_ppo.iteration(job, cfg)
        batch, buffer = job.actor.batches[-1], job.state["response_buffer"]
        drawn = ROWS // GROUP * 2 if ranked else ROWS
        assert collectives.all_gather_column(batch, "sample_id").tolist() == list(range(drawn))
        results.append((batch["sampled_as"].tolist(), len(buffer)))
    return results


def drawable(resampling: str) -> set[int]:
    """Rows of all rounds that can be drawn, by their rewards: 0 to 4 again and again."""
    if resampling == "best_worst":
        groups = [range(first, first + GROUP) for first in range(0, ROWS * ITERATIONS, GROUP)]
        return {pick(group, key=lambda row: row % 5) for group in groups for pick in (min, max)}
    kept = {"max_min": {0, 4}, "pow": {1, 2, 3, 4}}[resampling]
    return {row for row in range(ROWS * ITERATIONS) if row % 5 in kept}


@pytest.mark.parametrize("resampling", ["max_min", "pow", "best_worst"])
def test_pf_ppo_on_any_number_of_ranks_draws_the_same_samples(ranks, resampling):
    def gathered(count: int) -> list[tuple[list[int], int]]:
        results = ranks.run(count, run_pf_ppo, resampling)
        return [
            (sorted(row for rank in results for row in rank[i][0]), sum(rank[i][1] for rank in results))
            for i in range(ITERATIONS)
        ]

    alone = gathered(1)
    # The buffer has whole groups: not two of the four rows that would be too many.
    assert [size for _, size in alone] == [ROWS, 2 * ROWS - GROUP, 2 * ROWS - GROUP]
    for drawn, _ in alone:
        assert set(drawn) <= drawable(resampling)
    assert any(row < ROWS for row in alone[1][0])
    for count in (2, 3):
        assert gathered(count) == alone
