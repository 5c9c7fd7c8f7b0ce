"""Which ranks form an engine: the stride at which the least has to be moved."""

from __future__ import annotations

from verl_mg.layout import EnginePlacement
from verl_mg.reshard.plan import plan
from verl_mg.sharding.shard_map import ShardMap
from verl_mg.sharding.weight_table import WeightTable


def best_stride(source: ShardMap, table: WeightTable, placement: EnginePlacement, node: int) -> EnginePlacement:
    """The placement at the admissible stride with the fewest bytes received; the smallest of equally good ones.

    HybridFlow (arXiv:2409.19256, section 5.3) groups ranks so that each finds its generation shard among its own
    training shards; engines of SGLang allow that by `base_gpu_id` and `gpu_id_step`.
    """

    def received(candidate: EnginePlacement) -> int:
        traffic = plan(source, table.shard_map_sglang(candidate), node).traffic(itemsize=2)
        return sum(rank.received for rank in traffic.values())

    candidates = list(placement.strides(node))
    return min(candidates, key=received) if len(candidates) > 1 else placement
