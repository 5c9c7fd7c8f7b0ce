"""Process groups: the ranks known without processes are those that megatron-core asks for, each group made once."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.helpers.rank_pool import job_context
from verl_mg.distributed.collectives import GROUP_TIMEOUT
from verl_mg.layout import Layout, Placement
from verl_mg.layout.layout import group_ranks
from verl_mg.megatron import core_version, process_groups
from verl_mg.megatron.process_groups import ParallelGroups

DEEPSEEK_V3 = ("tp8-pp16-ep8-etp1", "tp1-pp16-ep64-etp1", "tp4-pp8-ep32-etp1", "tp2-pp16-cp2-ep64-etp1")


class Requested(dict):
    """Groups by ranks, each made of nothing when megatron-core asks for it."""

    def __missing__(self, ranks):
        member = mock.Mock(size=lambda: len(ranks), rank=lambda: ranks.index(0))
        self[ranks] = member if 0 in ranks else None
        return self[ranks]


def requested_by_megatron(placement):
    """Ranks of the groups that the installed megatron-core requests on rank 0."""
    requested, previous = Requested(), core_version.group_globals()
    core_version.set_group_globals(dict.fromkeys(previous, None) | {"_HYBRID_DP_CP_GROUPS": {}})
    size = len(placement.ranks)
    try:
        with (
            mock.patch.object(dist, "get_rank", lambda group=None: group.rank() if group else 0),
            mock.patch.object(dist, "get_world_size", lambda group=None: group.size() if group else size),
            mock.patch.object(dist, "is_initialized", lambda: True),
        ):
            process_groups._initialize_model_parallel(placement, requested)
    finally:
        core_version.set_group_globals(previous)
    return set(requested)


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [("tp1", 1), ("tp2-pp2", 8), ("tp2-pp2-cp2", 16), ("tp2-cp2-ep4-etp1", 8), ("tp4-pp4-vpp2-ep8-etp2", 64)],
)
def test_group_ranks_of_a_layout_are_what_megatron_requests(layout, ranks):
    placement = Placement.on(Layout.parse(layout), ranks)
    expected = group_ranks(placement)
    assert len(set(expected)) == len(expected)
    assert set(expected) == requested_by_megatron(placement)


def test_group_ranks_of_some_ranks_of_the_job_are_theirs():
    placement = Placement(Layout.parse("tp2-pp2"), (1, 3, 4, 9))
    assert set(group_ranks(placement)) == {(1, 3, 4, 9), (1, 3), (4, 9), (1, 4), (3, 9), (1,), (3,), (4,), (9,)}


@pytest.mark.parametrize("layout", DEEPSEEK_V3)
def test_group_ranks_of_a_thousand_ranks_are_few_for_each(layout):
    sets = group_ranks(Placement.on(Layout.parse(layout), 1024))
    joined = [0] * 1024
    for ranks in sets:
        for rank in ranks:
            joined[rank] += 1
    assert max(joined) <= 16
    assert sum(len(ranks) > 1 for ranks in sets) < 1600  # 3,185 and more calls of `new_group` without the sharing


def created_groups():
    """Calls of `new_group` on this rank for two roles and a third on some of the ranks, and sums over their groups."""
    context, new_group, calls = job_context(), dist.new_group, []

    def counting(ranks=None, *arguments, **options):
        calls.append(tuple(ranks))
        assert arguments[0] == GROUP_TIMEOUT
        return new_group(ranks, *arguments, **options)

    placements = [Placement.on(Layout.parse(text), 4) for text in ("tp2-pp2", "tp2")]
    placements.append(Placement(Layout.parse("tp2"), (0, 1)))
    with mock.patch.object(dist, "new_group", counting):
        made = [ParallelGroups(placement, process_groups=context.process_groups) for placement in placements]
    one = torch.ones(1)
    sums = []
    for groups in made:
        if groups.is_member:
            local = [one.clone() for _ in range(3)]
            for value, group in zip(
                local, (groups.collection.tp, groups.collection.dp, groups.collection.mp), strict=True
            ):
                dist.all_reduce(value, group=group)
            sums.append([int(value) for value in local])
    return calls, sums


def test_parallel_groups_of_several_placements_are_made_once(ranks):
    results = ranks.run(4, created_groups)
    shared = [(0, 1), (2, 3), (0, 2), (1, 3)]
    for rank, (calls, sums) in enumerate(results):
        # The same calls in the same order: torch names a group by their number.
        assert calls == results[0][0]
        assert sorted(calls) == sorted([*shared, *((one,) for one in range(4))])
        assert sums == [[2, 1, 4], [2, 2, 2]] + [[2, 1, 2]] * (rank < 2)
