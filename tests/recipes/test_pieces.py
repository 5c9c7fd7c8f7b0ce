"""What recipes are made of: penalties, DAPO's refill, PF-PPO's draw, on scripted rollouts over real ranks."""

from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from recipes import dapo, pf_ppo
from recipes.common import sampling
from recipes.common.penalties import regularized, scores, steered, token_scores
from tests.recipes.tiny_runs import tiny_run
from verl_mg.algorithms.kl import adapted
from verl_mg.batch import Batch
from verl_mg.distributed import collectives
from verl_mg.megatron.microbatch import LossInputs

COEFFICIENT = 0.5


def judged() -> Batch:
    """Two rows with one token of prompt; the reference finds the others 1, 2 and 3 nats less likely than the policy."""
    batch = Batch.from_rows([(5, 6, 7), (5, 8)])
    batch["loss_mask"] = torch.tensor([False, True, True, False, True])
    batch["old_logprobs"] = torch.tensor([9.0, -1.0, -1.0, 9.0, -1.0])
    batch["ref_logprobs"] = torch.tensor([0.0, -2.0, -3.0, 0.0, -4.0])
    batch["reward"] = torch.tensor([1.0, -1.0])
    return batch


def config(**fields: object) -> sampling.Config:
    return sampling.Config(kl_kind="k1", **fields)


def test_a_penalty_in_the_reward_is_taken_off_each_token():
    cfg = config(kl_coefficient=COEFFICIENT, kl_in="reward")
    rewards, mask = token_scores(judged(), cfg)
    assert mask.tolist() == [[False, True, True], [False, True, False]]
    assert rewards.tolist() == [[0.0, -0.5, 1.0 - 1.0], [0.0, -1.0 - 1.5, 0.0]]
    assert scores(judged(), cfg).tolist() == [-0.5, -2.5]


@pytest.mark.parametrize("fields", [{}, {"kl_coefficient": COEFFICIENT, "kl_in": "loss"}])
def test_a_penalty_in_the_loss_leaves_the_reward(fields):
    assert scores(judged(), config(**fields)).tolist() == [1.0, -1.0]
    assert token_scores(judged(), config(**fields))[0].tolist() == [[0.0, 0.0, 1.0], [0.0, -1.0, 0.0]]


@pytest.mark.parametrize(("place", "weight"), [("loss", COEFFICIENT), ("reward", 0.0)])
def test_a_penalty_stands_in_the_loss_or_in_the_reward_and_never_in_both(place, weight):
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    columns = {"ref_logprobs": torch.tensor([-2.0, -4.0])}
    tokens = LossInputs(logprobs[None], torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64), columns)
    loss, metrics = regularized((torch.ones(2), {}), tokens, config(kl_coefficient=COEFFICIENT, kl_in=place))
    assert loss.tolist() == [1 + weight * 1, 1 + weight * 3]
    assert ("kl" in metrics) == (place == "loss")


class Deaf:
    """A role that may not be asked."""

    def compute_logprobs(self, batch: Batch) -> torch.Tensor:
        raise AssertionError("was asked")


def test_without_a_penalty_the_reference_is_not_asked():
    job = SimpleNamespace(actor=SimpleNamespace(compute_logprobs=lambda batch: batch["old_logprobs"]), reference=Deaf())
    sampling.judge(job, config(), judged())
    with pytest.raises(AssertionError, match="was asked"):
        sampling.judge(job, config(kl_coefficient=COEFFICIENT), judged())


def test_a_coefficient_is_steered_towards_its_target(ranks, tasks, tmp_path):
    overrides = ["algorithm.prompts_per_iteration=8", "algorithm.group_size=4", "job.iterations=10", "job.save=false"]
    horizon, target = 64, 0.02
    steering = ["kl_coefficient=0.1", f"kl_target={target}", f"kl_horizon={horizon}"]
    lines = tiny_run(ranks, "grpo", tasks(0), tmp_path / "run", [*overrides, *(f"algorithm.{s}" for s in steering)])
    pairs = [(line["kl/coefficient"], line["kl/observed"]) for line in lines]
    # The policy begins at the reference and leaves it: the coefficient falls, then rises.
    assert pairs[0] == (0.1, 0.0) and max(observed for _, observed in pairs) > target
    for (coefficient, observed), (following, _) in pairwise(pairs):
        assert following == pytest.approx(adapted(coefficient, observed, target, horizon, 32))
        assert (following > coefficient) == (observed > target)


def test_the_coefficient_of_the_configuration_holds_until_one_is_known():
    job = SimpleNamespace(state={})
    steering = config(kl_coefficient=0.3, kl_target=0.1)
    assert steered(job, steering).kl_coefficient == 0.3
    job.state["kl_coefficient"] = 0.7
    assert steered(job, steering).kl_coefficient == 0.7
    # What an earlier start of the run has steered is none of one that does not steer.
    assert steered(job, config(kl_coefficient=0.3)).kl_coefficient == 0.3
    assert steered(job, config(kl_target=0.1)).kl_coefficient == 0


# DAPO: groups of two samples, by round, and whether each has a difference to learn from.
ROUNDS = [(True, False, False), (False, False, False), (True, True, True), (True, True, True)]


class Scripted:
    """A rollout that deals the groups of a round to the ranks in turn."""

    unfinished = 0
    drawing = False

    def __init__(self) -> None:
        self.rounds = 0

    def begin(self, prompts: list[int], samples: int, keep: int, ahead: bool) -> None:
        assert (len(prompts), samples, keep, ahead) == (3, 2, 3, False)

    def finish(self) -> Batch:
        groups = [(6 * self.rounds + 2 * i, differs) for i, differs in enumerate(ROUNDS[self.rounds])]
        mine = groups[dist.get_rank() :: dist.get_world_size()]
        self.rounds += 1
        batch = Batch.from_rows([(1, 2)] * (2 * len(mine)))
        batch["sample_id"] = torch.tensor([g + i for g, _ in mine for i in (0, 1)], dtype=torch.int64)
        batch["group"] = torch.tensor([g for g, _ in mine for _ in (0, 1)], dtype=torch.int64)
        batch["reward"] = torch.tensor([float(i and differs) for _, differs in mine for i in (0, 1)])
        if self.rounds == 2:
            batch["reward.seen_in_this_round_alone"] = batch["reward"].clone()
        return batch


def refilled(rounds: int) -> tuple[list[tuple[int, int]], dict[str, float]]:
    rollout = Scripted()
    job = SimpleNamespace(
        prompts=SimpleNamespace(take=lambda count: list(range(count))),
        rollout=rollout,
        reward=lambda batch: batch["reward"],
        all_gather_column=collectives.all_gather_column,
    )
    cfg = dapo.Config(prompts_per_iteration=3, group_size=2, rounds=rounds)
    batch, told = dapo.sample_informative(job, cfg)
    assert told["dapo/rounds"] == rollout.rounds
    return list(zip(batch["group"].tolist(), batch["sample_id"].tolist(), strict=True)), told


@pytest.mark.parametrize("count", [1, 2, 3])
def test_dapo_refills_until_it_has_the_first_groups_with_a_difference(ranks, count):
    found = ranks.run(count, refilled, 10)
    assert all(told == {"dapo/rounds": 3.0, "dapo/groups": 3.0} for _, told in found)
    # The third round has three such groups, and the last of them is one too many.
    rows = sorted(row for rows, _ in found for row in rows)
    assert rows == [(group, group + i) for group in (0, 12, 14) for i in (0, 1)]
    # Samples of a group stay together on one rank.
    holders = [{group for group, _ in rows} for rows, _ in found]
    assert sum(len(held) for held in holders) == 3


def test_dapo_goes_on_with_what_it_has_after_its_last_round(ranks):
    found = ranks.run(2, refilled, 2)
    assert all(told == {"dapo/rounds": 2.0, "dapo/groups": 1.0} for _, told in found)
    assert sorted(row for rows, _ in found for row in rows) == [(0, 0), (0, 1)]


ROWS, ITERATIONS = 12, 3


def replay(resampling: str) -> list[tuple[list[int], int]]:
    """Of each iteration the rows that this rank drew, by what they were sampled as, and the size of its pool."""
    job = SimpleNamespace(
        iteration=0,
        state={},
        config=SimpleNamespace(job=SimpleNamespace(seed=4)),
        all_gather_column=collectives.all_gather_column,
        reassign_sample_ids=collectives.reassign_sample_ids,
    )
    cfg, found = pf_ppo.Config(replay=2, resampling=resampling), []
    for job.iteration in range(1, ITERATIONS + 1):
        mine = torch.arange(dist.get_rank(), ROWS, dist.get_world_size()) + ROWS * job.iteration
        batch = Batch.from_rows([(1, 2)] * len(mine))
        batch["sample_id"] = mine
        batch["reward"] = (mine % 5).float()
        if job.iteration == 1:
            batch["reward.seen_in_this_iteration_alone"] = batch["reward"].clone()
        pool = pf_ppo.replayed(job, batch, cfg)
        named = pool.select(torch.arange(len(pool)))
        named["written_as"] = pool["sample_id"]
        batch = pf_ppo.drawn(job, named, ROWS, cfg)
        assert collectives.all_gather_column(batch, "sample_id").tolist() == list(range(ROWS))
        found.append((batch["written_as"].tolist(), len(pool)))
    return found


@pytest.mark.parametrize("resampling", ["max_min", "pow"])
def test_pf_ppo_draws_the_same_on_any_number_of_ranks(ranks, resampling):
    def whole(count: int) -> list[tuple[list[int], int]]:
        told = ranks.run(count, partial(replay, resampling))
        drawn = [sorted(row for own in told for row in own[i][0]) for i in range(ITERATIONS)]
        return list(zip(drawn, [sum(own[i][1] for own in told) for i in range(ITERATIONS)], strict=True))

    (alone,) = (whole(1),)
    assert [size for _, size in alone] == [ROWS, 2 * ROWS, 2 * ROWS]
    for rows, _ in alone:
        assert len(rows) == ROWS
        # The highest of the rewards 0 to 4, and with max_min the lowest; with pow never a reward of 0.
        assert {row % 5 for row in rows} <= ({0, 4} if resampling == "max_min" else {1, 2, 3, 4})
    assert any(row < 2 * ROWS for row in alone[1][0])
    for count in (2, 3):
        assert whole(count) == alone
