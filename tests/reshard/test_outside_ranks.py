"""Plans with ranks outside the job: servers of several layouts behind its ranks, whose schedules travel as text."""

import json
import zlib

import pytest
import torch

from tests.helpers.random_models import config
from tests.reshard.nccl_model import Communicator, groups_of, stuck_ranks
from verl_mg.layout import EngineLayout, EnginePlacement, Layout, Placement
from verl_mg.models.hf_config import HFConfig
from verl_mg.reshard import plan, schedule
from verl_mg.reshard.schedule import pack_schedules, unpack_schedules
from verl_mg.sharding.shard_map import JoinedShardMap
from verl_mg.sharding.weight_table import weight_table


def servers(c: HFConfig, *placed: tuple[str, tuple[int, ...]]) -> JoinedShardMap:
    """Engines of several layouts, each layout on some ranks."""
    placements = [EnginePlacement(EngineLayout.parse(layout), ranks) for layout, ranks in placed]
    return JoinedShardMap([weight_table(c).shard_map_engine(placement) for placement in placements])


def job(c: HFConfig, layout: str, ranks: int):
    return weight_table(c).shard_map_megatron(Placement(Layout.parse(layout).fit(ranks), tuple(range(ranks))))


def test_packed_schedules_are_read_as_they_were():
    c = config("qwen3_moe")
    moves = plan(job(c, "tp2-ep2-etp1", 4), servers(c, ("tp4-ep2", (4, 5, 6, 7)), ("tp2", (8, 9))), 4)
    schedules = [schedule(moves, rank, torch.bfloat16, 2**10) for rank in range(10)]
    assert unpack_schedules(pack_schedules(schedules)) == schedules


def test_packed_schedules_of_another_format_raise():
    text = json.loads(zlib.decompress(pack_schedules([]))) | {"format": 0}
    with pytest.raises(ValueError, match="format 0, this version of verl_mg reads"):
        unpack_schedules(zlib.compress(json.dumps(text).encode()))


def test_packed_schedules_with_another_dtype_raise():
    c = config("qwen3")
    moves = plan(job(c, "tp1", 1), servers(c, ("tp1", (1,))))
    text = zlib.decompress(pack_schedules([schedule(moves, 1, torch.bfloat16)]))
    with pytest.raises(ValueError, match=r"would travel as save, this version of verl_mg reads float32, bfloat16"):
        unpack_schedules(zlib.compress(text.replace(b'"bfloat16"', b'"save"')))


def test_joined_map_with_a_rank_twice_raises():
    with pytest.raises(ValueError, match="two of the shard maps"):
        servers(config("qwen3"), ("tp2", (4, 5)), ("tp1", (5,)))


def test_nccl_model_plan_with_servers_on_hosts_of_other_sizes_finishes():
    c = config("qwen3")
    # Servers of one host begin at a multiple of the job's ranks on a node.
    moves = plan(job(c, "tp2-pp2", 8), servers(c, ("tp2", (8, 9, 16, 17, 18, 19)), ("tp4", (24, 25, 26, 27))), 8)
    groups = groups_of(moves, 2**10)
    for size in (0, 2**10, 2**12):
        assert stuck_ranks(groups, Communicator(sorted(groups), 8, channels_per_peer=2), size) == {}
    traffic = moves.traffic(2)
    alone, two = sum(traffic[rank].received for rank in (8, 9)), range(16, 20)
    assert sum(traffic[rank].received for rank in two) == 2 * alone
    # The two servers on one host receive from outside at most what one of them needs.
    assert 0 < sum(traffic[rank].entered for rank in two) <= alone
