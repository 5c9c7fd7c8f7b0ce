"""Samples in a checkpoint: incomplete ones, and complete ones whose group is incomplete; without their tensors.

    SampleState(id=17, tokens=(5, 8), logprobs=(-0.1, -2.3), policy_versions=(3, 4), finish="abort")
    "routed_experts/partial/17" of `reports_of`: experts that the engine chose; "17/0": in the first segment of an
    agent's sample

The second token was generated after the engine had received version 4 of the weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Self

from pydantic import field_validator, model_validator
from torch import Tensor

from verl_mg.config import Count
from verl_mg.engines.engine import Finish, Sample
from verl_mg.engines.fed_tokens import SelectedKeys
from verl_mg.engines.sampled_support import SampledSupport, TokenEntries
from verl_mg.engines.trajectory import Segment, Trajectory
from verl_mg.images import Image, distinct_images
from verl_mg.jsonl import StoredRecord
from verl_mg.rows.samples import conversation_of, trajectory_of

REPORTS = ("routed_experts", "selection_sizes", "selected_keys", "support_sizes", "support_ids", "top")
"""Beginnings of the keys of `reports_of`."""


class _Tokens(StoredRecord):
    """Tokens of a sample or a segment."""

    tokens: tuple[Count, ...]  # token ids
    logprobs: tuple[float, ...]  # log-probability of each token
    policy_versions: tuple[int, ...]  # version of the weights that generated each token
    images: tuple[str, ...] = ()  # keys of the images of the observations, or of the segment

    @field_validator("images", mode="before")
    @classmethod
    def _keys(cls, images: Sequence[Any]) -> Sequence[Any]:
        return [image.key if isinstance(image, Image) else image for image in images]

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if not len(self.tokens) == len(self.logprobs) == len(self.policy_versions):
            raise ValueError("tokens, log-probabilities and versions must have the same length")
        return self


class SegmentState(_Tokens):
    """One segment, a `trajectory.Segment`."""

    truncated: bool  # whether the last reply was cut
    prefix_of: Count | None  # number of the segment that begins with the same tokens
    prefix_length: Count  # number of these tokens
    agent: str = ""  # name of the agent whose replies these are


class TrajectoryState(StoredRecord):
    """The work of an agent, a `trajectory.Trajectory`."""

    segments: tuple[SegmentState, ...]  # the sequences of tokens
    conversation: str
    """The conversation as JSON in ASCII: texts of agents need not be valid Unicode."""

    @model_validator(mode="before")
    @classmethod
    def _of_trajectory(cls, value: Any) -> Any:
        if not isinstance(value, Trajectory):
            return value
        return {"segments": value.segments, "conversation": json.dumps(conversation_of(value))}


class SampleState(_Tokens):
    """One sample, an `engine.Sample`."""

    id: Count  # sample id
    finish: Finish  # reason why the response ended
    trajectory: TrajectoryState | None = None  # the work of an agent

    @property
    def highest_token(self) -> int:
        """Highest token id; 0 without tokens."""
        parts = (self, *(self.trajectory.segments if self.trajectory else ()))
        return max(max(part.tokens, default=0) for part in parts)

    @classmethod
    def of(cls, sample: Sample) -> SampleState:
        """Returns the state of a sample."""
        return cls.model_validate(sample, from_attributes=True)

    def to_sample(self, which: str, reports: Mapping[str, Tensor], images: Mapping[str, Image]) -> Sample:
        """Returns the sample, with the tensors of `reports_of` and the images of `images_of` by key."""
        return Sample(
            **self.model_dump(exclude={"images", "trajectory"}),
            **_fields(reports, which, self.id),
            trajectory=_to_trajectory(which, self.id, self.trajectory, reports, images) if self.trajectory else None,
            images=tuple(images[key] for key in self.images),
        )


def reports_of(which: str, sample: Sample) -> dict[str, Tensor]:
    """Returns what the engine reports of the tokens of a sample and of its segments, by the keys of a checkpoint.

    `which` is the list of samples that it is in.
    """
    parts: dict[tuple[int, ...], Sample | Segment] = {(sample.id,): sample}
    for number, segment in enumerate(sample.trajectory.segments if sample.trajectory else ()):
        parts[sample.id, number] = segment
    named: dict[str, Tensor | None] = {}
    for numbers, part in parts.items():
        counted: Sequence[TokenEntries | None] = (part.selected_keys, part.support)
        pairs = ((None, None) if entries is None else (entries.sizes, entries.entries) for entries in counted)
        reports = (part.routed_experts, *chain.from_iterable(pairs), part.top)
        named |= zip((_key(name, which, *numbers) for name in REPORTS), reports, strict=True)
    return {key: tensor for key, tensor in named.items() if tensor is not None}


def images_of(sample: Sample) -> dict[str, Image]:
    """Returns the images of a sample's observations and of its segments by key; the data has the prompt's."""
    segments = sample.trajectory.segments if sample.trajectory else ()
    return distinct_images([sample.images, *(segment.images for segment in segments)])


def _to_trajectory(
    which: str, sample: int, state: TrajectoryState, reports: Mapping[str, Tensor], images: Mapping[str, Image]
) -> Trajectory:
    segments = [
        Segment(
            **segment.model_dump(exclude={"images"}),
            **_fields(reports, which, sample, number),
            images=tuple(images[key] for key in segment.images),
        )
        for number, segment in enumerate(state.segments)
    ]
    return trajectory_of(segments, json.loads(state.conversation))


def _fields(reports: Mapping[str, Tensor], which: str, *numbers: int) -> dict[str, Any]:
    """Returns the fields of a sample or segment that `reports_of` has taken apart."""
    experts, *counted, top = (reports.get(_key(name, which, *numbers)) for name in REPORTS)
    key_sizes, keys, sizes, ids = counted
    return {
        "routed_experts": experts,
        "selected_keys": None if key_sizes is None or keys is None else SelectedKeys(key_sizes, keys),
        "support": None if sizes is None or ids is None else SampledSupport(sizes, ids),
        "top": top,
    }


def _key(name: str, which: str, *numbers: int) -> str:
    return "/".join([name, which, *map(str, numbers)])
