"""Samples in a checkpoint: those that wait for their group, without the tensors of their experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import model_validator
from torch import Tensor

from verl_mg.config import ConfigSection, Count
from verl_mg.rewards import Reward
from verl_mg.rollout.engine import Finish, Sample
from verl_mg.rollout.trajectory import ConversationTurn, Segment, Trajectory


class _Tokens(ConfigSection):
    """Tokens of a sample or a segment."""

    tokens: tuple[Count, ...]
    """Token ids."""
    logprobs: tuple[float, ...]
    """Log-probability of each token."""
    policy_versions: tuple[int, ...]
    """Version of the weights that generated each token."""

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if not len(self.tokens) == len(self.logprobs) == len(self.policy_versions):
            raise ValueError("tokens, log-probabilities and versions must have the same length")
        return self


class SegmentState(_Tokens):
    """One segment, a `trajectory.Segment`."""

    truncated: bool
    """Whether the last reply was cut."""
    prefix_of: Count | None
    """Number of the segment that begins with the same tokens."""
    prefix_length: Count
    """Number of these tokens."""


class TurnState(ConfigSection):
    """One turn, a `trajectory.ConversationTurn`."""

    segment: int
    """Number of its segment."""
    model: str
    """Name of the model."""
    trained: bool
    """Whether the reply is trained."""
    started: float
    """Seconds from the start of the sample to the request."""
    seconds: float
    """Duration of the request."""
    messages: tuple[dict[str, Any], ...]
    """New messages."""
    reply: dict[str, Any]
    """Message of the assistant."""
    prompt_tokens: Count
    """Tokens in front of the reply."""
    tokens: Count
    """Tokens of the reply."""
    finish: str
    """Reason why the reply ended."""


class RewardState(ConfigSection):
    """Reward that an agent returned, a `rewards.Reward`."""

    value: float
    """The reward."""
    parts: dict[str, float]
    """Its parts."""
    answer: str | None
    """Final answer."""


class TrajectoryState(ConfigSection):
    """The work of an agent, a `trajectory.Trajectory`."""

    segments: tuple[SegmentState, ...]
    """The sequences of tokens."""
    turns: tuple[TurnState, ...]
    """The conversation."""
    reward: RewardState | None
    """Reward that the agent returned."""
    log: str
    """Output of the agent."""
    error: str
    """Reason why the agent failed."""


class SampleState(_Tokens):
    """One sample, an `engine.Sample`."""

    id: Count
    """Sample id."""
    finish: Finish
    """Reason why the response ended."""
    trajectory: TrajectoryState | None = None
    """The work of an agent."""

    @property
    def highest_token(self) -> int:
        """Returns the highest token id; 0 without tokens."""
        parts = (self, *(self.trajectory.segments if self.trajectory else ()))
        return max(max(part.tokens, default=0) for part in parts)

    @classmethod
    def of(cls, sample: Sample) -> SampleState:
        """Returns the state of a sample."""
        return cls.model_validate(sample, from_attributes=True)

    def to_sample(self, experts: Mapping[str, Tensor]) -> Sample:
        """Returns the sample with its experts.

        Args:
            experts: tensors of `experts_of` by name.
        """
        return Sample(
            id=self.id,
            tokens=self.tokens,
            logprobs=self.logprobs,
            policy_versions=self.policy_versions,
            finish=self.finish,
            routed_experts=experts.get(_name(self.id)),
            trajectory=_to_trajectory(self.id, self.trajectory, experts) if self.trajectory else None,
        )


def experts_of(sample: Sample) -> dict[str, Tensor]:
    """Returns the experts of a sample and of its segments, by names that are unique among samples."""
    named = {_name(sample.id): sample.routed_experts}
    for number, segment in enumerate(sample.trajectory.segments if sample.trajectory else ()):
        named[_name(sample.id, number)] = segment.routed_experts
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def _to_trajectory(sample: int, state: TrajectoryState, experts: Mapping[str, Tensor]) -> Trajectory:
    return Trajectory(
        segments=tuple(
            Segment(**segment.model_dump(), routed_experts=experts.get(_name(sample, number)))
            for number, segment in enumerate(state.segments)
        ),
        turns=tuple(ConversationTurn(**turn.model_dump()) for turn in state.turns),
        reward=Reward(**state.reward.model_dump()) if state.reward else None,
        log=state.log,
        error=state.error,
    )


def _name(*numbers: int) -> str:
    return "/".join(map(str, numbers))
