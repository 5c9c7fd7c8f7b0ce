"""Rows of a batch from groups of samples, and their distribution over the ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist

from verl_mg.batch import Batch, ColumnKind
from verl_mg.roles.pending_groups import PendingGroup
from verl_mg.roles.reward import NOT_SCORED
from verl_mg.roles.rows.dispatch import gather_rows
from verl_mg.roles.rows.index import RowIndexer
from verl_mg.roles.rows.samples import samples_to_batch
from verl_mg.rollout.engine import Sample


def group_rows(
    groups: Sequence[PendingGroup],
    completed: Mapping[int, Sample],
    score_ids: Mapping[int, int] | None,
    policy_version: int,
) -> Batch:
    """Returns the rows of the samples that this rank's engine has generated.

    Args:
        groups: the groups, in the order of their ids.
        completed: samples of this rank's engine by id.
        score_ids: number of each sample's score on this rank; None where nothing is scored.
        policy_version: `policy_version` of a response without tokens.
    """
    rows = [(group, i) for group in groups for i in group.ids if i in completed]
    batch = samples_to_batch([group.prompt for group, _ in rows], [completed[i] for _, i in rows], policy_version)
    batch["group"] = torch.tensor([group.ids.start for group, _ in rows], dtype=torch.int64)
    put_origin(batch, None if score_ids is None else [score_ids.get(i, NOT_SCORED) for _, i in rows])
    return batch


def distribute_rows(batch: Batch, groups: Sequence[PendingGroup], rows: RowIndexer) -> Batch:
    """Returns this rank's share of the rows of all ranks: whole groups, as evenly as possible.

    Args:
        batch: the rows that are on this rank.
        groups: the groups of all rows, in the order of their ids.
        rows: index of the rows of all ranks.
    """
    world_size = dist.get_world_size()
    # Rows of the index are in the order of sample ids, as the groups are.
    ends = [0]
    for group in groups:
        ends.append(ends[-1] + len(group.ids))
    edges = [ends[rank * len(groups) // world_size] for rank in range(world_size + 1)]
    index, shares = rows.index(batch), [range(*edge) for edge in pairwise(edges)]
    mine = gather_rows(batch, index, shares)
    rows.put(mine, index, shares)
    return mine


def put_origin(batch: Batch, score_ids: Sequence[int] | None) -> None:
    """Sets the columns by which `RewardRole.wait` identifies the score of a row of this rank's engine.

    Args:
        batch: rows of this rank's engine.
        score_ids: number of each row's score on this rank; None where nothing is scored.
    """
    batch.put("generated_by", torch.full((len(batch),), dist.get_rank(), dtype=torch.int64), ColumnKind.SEQUENCE)
    if score_ids is not None:
        batch.put("score_id", torch.tensor(score_ids, dtype=torch.int64), ColumnKind.SEQUENCE)


def sample_seed(seed: int, sample_id: int) -> int:
    """Returns the seed of a sample, by which it does not depend on the ranks.

    Args:
        seed: of the job.
        sample_id: id of the sample.
    """
    digest = hashlib.blake2b(f"{seed}:{sample_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
