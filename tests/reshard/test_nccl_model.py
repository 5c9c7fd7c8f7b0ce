"""Schedules in the model of NCCL: no rank waits for ever, whatever the buffers."""

from collections.abc import Collection, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.random_models import plans
from tests.reshard.nccl_model import Communicator, Groups, Operation, groups_of, stuck_ranks
from verl_mg.layout import EngineLayout, EnginePlacement, Layout, Placement
from verl_mg.models.hf_config import read_config
from verl_mg.reshard import BUCKET_BYTES, Plan, plan, split_into_chunks
from verl_mg.sharding.boxes import cut, numel
from verl_mg.sharding.weight_table import weight_table

MIB = 2**20
BUFFERS = (0, MIB, 4 * MIB)
CONFIGS = Path("tools/model_configs")


def communicator(groups: Groups, ranks_per_node: int) -> Communicator:
    """The communicator of the ranks: two channels for a peer where there are several nodes, as over InfiniBand."""
    ranks = sorted(groups)
    several = len(ranks) > ranks_per_node
    return Communicator(ranks, ranks_per_node, channels_per_peer=2 if several else 32)


def stuck_buffers(groups: Groups, ranks_per_node: int) -> list[int]:
    """The buffer sizes with which some ranks never finish."""
    return [size for size in BUFFERS if stuck_ranks(groups, communicator(groups, ranks_per_node), size)]


def chunk_plans(
    model: str, actor: str, actor_ranks: Sequence[int], engine: str, engine_ranks: Sequence[int]
) -> tuple[Plan, list[Collection[str]]]:
    """The plan of a weight sync of a shipped model, and its tensors for each GiB of an engine's rank."""
    weights = weight_table(read_config(CONFIGS / f"{model}.json"))
    source = weights.shard_map_megatron(Placement(Layout.parse(actor).fit(len(actor_ranks)), tuple(actor_ranks)))
    placement = EnginePlacement(EngineLayout.parse(engine), tuple(engine_ranks))
    whole = weights.shard_map_engine(placement)
    chunks = split_into_chunks(whole, placement.ranks[: placement.layout.ranks], 2**29)
    return plan(source, whole, ranks_per_node=8), [chunk.tensors for chunk in chunks]


def cut_by_own_load(moves: Plan, limit: int, tensors: Collection[str]) -> Groups:
    """Messages of at most a quarter of the limit, in one order for all ranks, in groups that each rank fills by itself.

    Correct where all messages of a group progress on their own, as gloo's do.
    """
    groups: dict[int, list[list[Operation]]] = {}
    for rank in sorted({*moves.source.ranks, *moves.target.ranks}):
        part = moves.rank_plan(rank).of(tensors)
        messages = []
        for outgoing, transfers in ((True, part.sends), (False, part.receives)):
            for transfer in transfers:
                ends = (rank, transfer.peer) if outgoing else (transfer.peer, rank)
                for number, box in cut(transfer.box, -(-numel(transfer.box) * 8 // limit)):
                    key = (moves.position(transfer.tensor), transfer.forwarded, *ends, transfer.box, number)
                    messages.append((key, Operation(transfer.peer, outgoing, 2 * numel(box))))
        groups[rank] = [[]]
        for _, message in sorted(messages):
            if sum(other.nbytes for other in groups[rank][-1]) + message.nbytes > limit:
                groups[rank].append([])
            groups[rank][-1].append(message)
    return groups


LAYOUTS = {
    "one node": ("qwen2_5_7b", "tp4", range(8), "tp2", range(8)),
    "pipeline to another node": ("qwen2_5_7b", "tp2-pp2", range(8), "tp2", range(8, 16)),
    "another node": ("qwen2_5_7b", "tp4", range(8), "tp4", range(8, 16)),
    "two nodes": ("qwen2_5_32b", "tp8-pp2", range(16), "tp4", range(16)),
    "experts": ("qwen3_30b_a3b", "tp2-ep8-etp1", range(16), "tp4-ep4", range(16)),
}


def sends(peer: int, *, times: int = 1) -> list[Operation]:
    return [Operation(peer, True, 8 * MIB)] * times


def receives(peer: int, *, times: int = 1) -> list[Operation]:
    return [Operation(peer, False, 8 * MIB)] * times


def test_nccl_model_unmatched_groups_deadlock_with_any_buffers():
    # Rank 5 waits in its first batch for 7, 7 for the second group of 6, and 6 for the second batch of 5.
    groups = {
        3: [receives(6, times=2)],
        5: [sends(6, times=3) + receives(7)],
        6: [receives(5, times=2) + sends(3, times=2), receives(5) + sends(7, times=4)],
        7: [receives(6, times=4), sends(5)],
    }
    for size in (*BUFFERS, float("inf")):
        assert set(stuck_ranks(groups, Communicator(range(8), 8), size)) >= {5, 6, 7}
    matching = groups | {
        5: [sends(6, times=2), sends(6) + receives(7)],
        6: [receives(5, times=2) + sends(3, times=2), receives(5) + sends(7, times=4)],
        7: [[], receives(6, times=4) + sends(5)],
    }
    for size in BUFFERS:
        assert stuck_ranks(matching, Communicator(range(8), 8), size) == {}


def test_nccl_model_buffers_free_senders_and_no_more():
    # Both send before they receive: each message needs room.
    groups = {0: [sends(1), receives(1)], 1: [sends(0), receives(0)]}
    parts = Communicator(range(2), 8).channels_of(1)
    assert stuck_ranks(groups, Communicator(range(2), 8), 8 * MIB / len(parts)) == {}
    assert stuck_ranks(groups, Communicator(range(2), 8), 8 * MIB / len(parts) - 1) == {0: 0, 1: 0}
    missing = {0: [sends(1)], 1: [[]]}
    assert stuck_ranks(missing, Communicator(range(2), 8), 0) == {0: 0}


@pytest.mark.parametrize("ranks,node", [(8, 8), (16, 8), (6, 2), (12, 3)])
def test_nccl_model_rounds_pair_all_ranks_and_messages_have_one_round(ranks, node):
    members = Communicator(range(ranks), node)
    distances = {members.distance(a, b) for a in range(ranks) for b in range(ranks)}
    assert sorted(members.rounds()) == sorted(distances) and len(members.rounds()) == ranks


@pytest.mark.parametrize(
    "name", [name if name == "one node" else pytest.param(name, marks=pytest.mark.nightly) for name in LAYOUTS]
)
def test_schedule_cut_by_the_load_of_each_rank_deadlocks_under_nccl(name):
    moves, chunks = chunk_plans(*LAYOUTS[name])
    assert stuck_buffers(cut_by_own_load(moves, 32 * MIB, chunks[1]), 8) == list(BUFFERS)


@pytest.mark.nightly
@pytest.mark.parametrize("bucket_bytes", [32 * MIB, BUCKET_BYTES])
@pytest.mark.parametrize("name", LAYOUTS)
def test_schedule_of_a_shipped_model_completes_under_nccl(name, bucket_bytes):
    moves, chunks = chunk_plans(*LAYOUTS[name])
    for number, tensors in enumerate(chunks):
        assert stuck_buffers(groups_of(moves, bucket_bytes, tensors), 8) == [], number


@pytest.mark.parametrize("name", ["one node", "another node"])
def test_schedule_of_a_chunk_completes_under_nccl(name):
    moves, chunks = chunk_plans(*LAYOUTS[name])
    assert stuck_buffers(groups_of(moves, tensors=chunks[1]), 8) == []


BUCKETS = st.sampled_from([200, 2000, 10**6])


@given(plans(), BUCKETS)
@settings(max_examples=8)
def test_schedule_of_random_layouts_completes_under_nccl(moves, bucket_bytes):
    assert stuck_buffers(groups_of(moves, bucket_bytes), moves.ranks_per_node) == []


@pytest.mark.nightly
@given(plans(), BUCKETS)
@settings(max_examples=200)
def test_schedule_of_many_random_layouts_completes_under_nccl(moves, bucket_bytes):
    assert stuck_buffers(groups_of(moves, bucket_bytes), moves.ranks_per_node) == []
