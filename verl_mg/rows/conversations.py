"""Conversations of agents as JSON: recorded with the rows, and kept in checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from verl_mg.distributed.collectives import all_to_all_bytes
from verl_mg.engines.trajectory import NOT_GENERATED, ConversationTurn, Segment, Trajectory
from verl_mg.rewards import Reward

Conversation = Mapping[str, Any]
"""Trajectory without its tokens: turns, sizes of the segments, log, error, and the reward of the agent."""


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
