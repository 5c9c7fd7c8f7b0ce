"""Turns of masks, and advantages of turns against loops over samples in Python floats."""

import statistics
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_mg.algorithms.advantages import Turns, gigpo, mt_grpo
from verl_mg.errors import UserError

GAMMA, WEIGHT = 0.7, 0.5
NUMBER = st.integers(-40, 40).map(lambda k: k / 8)


@dataclass(frozen=True)
class Turn:
    """Tokens in front of the turn and in it, its reward, and the state that it begins in."""

    before: int
    tokens: int
    reward: float | None
    state: int


@dataclass(frozen=True)
class Sample:
    """A sample with its score and the tokens behind its last turn."""

    group: int
    score: float
    turns: tuple[Turn, ...]
    after: int


TURN = st.builds(Turn, st.integers(1, 3), st.integers(1, 3), st.none() | NUMBER, st.integers(0, 1))
SAMPLES = st.lists(
    st.builds(Sample, st.sampled_from([7, -2, 3]), NUMBER, st.lists(TURN, max_size=3).map(tuple), st.integers(0, 2)),
    min_size=1,
    max_size=9,
)


def tables(samples: list[Sample]) -> tuple[torch.Tensor, ...]:
    """Mask (n, T), scores (n,), rewards of turns (n, 3), groups (n,), and states (m,), which bear the group too."""
    rows = [[flag for t in s.turns for flag in [False] * t.before + [True] * t.tokens] for s in samples]
    rows = [row + [False] * s.after for row, s in zip(rows, samples, strict=True)]
    width = max(map(len, rows))
    mask = torch.tensor([row + [False] * (width - len(row)) for row in rows], dtype=torch.bool).view(len(rows), width)
    rewards = torch.full((len(samples), 3), float("nan"), dtype=torch.float64)
    for i, sample in enumerate(samples):
        for k, turn in enumerate(sample.turns):
            rewards[i, k] = float("nan") if turn.reward is None else turn.reward
    scores = torch.tensor([s.score for s in samples], dtype=torch.float64)
    states = torch.tensor([10 * s.group + t.state for s in samples for t in s.turns], dtype=torch.int64)
    return mask, scores, rewards, torch.tensor([s.group for s in samples]), states


def relative(value: float, peers: list[float], normalize_by_std: bool) -> float:
    deviation = statistics.stdev(peers) if len(peers) > 1 else 0.0
    return (value - statistics.fmean(peers)) / (deviation + 1e-6 if normalize_by_std else 1.0)


def mt_grpo_by_hand(samples: list[Sample], normalize_by_std: bool) -> list[list[float]]:
    advantages = []
    for sample in samples:
        peers = [other for other in samples if other.group == sample.group]
        outcome = relative(sample.score, [other.score for other in peers], normalize_by_std)
        row = []
        for k, turn in enumerate(sample.turns):
            advantage = outcome
            if turn.reward is not None:
                same = [other.turns[k].reward for other in peers if len(other.turns) > k]
                known = [reward for reward in same if reward is not None]
                advantage += WEIGHT * relative(turn.reward, known, normalize_by_std)
            row += [0.0] * turn.before + [advantage] * turn.tokens
        advantages.append(row)
    return advantages


def returns_of(sample: Sample) -> list[float]:
    rewards = [turn.reward or 0.0 for turn in sample.turns]
    rewards[-1:] = [rewards[-1] + sample.score] if rewards else []
    return [sum(GAMMA**i * reward for i, reward in enumerate(rewards[k:])) for k in range(len(rewards))]


def gigpo_by_hand(samples: list[Sample], normalize_by_std: bool) -> list[list[float]]:
    advantages = []
    for sample in samples:
        peers = [other for other in samples if other.group == sample.group]
        totals = [other.score + sum(turn.reward or 0.0 for turn in other.turns) for other in peers]
        total = sample.score + sum(turn.reward or 0.0 for turn in sample.turns)
        episode = relative(total, totals, normalize_by_std)
        row = []
        for turn, return_ in zip(sample.turns, returns_of(sample), strict=True):
            same = [
                value
                for other in peers
                for step, value in zip(other.turns, returns_of(other), strict=True)
                if step.state == turn.state
            ]
            advantage = episode + WEIGHT * relative(return_, same, normalize_by_std)
            row += [0.0] * turn.before + [advantage] * turn.tokens
        advantages.append(row)
    return advantages


def check(found: torch.Tensor, expected: list[list[float]]) -> None:
    width = found.shape[1]
    table = torch.tensor([row + [0.0] * (width - len(row)) for row in expected], dtype=torch.float64)
    torch.testing.assert_close(found, table.view(found.shape), rtol=1e-7, atol=1e-7)


@settings(max_examples=40)
@given(SAMPLES, st.booleans())
def test_mt_grpo_of_random_samples_equals_loops(samples, normalize_by_std):
    mask, scores, rewards, groups, _ = tables(samples)
    found = mt_grpo(scores, rewards, Turns.of(mask), groups, WEIGHT, normalize_by_std)
    check(found, mt_grpo_by_hand(samples, normalize_by_std))


@settings(max_examples=40)
@given(SAMPLES, st.booleans())
def test_gigpo_of_random_samples_equals_loops(samples, normalize_by_std):
    mask, scores, rewards, groups, states = tables(samples)
    found = gigpo(scores, rewards, Turns.of(mask), groups, states, GAMMA, WEIGHT, normalize_by_std)
    check(found, gigpo_by_hand(samples, normalize_by_std))


def test_turns_of_a_mask_by_hand():
    mask = torch.tensor([[0, 1, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0], [1, 0, 1, 0, 1, 1]], dtype=torch.bool)
    turns = Turns.of(mask)
    assert turns.line.tolist() == [0, 0, 2, 2, 2] and turns.place.tolist() == [0, 1, 0, 1, 2]
    assert turns.to_tokens(torch.tensor([1.0, 2, 3, 4, 5])).tolist() == [
        [0, 1, 1, 0, 2, 0],
        [0, 0, 0, 0, 0, 0],
        [3, 0, 4, 0, 5, 5],
    ]


def test_good_call_in_a_sample_with_a_wrong_answer_is_not_blamed():
    """Two turns, as in the paper: the first one has a reward."""
    mask = torch.tensor([[False, True, False, True]] * 4)
    scores, rewards = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([[1.0], [1.0], [0.0], [0.0]])
    groups = torch.zeros(4, dtype=torch.int64)
    found = mt_grpo(scores, rewards, Turns.of(mask), groups, 1.0)
    assert found[1, 1] > 0 > found[1, 3] and found[2, 1] < found[2, 3] < 0


def test_mt_grpo_without_rewards_of_turns_is_refused():
    turns, groups = Turns.of(torch.ones(2, 1, dtype=torch.bool)), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(UserError, match="no part turn_1"):
        mt_grpo(torch.zeros(2), torch.zeros(2, 0), turns, groups, 1.0)
