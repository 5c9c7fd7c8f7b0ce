"""Advantages and corrections of recipes for samples in segments, against loops over whole trajectories.

Each token of a sample is trained in one segment, and further segments repeat it as context. Rows are in any order, and
groups on any rank.
"""

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import fmean, stdev, variance
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.recipes.scripted_job import ScriptedJob, ScriptedRole
from verl_mg.batch import Batch, ColumnKind
from verl_mg.engines.trajectory import MAX_SEGMENTS, NOT_GENERATED
from verl_mg.recipes import dapo, dr_grpo, gdpo, gpg, grpo, maxrl, opo, ppo, prime, reinforce_plus_plus, rloo, vapo

SEEDS, LIMIT, KL = range(4), 8, 0.1
GAMMA, LAM = 0.9, 0.8


@dataclass(frozen=True)
class Whole:
    """A sample as one sequence."""

    id: int
    group: int
    reward: float
    truncated: bool
    prompt: list[int]
    response: list[tuple[int, bool]]
    """Tokens, and whether the policy wrote them."""

    @property
    def trained(self) -> list[int]:
        return [token for token, written in self.response if written]


def column(name: str, token: int) -> float:
    """A number for each of the tokens, which are all different."""
    return random.Random(f"{name} {token}").gauss(0, 1) * {"old": 1, "ref": 1, "rollout": 0.2}.get(name, 0.7)


def old(token: int) -> float:
    return column("old", token) - 2


def wholes(seed: int) -> list[Whole]:
    draw, tokens = random.Random(seed), iter(range(10**6))
    samples = []
    for group in (0, 4, 8):
        for i in range(4):
            response = [(next(tokens), True), *((next(tokens), draw.random() < 0.7) for _ in range(draw.randrange(9)))]
            samples.append(
                Whole(
                    group + i,
                    group,
                    draw.choice([0.0, 1.0, 2.5]) if group else 1.0 + (i == 0),
                    draw.random() < 0.3,
                    [next(tokens) for _ in range(1 + group // 4)],
                    response,
                )
            )
    return samples


def part(sample: Whole) -> float:
    """A further reward."""
    return float(len(sample.response) > 4)


def rows_of(sample: Whole, draw: random.Random) -> list[dict[str, Any]]:
    """Segments: what the first trains, the next repeat. A segment begins its part with a token of the policy."""
    starts = [place for place, (_, written) in enumerate(sample.response) if written and place]
    cuts = [0, *sorted(draw.sample(starts, draw.randrange(min(len(starts), 3) + 1))), len(sample.response)]
    rows = []
    for number in range(len(cuts) - 1):
        begin, end = cuts[number], cuts[number + 1]
        response = [(token, written and place >= begin) for place, (token, written) in enumerate(sample.response[:end])]
        rows.append(
            {
                "tokens": [*sample.prompt, *(token for token, _ in response)],
                "mask": [*[False] * len(sample.prompt), *(written for _, written in response)],
                "trajectory": sample.id,
                "sample_id": sample.id * MAX_SEGMENTS + number,
                "group": sample.group,
                "prompt_length": len(sample.prompt) + begin,
                "scripted_reward": sample.reward,
                "reward.long": part(sample),
                "truncated": sample.truncated and number == len(cuts) - 2,
            }
        )
    return rows


def batch_of(seed: int) -> Batch:
    """This rank's rows, shuffled."""
    draw = random.Random(100 + seed)
    owner = {group: draw.randrange(2) for group in (0, 4, 8)}
    rows = [row for sample in wholes(seed) for row in rows_of(sample, draw)]
    assert len(rows) > len(wholes(seed))
    rows = [row for row in rows if owner[row["group"]] % dist.get_world_size() == dist.get_rank()]
    draw.shuffle(rows)
    batch = Batch.from_rows(row["tokens"] for row in rows)
    batch["loss_mask"] = torch.tensor([flag for row in rows for flag in row["mask"]], dtype=torch.bool)
    for name in ("trajectory", "sample_id", "group", "prompt_length", "scripted_reward", "reward.long", "truncated"):
        values = torch.tensor([row[name] for row in rows], dtype=None if rows else torch.int64)
        batch.put(name, values, ColumnKind.SEQUENCE)
    batch.put("reward.right", batch["scripted_reward"].float(), ColumnKind.SEQUENCE)
    batch["prefix_of"] = batch["sample_id"].clone()
    batch["policy_versions"] = torch.where(batch["loss_mask"], 3, NOT_GENERATED)
    batch["rollout_logprobs"] = of_tokens(batch, lambda token: old(token) + column("rollout", token))
    return batch


def of_tokens(batch: Batch, function: Callable[[int], float]) -> torch.Tensor:
    values = torch.tensor([function(token) for token in batch["tokens"].tolist()])
    return torch.where(batch["loss_mask"], values, 0.0)


class TokenRole(ScriptedRole):
    """A role whose outputs depend on the token alone."""

    def __init__(self, function: Callable[[int], float], metrics: dict[str, float] | None = None) -> None:
        super().__init__(metrics)
        self.function = function

    def compute_logprobs(self, batch: Batch) -> torch.Tensor:
        return of_tokens(batch, self.function)

    compute_values = compute_logprobs


Table = dict[tuple[int, int], float]
"""Values by trajectory and token."""


def run(recipe: Any, tree: dict[str, Any], seed: int) -> tuple[dict[str, Table], dict[str, float]]:
    """Columns of the batch that was trained on, by trajectory and token, and the metrics."""
    job = ScriptedJob(lambda round_: batch_of(seed))
    job.config.rollout.max_new_tokens = LIMIT
    job.actor, job.reference = TokenRole(old), TokenRole(lambda token: column("ref", token) - 2)
    job.critic = TokenRole(lambda token: column("value", token), job.critic.update(Batch([])))
    job.process_reward = TokenRole(lambda token: column("process", token))
    job.prompts = SimpleNamespace(next_batch=lambda count: [None] * count)
    metrics = recipe.iteration(job, recipe.Config.model_validate(tree | {"prompts_per_iteration": 3}))
    (batch,) = job.actor.batches
    keys = list(zip(batch.expand_to_tokens(batch["trajectory"]).tolist(), batch["tokens"].tolist(), strict=True))
    names = [name for name in ("advantages", "returns", "correction", "right") if name in batch]
    columns = {}
    for name in names:
        chosen = zip(keys, batch[name].tolist(), batch["loss_mask"].tolist(), strict=True)
        columns[name] = {key: value for key, value, scored in chosen if scored}
        assert len(columns[name]) == int(batch["loss_mask"].sum())
        assert not batch[name][~batch["loss_mask"]].any()
    return columns, metrics


# -- loops over whole trajectories


def k1(token: int) -> float:
    return old(token) - (column("ref", token) - 2)


def scores(samples: Iterable[Whole], coefficient: float) -> dict[int, float]:
    return {s.id: s.reward - coefficient * sum(map(k1, s.trained)) for s in samples}


def spread(samples: Iterable[Whole], values: dict[int, float]) -> Table:
    return {(sample.id, token): values[sample.id] for sample in samples for token in sample.trained}


def in_groups(samples: list[Whole], value: Callable[[Whole, list[Whole]], float]) -> dict[int, float]:
    """A value of each sample and of all samples of its group."""
    groups = defaultdict(list)
    for sample in samples:
        groups[sample.group].append(sample)
    return {sample.id: value(sample, groups[sample.group]) for sample in samples}


def relative_values(samples: list[Whole], score: dict[int, float], deviation: bool) -> dict[int, float]:
    def value(s: Whole, group: list[Whole]) -> float:
        of_group = [score[other.id] for other in group]
        return (score[s.id] - fmean(of_group)) / (stdev(of_group) + 1e-6 if deviation else 1.0)

    return in_groups(samples, value)


def relative(samples: list[Whole], coefficient: float = 0.0, deviation: bool = True) -> Table:
    return spread(samples, relative_values(samples, scores(samples, coefficient), deviation))


def maximum_likelihood(samples: list[Whole]) -> Table:
    def value(s: Whole, group: list[Whole]) -> float:
        mean = fmean(other.reward for other in group)
        return (s.reward - mean) / mean if mean else 0.0

    return spread(samples, in_groups(samples, value))


def decoupled(samples: list[Whole]) -> Table:
    right = relative_values(samples, scores(samples, 0.0), True)
    long = relative_values(samples, {s.id: part(s) for s in samples}, True)
    return spread(samples, white({i: right[i] + 0.5 * long[i] for i in right}))


def leave_one_out(samples: list[Whole], score: dict[int, float]) -> dict[int, float]:
    return in_groups(samples, lambda s, group: score[s.id] - fmean(score[o.id] for o in group if o is not s))


def optimal_baseline(samples: list[Whole]) -> Table:
    score = scores(samples, KL)

    def value(s: Whole, group: list[Whole]) -> float:
        weights = {other.id: len(other.trained) for other in group}
        return score[s.id] - sum(weights[i] * score[i] for i in weights) / sum(weights.values())

    return spread(samples, in_groups(samples, value))


def informative_only(samples: list[Whole]) -> list[Whole]:
    differs = in_groups(samples, lambda s, group: len({other.reward for other in group}) > 1)
    return [s for s in samples if differs[s.id]]


def gradient_of_all(samples: list[Whole]) -> Table:
    factor = len(samples) / len(informative_only(samples))
    return {key: value * factor for key, value in relative(samples, deviation=False).items()}


def overlong(samples: list[Whole]) -> Table:
    chosen = []
    for s in informative_only(samples):
        penalty = min(max((LIMIT - 4 - len(s.trained)) / 4, -1), 0)
        chosen.append(Whole(s.id, s.group, s.reward + penalty, s.truncated, s.prompt, s.response))
    kept = {s.id for s in chosen if not s.truncated}
    return {key: value for key, value in relative(chosen).items() if key[0] in kept}


def episodes(samples: list[Whole], lam: Callable[[Whole], float]) -> tuple[Table, Table]:
    """Advantages and returns of GAE, with penalties in the rewards and the score on the last token."""
    advantages, returns = {}, {}
    for s in samples:
        following = advantage = 0.0
        for place, token in reversed(list(enumerate(s.trained))):
            reward = (s.reward if place == len(s.trained) - 1 else 0.0) - KL * k1(token)
            value = column("value", token)
            advantage = reward + GAMMA * following - value + GAMMA * lam(s) * advantage
            following = value
            advantages[s.id, token], returns[s.id, token] = advantage, advantage + value
    return advantages, returns


def white(table: dict[Any, float]) -> dict[Any, float]:
    mean, deviation = fmean(table.values()), math.sqrt(variance(table.values()) + 1e-8)
    return {key: (value - mean) / deviation for key, value in table.items()}


def discounted(samples: list[Whole]) -> Table:
    table = {}
    for s in samples:
        ahead = 0.0
        for place, token in reversed(list(enumerate(s.trained))):
            ahead = (s.reward if place == len(s.trained) - 1 else 0.0) - KL * k1(token) + GAMMA * ahead
            table[s.id, token] = ahead
    return white(table)


def implicit(samples: list[Whole]) -> Table:
    reward = {t: 0.05 * (column("process", t) - (column("ref", t) - 2)) for s in samples for t in s.trained}
    means = {s.id: fmean(reward[t] for t in s.trained) for s in samples}
    outcome, table = leave_one_out(samples, scores(samples, 0.0)), {}
    peers = leave_one_out(samples, means)
    for s in samples:
        ahead = 0.0
        for token in reversed(s.trained):
            ahead = reward[token] - (means[s.id] - peers[s.id]) + GAMMA * ahead
            table[s.id, token] = ahead + outcome[s.id]
    return table


def right_weights(samples: list[Whole]) -> Table:
    tokens = [(s, token) for s in samples for token in s.trained]
    right = sum(s.reward > 0 for s, _ in tokens)
    return {(s.id, token): (s.reward > 0) * len(tokens) / right for s, token in tokens}


def corrections(samples: list[Whole], geometric: bool, rejects: bool) -> Table:
    weights = {}
    for s in samples:
        differences = [-column("rollout", token) for token in s.trained]
        ratio = math.exp(fmean(differences) if geometric else sum(differences))
        weights[s.id] = float(0.8 <= ratio <= 1.2) if rejects else min(ratio, 1.2)
    return spread(samples, weights)


def with_mean_1(samples: list[Whole], weights: Table) -> Table:
    mean = fmean(weights[s.id, s.trained[0]] for s in samples)
    return {key: weight / mean for key, weight in weights.items()}


IN_REWARD = {"kl": {"coefficient": KL, "placement": "reward", "estimator": "k1"}}
STEPS = {"gamma": GAMMA}
CASES: dict[str, tuple[Any, dict[str, Any], Callable[[list[Whole]], dict[str, Table]]]] = {
    "grpo": (grpo, {}, lambda s: {"advantages": relative(s)}),
    "grpo, penalty in the reward": (grpo, IN_REWARD, lambda s: {"advantages": relative(s, KL)}),
    "grpo, sequence correction": (
        grpo,
        {"off_policy": {"weight": "sequence", "high": 1.2}},
        lambda s: {"correction": corrections(s, geometric=False, rejects=False)},
    ),
    "grpo, geometric rejection": (
        grpo,
        {"off_policy": {"rejection": {"sequence-mean-k1": [0.8, 1.2]}}},
        lambda s: {"correction": corrections(s, geometric=True, rejects=True)},
    ),
    "grpo, weights of sequences with mean 1": (
        grpo,
        {"off_policy": {"weight": "sequence", "high": 1.2, "normalize": True}},
        lambda s: {"correction": with_mean_1(s, corrections(s, geometric=False, rejects=False))},
    ),
    "dr_grpo": (dr_grpo, IN_REWARD, lambda s: {"advantages": relative(s, KL, deviation=False)}),
    "rloo": (rloo, IN_REWARD, lambda s: {"advantages": spread(s, leave_one_out(s, scores(s, KL)))}),
    "opo": (opo, IN_REWARD, lambda s: {"advantages": optimal_baseline(s)}),
    "maxrl": (maxrl, {}, lambda s: {"advantages": maximum_likelihood(s)}),
    "gdpo": (gdpo, {"rewards": {"right": 1.0, "long": 0.5}}, lambda s: {"advantages": decoupled(s)}),
    "gpg": (gpg, {}, lambda s: {"advantages": gradient_of_all(s)}),
    "dapo": (
        dapo,
        {"overlong_buffer": 4, "overlong_filter": True, "max_sampling_rounds": 1},
        lambda s: {"advantages": overlong(s)},
    ),
    "reinforce_plus_plus": (reinforce_plus_plus, IN_REWARD | STEPS, lambda s: {"advantages": discounted(s)}),
    "ppo": (
        ppo,
        IN_REWARD | STEPS | {"lam": LAM, "critic_lam": 0.5, "critic_warmup": 0},
        lambda s: {"advantages": white(episodes(s, lambda _: LAM)[0]), "returns": episodes(s, lambda _: 0.5)[1]},
    ),
    "vapo": (
        vapo,
        IN_REWARD | STEPS | {"lam_alpha": 0.5, "critic_lam": 1.0, "critic_warmup": 0},
        lambda s: {
            "advantages": white(episodes(s, lambda whole: max(0.0, 1 - 2 / len(whole.trained)))[0]),
            "right": right_weights(s),
        },
    ),
    "prime": (prime, {"gamma": GAMMA}, lambda s: {"advantages": implicit(s)}),
}


def everything(name: str) -> list[tuple[dict[str, Table], dict[str, float]]]:
    recipe, tree, _ = CASES[name]
    return [run(recipe, tree, seed) for seed in SEEDS]


@pytest.mark.parametrize("name", CASES)
def test_recipe_on_samples_in_segments_equals_loops_over_whole_samples(ranks, name):
    for count in (1, 2):
        results = ranks.run(count, everything, name)
        for seed, parts in zip(SEEDS, zip(*results, strict=True), strict=True):
            samples = wholes(seed)
            assert len({repr(metrics) for _, metrics in parts}) == 1  # with NaN
            for column_name, expected in CASES[name][2](samples).items():
                found = {key: value for columns, _ in parts for key, value in columns[column_name].items()}
                assert found.keys() == expected.keys() and any(expected.values())
                assert found == {key: pytest.approx(value, rel=2e-5, abs=2e-6) for key, value in expected.items()}
            if "kl" in CASES[name][1]:
                tokens = [token for sample in samples for token in sample.trained]
                assert parts[0][1]["kl/mean"] == pytest.approx(fmean(map(k1, tokens)), rel=1e-5)
