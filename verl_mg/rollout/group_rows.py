"""Rows of a batch from groups of samples, and their distribution over the ranks."""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist

from verl_mg.batch import Batch, ColumnKind
from verl_mg.engines.engine import Sample
from verl_mg.roles.reward import NOT_SCORED
from verl_mg.rollout.pending_groups import PendingGroup
from verl_mg.rows.conversations import conversation_of, exchange_conversations, to_text
from verl_mg.rows.dispatch import gather_rows
from verl_mg.rows.index import RowIndexer
from verl_mg.rows.records import GeneratedRows
from verl_mg.rows.samples import samples_to_batch


def group_rows(
    groups: Sequence[PendingGroup],
    completed: Mapping[int, Sample],
    score_ids: Mapping[int, int] | None,
    policy_version: int,
    routed_shape: tuple[int, int] | None = None,
) -> GeneratedRows:
    """Returns the rows of the samples that this rank's engine has generated; groups are in the order of their ids.

    `score_ids` has the number of each sample's score on this rank, None where nothing is scored. See `samples_to_batch`
    for the rest.
    """
    pairs = [(group, completed[i]) for group in groups for i in group.ids if i in completed]
    samples = [sample for _, sample in pairs]
    batch = samples_to_batch([group.prompt for group, _ in pairs], samples, policy_version, routed_shape)
    starts = {sample.id: group.ids.start for group, sample in pairs}
    trajectories = batch["trajectory"].tolist()
    batch["group"] = torch.tensor([starts[i] for i in trajectories], dtype=torch.int64)
    put_origin(batch, None if score_ids is None else [score_ids.get(i, NOT_SCORED) for i in trajectories])
    texts = {sample.id: to_text(conversation_of(sample.trajectory)) for sample in samples if sample.trajectory}
    return GeneratedRows(batch, texts)


def distribute_rows(generated: GeneratedRows, groups: Sequence[PendingGroup], rows: RowIndexer) -> GeneratedRows:
    """Returns this rank's share of all rows: whole groups in the order of their ids, about equally many rows."""
    # Group statistics and sums over trajectories then need no communication.
    index = rows.index(generated.batch)
    shares = _shares(index.trajectories, [group.ids.start for group in groups], dist.get_world_size())
    mine = gather_rows(generated.batch, index, shares)
    rows.put(mine, index, shares)  # the rows are known, so the first role call need not index them again
    conversations: Mapping[int, str] = {}
    if "prefix_of" in index.schema:  # the rows are of agents, on all ranks
        trajectories = [sorted({index.trajectories[row] for row in share}) for share in shares]
        conversations = exchange_conversations(generated.conversations, trajectories)
    return GeneratedRows(mine, conversations)


def _shares(trajectories: Sequence[int], groups: Sequence[int], count: int) -> list[range]:
    """Returns ranges of rows, each of whole groups, that end at the group's end nearest to an equal share."""
    # Groups 0, 2 and 4 with 2, 3 and 2 rows on 2 ranks: rows 0 to 1, and 2 to 6. A rank may get none.
    sizes = Counter(bisect_right(groups, trajectory) - 1 for trajectory in trajectories)
    ends = [0, *accumulate(sizes[group] for group in range(len(groups)))]
    # A group belongs to the share in which its middle is; integers, scaled by 2 * count, are exact on every rank.
    middles = [count * (before + after) for before, after in pairwise(ends)]
    edges = [ends[bisect_left(middles, 2 * rank * ends[-1])] for rank in range(count)]
    return [range(*edge) for edge in pairwise([*edges, ends[-1]])]


def put_origin(batch: Batch, score_ids: Sequence[int] | None) -> None:
    """Sets the columns by which `RewardRole.wait` identifies the score of a row of this rank's engine."""
    batch.put("generated_by", torch.full((len(batch),), dist.get_rank(), dtype=torch.int64), ColumnKind.SEQUENCE)
    if score_ids is not None:
        batch.put("score_id", torch.tensor(score_ids, dtype=torch.int64), ColumnKind.SEQUENCE)


def sample_seed(seed: int, sample_id: int) -> int:
    """Returns the seed of a sample, a hash of the job's seed and the sample id: it does not depend on the ranks."""
    digest = hashlib.blake2b(f"{seed}:{sample_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1  # 63 bits, which fit a signed integer
