"""Rows of a batch from generated samples, conversations of agents as JSON, and records of what a recipe was given.

A sample is one row, or of an agent's sample each segment is one. Conversations are recorded with the rows, and kept in
checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from verl_mg.batch import Batch, ColumnKind
from verl_mg.data.prompts import Prompt
from verl_mg.distributed.collectives import all_to_all_bytes
from verl_mg.engines.engine import Sample
from verl_mg.engines.trajectory import MAX_SEGMENTS, NOT_GENERATED, ConversationTurn, Segment, Trajectory
from verl_mg.images import RowImages
from verl_mg.rewards import Reward
from verl_mg.training.microbatch import TEACHER_HIDDEN, TEACHER_TOP

Conversation = Mapping[str, Any]
"""Trajectory without its tokens: turns, sizes of the segments, log, error, and the reward of the agent."""
NOT_RECORDED = frozenset({"generated_by", "score_id", TEACHER_HIDDEN, TEACHER_TOP})
"""Columns without meaning outside the processes that generated the row, or with hundreds of numbers for a token."""


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


def conversation_of(trajectory: Trajectory) -> Conversation:
    """Returns the conversation of a trajectory, whose parts it shares."""
    # It has everything that the columns of rows do not have, so a checkpoint of rows needs nothing else. Sizes of a
    # segment of 4 tokens with 2 generated ones: {"tokens": 4, "trained": 2, "prefix_of": None, "prefix_length": 0}.
    return {
        "turns": [vars(turn) for turn in trajectory.turns],
        "segments": [_size(segment) for segment in trajectory.segments],
        "reward": vars(trajectory.reward) if trajectory.reward else None,
        "log": trajectory.log,
        "error": trajectory.error,
    }


def trajectory_of(segments: Sequence[Segment], conversation: Conversation) -> Trajectory:
    """Returns the trajectory that `conversation_of` was given; its segments are not part of a conversation."""
    turns = [ConversationTurn(**turn | {"messages": tuple(turn["messages"])}) for turn in conversation["turns"]]
    log, error = conversation["log"], conversation["error"]
    return Trajectory(tuple(segments), tuple(turns), agent_reward(conversation), log, error)


def to_text(conversation: Conversation) -> str:
    """Returns a conversation as JSON in ASCII, whatever its texts contain."""
    return json.dumps(conversation)  # escapes lone surrogates, which UTF-8 cannot encode


def from_text(text: str) -> Conversation:
    """Returns the conversation that `to_text` wrote."""
    conversation: Conversation = json.loads(text)
    return conversation


def agent_reward(conversation: Conversation) -> Reward | None:
    """Returns the reward that the agent returned, if it did."""
    return Reward(**conversation["reward"]) if conversation["reward"] else None


def final_reply(conversation: Conversation) -> str:
    """Returns the text of the policy's last reply, which reward functions score; "" where there is none."""
    # Where all turns are of other models, such as a simulated user, it is the last of these.
    turns = conversation["turns"]
    chosen = [turn for turn in turns if turn["trained"]] or turns
    return (chosen[-1]["reply"].get("content") or "") if chosen else ""


def exchange_conversations(texts: Mapping[int, str], by_rank: Sequence[Sequence[int]]) -> dict[int, str]:
    """Sends conversations to the ranks that have got the rows; all ranks call it together.

    `texts` are of this rank, by trajectory; `by_rank` has the trajectories whose rows each rank has got.
    """
    # JSON, since conversations have any shape; only text travels, next to the tensors of the rows.
    outgoing = [
        torch.frombuffer(bytearray(json.dumps({i: texts[i] for i in wanted if i in texts}).encode()), dtype=torch.uint8)
        for wanted in by_rank
    ]
    received = [json.loads(part.numpy().tobytes()) for part in all_to_all_bytes(outgoing)]
    return {int(i): text for part in received for i, text in part.items()}


def _size(segment: Segment) -> dict[str, int | None]:
    return {
        "tokens": len(segment.tokens),
        "trained": sum(version != NOT_GENERATED for version in segment.policy_versions),
        "prefix_of": segment.prefix_of,
        "prefix_length": segment.prefix_length,
    }


@dataclass(frozen=True)
class GeneratedRows:
    """Rows of samples on this rank, and what is known of them that no column contains."""

    batch: Batch
    conversations: Mapping[int, str] = field(default_factory=dict)
    """Conversation of each trajectory of an agent as JSON, by trajectory."""


@dataclass(frozen=True)
class RolloutRecord:
    """A batch as a recipe received it, and as the recipe has left it."""

    batch: Batch
    received: Batch
    conversations: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: GeneratedRows) -> RolloutRecord:
        """Returns the record of rows that are about to be given to the recipe."""
        batch = rows.batch
        # A second batch: the recipe adds columns to the first one, and replays need only the received ones.
        record = cls(batch, Batch(batch.lengths), rows.conversations)
        for name in batch.names():
            if name not in NOT_RECORDED:
                record.add(name, batch[name], batch.kind(name))
        return record

    def add(self, name: str, values: Tensor, kind: ColumnKind) -> None:
        """Adds a column that the recipe receives."""
        # Copied, since the recipe may edit it in place. Columns with several numbers per token are large, and no recipe
        # changes them.
        self.received.put(name, values.clone() if values.dim() == 1 else values, kind)


@dataclass
class RolloutRecords:
    """The records of an iteration, written by the rollout and by the reward."""

    records: list[RolloutRecord] = field(default_factory=list)

    def clear(self) -> None:
        """Starts the records of another iteration."""
        self.records = []

    def add(self, rows: GeneratedRows) -> None:
        """Records rows that are about to be given to the recipe."""
        self.records.append(RolloutRecord.of(rows))

    def add_columns(self, batch: Batch, columns: Mapping[str, Tensor]) -> None:
        """Adds sequence columns (n,) to the record of a batch; nothing where the rollout has not returned the batch."""
        for record in self.records:
            if record.batch is batch:
                for name, values in columns.items():
                    record.add(name, values, ColumnKind.SEQUENCE)
