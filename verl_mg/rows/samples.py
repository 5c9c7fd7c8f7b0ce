"""Rows of a batch from generated samples, conversations of agents as JSON, and records of what a recipe was given.

A sample is one row, or of an agent's sample each segment is one. Conversations are recorded with the rows, and kept in
checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from verl_mg.batch import COUNTED_BY, SELECTED_KEYS, SELECTION_SIZES, SUPPORT_IDS, SUPPORT_SIZES, Batch, ColumnKind
from verl_mg.data.prompts import Prompt
from verl_mg.distributed.collectives import all_to_all_json
from verl_mg.engines.engine import Sample
from verl_mg.engines.fed_tokens import SelectedKeys
from verl_mg.engines.sampled_support import SampledSupport, join_entries, join_tops
from verl_mg.engines.trajectory import (
    MAX_SAMPLES,
    MAX_SEGMENTS,
    NOT_GENERATED,
    ConversationTurn,
    Segment,
    Trajectory,
)
from verl_mg.errors import UserError
from verl_mg.rewards import Reward
from verl_mg.training.microbatch import SAMPLER_TOP, TEACHER_HIDDEN, TEACHER_TOP

Conversation = Mapping[str, Any]
"""Trajectory without its tokens: turns, sizes of the segments, log, error, and the reward of the agent.

As text it is JSON in ASCII, which escapes the lone surrogates that UTF-8 cannot encode."""
NOT_RECORDED = frozenset({"generated_by", "score_id", "old_top", "centering", TEACHER_HIDDEN, TEACHER_TOP})
"""Columns without meaning outside the processes that generated the row, or with hundreds of numbers for a token."""


@dataclass(frozen=True)
class _Row:
    """One sequence of tokens; for the row of a plain sample, engines report nothing about the tokens of its prompt."""

    sample: int
    """Index of its sample."""
    id: int
    part: Segment
    prompt_length: int
    """Number of tokens in front of the response."""
    prefix_of: int
    """Row whose first tokens this one repeats; its own id where there is none."""


@dataclass(frozen=True)
class OptionalColumns:
    """Columns that all ranks have, also where their samples report nothing."""

    routed_shape: tuple[int, int] | None = None  # (layers, experts per token) of `routed_experts`; None: no such column
    num_selecting: int = 0  # layers of `selected_keys`; 0: no such column
    has_support: bool = False  # whether there are candidates of each token
    num_top: int = 0  # likeliest tokens in `sampler_top`; 0: no such column
    agent_names: Sequence[str] = ()  # agents of an episode, whose numbers `agent` has; (): no such column


PLAIN = OptionalColumns()


def samples_to_batch(
    prompts: Sequence[Prompt],
    samples: Sequence[Sample],
    policy_version: int,
    columns: OptionalColumns = PLAIN,
) -> Batch:
    """Returns rows of context and response, without the columns `group` and `generated_by`.

    Example: prompt [1 2] and sample 5 with response [7 8 9], whose last token is of a newer version, are one row.

        tokens             1   2   7   8   9      sample_id = trajectory = 5
        policy_versions   -1  -1   4   4   5      policy_version = 4, the oldest of the row
        loss_mask          0   0   1   1   1      prompt_length = 2

    An agent's sample 5 with two segments, of which the second repeats 3 tokens of the first, is two rows with the
    sample ids 5120 and 5121, trajectory 5, prefix_of 5120 and prefix_length 0 and 3. These two columns exist only where
    samples have trajectories: then all of them have one.

    With names of agents the rows of an agent are a trajectory: if in the example the second segment is of the second
    agent, the column `agent` is 0 and 1, and `trajectory` 5 and MAX_SAMPLES + 5. An agent without trained turns has no
    rows if another one has some.

    `policy_version` is for rows without generated tokens. UserError where an engine did not report the candidates of a
    token, not the token itself among them, or not the likeliest tokens.
    """
    pairs = enumerate(zip(prompts, samples, strict=True))
    rows = [row for i, (prompt, sample) in pairs for row in _rows_of(i, prompt, sample)]
    parts = [row.part for row in rows]
    sample_of_row = torch.tensor([row.sample for row in rows], dtype=torch.int64)
    batch = Batch.from_rows(part.tokens for part in parts)
    batch["prompt_length"] = torch.tensor([row.prompt_length for row in rows], dtype=torch.int64)
    batch["prompt_id"] = torch.tensor([prompt.id for prompt in prompts], dtype=torch.int64)[sample_of_row]
    batch["trajectory"] = torch.tensor([sample.id for sample in samples], dtype=torch.int64)[sample_of_row]
    if columns.agent_names:
        numbers = {name: number for number, name in enumerate(columns.agent_names)}
        # A sample whose agents have requested nothing has one row, of the first.
        batch.put("agent", torch.tensor([numbers.get(part.agent, 0) for part in parts]).long(), ColumnKind.SEQUENCE)
        batch["trajectory"] += MAX_SAMPLES * batch["agent"]
    batch["sample_id"] = torch.tensor([row.id for row in rows], dtype=torch.int64)
    batch["truncated"] = torch.tensor([part.truncated for part in parts], dtype=torch.bool)
    # Engines report the last tokens of a row: the prompt of a plain sample has no versions and log-probs.
    reported = batch.lengths - torch.tensor([len(part.policy_versions) for part in parts], dtype=torch.int64)
    known = batch.positions >= batch.expand_to_tokens(reported)
    versions = torch.full((batch.total_tokens,), NOT_GENERATED, dtype=torch.int64)
    versions[known] = torch.tensor([v for part in parts for v in part.policy_versions], dtype=torch.int64)
    batch["policy_versions"], generated = versions, versions != NOT_GENERATED
    batch["loss_mask"] = generated
    oldest = torch.full((len(batch),), policy_version, dtype=torch.int64)
    rows_of, versions = batch.sequence_ids[generated], versions[generated]
    batch["policy_version"] = oldest.scatter_reduce_(0, rows_of, versions, "amin", include_self=False)
    logprobs = torch.zeros(batch.total_tokens)
    logprobs[known] = torch.tensor([value for part in parts for value in part.logprobs])
    batch["rollout_logprobs"] = logprobs
    if any(sample.trajectory for sample in samples):
        prefixes = torch.tensor([(row.prefix_of, row.part.prefix_length) for row in rows], dtype=torch.int64)
        batch["prefix_of"], batch["prefix_length"] = prefixes.unbind(1)
    if any(part.images for part in parts):
        batch.images = [part.images for part in parts]
    if columns.routed_shape is not None:
        none = torch.empty(0, *columns.routed_shape, dtype=torch.int16)
        batch["routed_experts"] = torch.cat([none, *(_routed(part, none) for part in parts)])
    if columns.num_selecting:
        _put_keys(batch, parts, columns.num_selecting)
    if columns.has_support:
        _put_support(batch, parts)
    if columns.num_top:
        _put_top(batch, parts, columns.num_top)
    return batch


def _put_keys(batch: Batch, parts: Sequence[Segment], layers: int) -> None:
    """Adds the keys that tokens of rows attended to, where they were fed to the model."""
    counted: list[tuple[int, SelectedKeys | None]] = []
    for part in parts:
        fed = 0 if part.selected_keys is None else len(part.selected_keys)
        counted += [(fed, part.selected_keys), (len(part.tokens) - fed, None)]
    joined = join_entries(counted)
    none = torch.empty(0, layers, dtype=torch.uint8)
    keys = SelectedKeys(torch.zeros(batch.total_tokens, dtype=torch.int32), none) if joined is None else joined
    batch.put(SELECTION_SIZES, keys.sizes, ColumnKind.TOKEN)
    batch.put(SELECTED_KEYS, keys.entries, ColumnKind.SELECTION)


def _put_support(batch: Batch, parts: Sequence[Segment]) -> None:
    """Adds the candidates of the tokens of rows."""
    # Engines that are silent about some tokens would have them trained as draws from the whole vocabulary.
    silent = [any(v != NOT_GENERATED for v in part.policy_versions) and part.support is None for part in parts]
    joined = join_entries([(len(part.tokens), part.support) for part in parts])
    none = torch.empty(0, dtype=torch.int32)
    support = SampledSupport(none.new_zeros(batch.total_tokens), none) if joined is None else joined
    drawn = batch["tokens"].repeat_interleave(support.sizes.long()) == support.ids
    token_of = torch.arange(batch.total_tokens).repeat_interleave(support.sizes.long())
    is_candidate = torch.zeros(batch.total_tokens, dtype=torch.bool).index_put_((token_of[drawn],), torch.tensor(True))
    strange = batch.sequence_ids[(support.sizes > 0) & ~is_candidate].tolist()
    for row in (*[i for i, is_silent in enumerate(silent) if is_silent], *strange)[:1]:
        raise UserError(
            f"algorithm.support: the engine of sample_id {int(batch['sample_id'][row])} reported tokens without the "
            "candidates that they were drawn from. Write algorithm.support=full, or choose another rollout.engine."
        )
    batch.put(SUPPORT_SIZES, support.sizes, ColumnKind.TOKEN)
    batch.put(SUPPORT_IDS, support.ids, ColumnKind.CANDIDATE)


def _put_top(batch: Batch, parts: Sequence[Segment], num_top: int) -> None:
    """Adds the likeliest tokens of the distributions that tokens were drawn from."""
    top = torch.zeros(batch.total_tokens, 2, num_top)
    top[:, 0] = -torch.inf
    if (joined := join_tops([(len(part.tokens), part.top) for part in parts])) is not None:
        top[:, :, : joined.shape[2]] = joined
    silent = batch.sequence_ids[batch["loss_mask"] & ~top[:, 0, 0].isfinite()]
    if len(silent):
        raise UserError(
            f"algorithm.off_policy.score_centering: the engine of sample_id {int(batch['sample_id'][silent[0]])} "
            "reported tokens without the likeliest ones. Leave it out, or choose another rollout.engine."
        )
    batch.put(SAMPLER_TOP, top, ColumnKind.TOKEN)


def row_id(sample: int, segment: int) -> int:
    """Returns the sample id of an agent's row, which is unique over all segments of all samples."""
    assert segment < MAX_SEGMENTS, f"sample {sample}: engines must not begin segment {segment}"
    return sample * MAX_SEGMENTS + segment


def _rows_of(number: int, prompt: Prompt, sample: Sample) -> Iterator[_Row]:
    """Yields the rows of a sample; an agent that has requested nothing has one row, with only its prompt."""
    truncated = sample.finish != "stop"
    trajectory = sample.trajectory
    if trajectory is None or not trajectory.segments:
        row = sample.id if trajectory is None else row_id(sample.id, 0)
        tokens, images = (*prompt.tokens, *sample.tokens), (*prompt.load_images(), *sample.images)
        reported = (sample.logprobs, sample.policy_versions, truncated)
        support = join_entries([(len(prompt.tokens), None), (len(sample.tokens), sample.support)])
        top = join_tops([(len(prompt.tokens), None), (len(sample.tokens), sample.top)])
        whole = Segment(
            tokens,
            *reported,
            routed_experts=sample.routed_experts,
            selected_keys=sample.selected_keys,
            support=support,
            top=top,
            images=images,
        )
        yield _Row(number, row, whole, len(prompt.tokens), row)
        return
    # Rows without a token to train would only cost time; the conversation has all replies.
    acting = {part.agent for part in trajectory.segments if _num_trained(part)}
    chosen = {i: part for i, part in enumerate(trajectory.segments) if part.agent in acting or not acting}
    for i, part in chosen.items():
        if part.prefix_of not in chosen:
            part = replace(part, prefix_of=None, prefix_length=0)
        row, other = row_id(sample.id, i), i if part.prefix_of is None else part.prefix_of
        generated = (place for place, version in enumerate(part.policy_versions) if version != NOT_GENERATED)
        whole = replace(part, truncated=truncated or part.truncated)
        yield _Row(number, row, whole, next(generated, len(part.tokens)), row_id(sample.id, other))


def _routed(part: Segment, none: Tensor) -> Tensor:
    """Returns (length, layers, top_k) int16; -1 for tokens that were never fed to the model, such as the last one."""
    routed = none if part.routed_experts is None else part.routed_experts
    return torch.cat([routed, routed.new_full((len(part.tokens) - len(routed), *routed.shape[1:]), -1)])


def conversation_of(trajectory: Trajectory) -> Conversation:
    """Returns the conversation of a trajectory, whose parts it shares."""
    # It has everything that the columns of rows do not have, so a checkpoint of rows needs nothing else. Sizes of a
    # segment of 4 tokens with 2 generated ones: {"tokens": 4, "trained": 2, "prefix_of": None, "prefix_length": 0}.
    return {
        "turns": [vars(turn) for turn in trajectory.turns],
        "segments": [
            {
                "tokens": len(segment.tokens),
                "trained": _num_trained(segment),
                "prefix_of": segment.prefix_of,
                "prefix_length": segment.prefix_length,
            }
            | ({"agent": segment.agent} if segment.agent else {})
            for segment in trajectory.segments
        ],
        "reward": asdict(trajectory.reward) if trajectory.reward else None,
        "log": trajectory.log,
        "error": trajectory.error,
    }


def trajectory_of(segments: Sequence[Segment], conversation: Conversation) -> Trajectory:
    """Returns the trajectory that `conversation_of` was given; its segments are not part of a conversation."""
    turns = [ConversationTurn(**turn | {"messages": tuple(turn["messages"])}) for turn in conversation["turns"]]
    log, error = conversation["log"], conversation["error"]
    return Trajectory(tuple(segments), tuple(turns), agent_reward(conversation), log, error)


def agent_reward(conversation: Conversation) -> Reward | None:
    """Returns the reward that the agent returned, if it did."""
    if not conversation["reward"]:
        return None
    reward: dict[str, Any] = conversation["reward"]
    agents = {name: Reward(**of_agent) for name, of_agent in reward.get("agents", {}).items()}
    return Reward(**reward | {"agents": agents})


def final_turn(conversation: Conversation) -> ConversationTurn | None:
    """Returns the policy's last turn, whose reply reward functions score; None where there is none."""
    # Where all turns are of other models, such as a simulated user, it is the last of these.
    turns = conversation["turns"]
    chosen = [turn for turn in turns if turn["trained"]] or turns
    return ConversationTurn(**chosen[-1]) if chosen else None


def final_turns(conversation: Conversation) -> dict[str, ConversationTurn]:
    """Returns the last trained turn of each agent with a name."""
    agents = [segment.get("agent") for segment in conversation["segments"]]
    turns = (ConversationTurn(**turn) for turn in conversation["turns"] if turn["trained"])
    return {name: turn for turn in turns if (name := agents[turn.segment])}


def _num_trained(segment: Segment) -> int:
    return sum(version != NOT_GENERATED for version in segment.policy_versions)


def exchange_conversations(texts: Mapping[int, str], by_rank: Sequence[Sequence[int]]) -> dict[int, str]:
    """Sends conversations to the ranks that have got the rows; all ranks call it together.

    `texts` are of this rank, by episode; `by_rank` has the episodes of which each rank has got rows.
    """
    outgoing = [{i: texts[i] for i in wanted if i in texts} for wanted in by_rank]
    return {int(i): text for received in all_to_all_json(outgoing) for i, text in received.items()}


@dataclass(frozen=True)
class GeneratedRows:
    """Rows of samples on this rank, and what is known of them that no column contains."""

    batch: Batch
    conversations: Mapping[int, str] = field(default_factory=dict)
    """Conversation of each episode, of all its agents, as JSON by `without_agent(trajectory)`."""


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
        self.received.put(name, _kept(values, kind), kind)


def as_of_now(batch: Batch) -> Batch:
    """Returns the recorded columns of a batch, which a recipe may keep and change."""
    copy = Batch(batch.lengths)
    copy.images = batch.images
    for name in batch.names():
        if name not in NOT_RECORDED:
            copy.put(name, _kept(batch[name], batch.kind(name)), batch.kind(name))
    return copy


def _kept(values: Tensor, kind: ColumnKind) -> Tensor:
    # Copied, since the recipe may edit it in place. Columns with several numbers per token are large, and no recipe
    # changes them.
    return values.clone() if values.dim() == 1 and kind not in COUNTED_BY else values
