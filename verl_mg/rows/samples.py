"""Rows of a batch from generated samples: one of each sample, or of an agent's sample one of each segment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_mg.batch import Batch
from verl_mg.data.prompts import Prompt
from verl_mg.engines.engine import Sample
from verl_mg.engines.trajectory import MAX_SEGMENTS, NOT_GENERATED, Segment
from verl_mg.images import RowImages


@dataclass(frozen=True)
class _Row:
    """One sequence of tokens; the engine has reported something about all but its first ones."""

    sample: int
    """Index of its sample."""
    id: int
    tokens: tuple[int, ...]
    prompt_length: int
    """Number of tokens in front of the response."""
    logprobs: tuple[float, ...]
    """Log-probability of each of the last tokens."""
    policy_versions: tuple[int, ...]
    truncated: bool
    routed_experts: Tensor | None
    """Experts of the tokens that were fed to the model."""
    prefix_of: int
    """Row whose first tokens this one repeats; its own id where there is none."""
    prefix_length: int = 0
    images: RowImages = ()
    """Images whose placeholders the tokens have, in their order."""


def samples_to_batch(
    prompts: Sequence[Prompt],
    samples: Sequence[Sample],
    policy_version: int,
    routed_shape: tuple[int, int] | None = None,
) -> Batch:
    """Returns rows of context and response, without the columns `group` and `generated_by`.

    Example: prompt [1 2] and sample 5 with response [7 8 9], whose last token is of a newer version, are one row.

        tokens             1   2   7   8   9      sample_id = trajectory = 5
        policy_versions   -1  -1   4   4   5      policy_version = 4, the oldest of the row
        loss_mask          0   0   1   1   1      prompt_length = 2

    An agent's sample 5 with two segments, of which the second repeats 3 tokens of the first, is two rows with the
    sample ids 5120 and 5121, trajectory 5, prefix_of 5120 and prefix_length 0 and 3. These two columns exist only where
    samples have trajectories: then all of them have one.

    `policy_version` is for rows without generated tokens. `routed_shape` is (layers, experts per token); with it all
    ranks have the column `routed_experts`, also where their samples report none.
    """
    pairs = enumerate(zip(prompts, samples, strict=True))
    rows = [row for i, (prompt, sample) in pairs for row in _rows_of(i, prompt, sample)]
    sample_of_row = torch.tensor([row.sample for row in rows], dtype=torch.int64)
    batch = Batch.from_rows(row.tokens for row in rows)
    batch["prompt_length"] = torch.tensor([row.prompt_length for row in rows], dtype=torch.int64)
    batch["prompt_id"] = torch.tensor([prompt.id for prompt in prompts], dtype=torch.int64)[sample_of_row]
    batch["trajectory"] = torch.tensor([sample.id for sample in samples], dtype=torch.int64)[sample_of_row]
    batch["sample_id"] = torch.tensor([row.id for row in rows], dtype=torch.int64)
    oldest = [min((v for v in row.policy_versions if v != NOT_GENERATED), default=policy_version) for row in rows]
    batch["policy_version"] = torch.tensor(oldest, dtype=torch.int64)
    batch["truncated"] = torch.tensor([row.truncated for row in rows], dtype=torch.bool)
    # Engines report the last tokens of a row: the prompt of a plain sample has no versions and log-probs.
    reported = batch.lengths - torch.tensor([len(row.policy_versions) for row in rows], dtype=torch.int64)
    known = batch.positions >= batch.expand_to_tokens(reported)
    versions = torch.full((batch.total_tokens,), NOT_GENERATED, dtype=torch.int64)
    versions[known] = torch.tensor([v for row in rows for v in row.policy_versions], dtype=torch.int64)
    batch["policy_versions"], batch["loss_mask"] = versions, versions != NOT_GENERATED
    logprobs = torch.zeros(batch.total_tokens)
    logprobs[known] = torch.tensor([value for row in rows for value in row.logprobs])
    batch["rollout_logprobs"] = logprobs
    if any(sample.trajectory for sample in samples):
        prefixes = torch.tensor([(row.prefix_of, row.prefix_length) for row in rows], dtype=torch.int64)
        batch["prefix_of"], batch["prefix_length"] = prefixes.unbind(1)
    if any(row.images for row in rows):
        batch.images = [row.images for row in rows]
    if routed_shape is not None:
        none = torch.empty(0, *routed_shape, dtype=torch.int16)
        batch["routed_experts"] = torch.cat([none, *(_routed(row, none) for row in rows)])
    return batch


def row_id(trajectory: int, segment: int) -> int:
    """Returns the sample id of an agent's row, which is unique over all segments of all trajectories."""
    assert segment < MAX_SEGMENTS, f"sample {trajectory}: engines must not begin segment {segment}"
    return trajectory * MAX_SEGMENTS + segment


def _rows_of(i: int, prompt: Prompt, sample: Sample) -> list[_Row]:
    """Returns the rows of sample number `i`; an agent that has requested nothing has one row, with only its prompt."""
    truncated = sample.finish != "stop"
    trajectory = sample.trajectory
    if trajectory is not None and trajectory.segments:
        return [_row_of(i, sample.id, n, part, truncated) for n, part in enumerate(trajectory.segments)]
    number = sample.id if trajectory is None else row_id(sample.id, 0)
    return [
        _Row(
            sample=i,
            id=number,
            tokens=(*prompt.tokens, *sample.tokens),
            prompt_length=len(prompt.tokens),
            logprobs=sample.logprobs,
            policy_versions=sample.policy_versions,
            truncated=truncated,
            routed_experts=sample.routed_experts,
            prefix_of=number,
            images=(*prompt.load_images(), *sample.images),
        )
    ]


def _row_of(i: int, trajectory: int, number: int, segment: Segment, truncated: bool) -> _Row:
    generated = (place for place, version in enumerate(segment.policy_versions) if version != NOT_GENERATED)
    row = row_id(trajectory, number)
    return _Row(
        sample=i,
        id=row,
        tokens=segment.tokens,
        prompt_length=next(generated, len(segment.tokens)),
        logprobs=segment.logprobs,
        policy_versions=segment.policy_versions,
        truncated=truncated or segment.truncated,
        routed_experts=segment.routed_experts,
        prefix_of=row if segment.prefix_of is None else row_id(trajectory, segment.prefix_of),
        prefix_length=segment.prefix_length,
        images=segment.images,
    )


def _routed(row: _Row, none: Tensor) -> Tensor:
    """Returns (length, layers, top_k) int16; -1 for tokens that were never fed to the model, such as the last one."""
    routed = none if row.routed_experts is None else row.routed_experts
    return torch.cat([routed, routed.new_full((len(row.tokens) - len(routed), *routed.shape[1:]), -1)])
