"""Moves weights between two shard maps; each rank receives exactly the bytes that it needs and does not have.

plan(source, target)         -> Plan       pure: which box goes from which rank to which
schedule(plan, rank, dtype)  -> Schedule   pure: the messages of one rank, in buckets
execute(schedule, source, target)          fills the target's tensors in place, over a process group
"""

from verl_mg.reshard.chunking import split_into_chunks
from verl_mg.reshard.execute import Traffic, execute
from verl_mg.reshard.plan import Plan, RankPlan, RankTraffic, best_stride, plan
from verl_mg.reshard.schedule import BUCKET_BYTES, Schedule, schedule

__all__ = [
    "BUCKET_BYTES",
    "Plan",
    "RankPlan",
    "RankTraffic",
    "Schedule",
    "Traffic",
    "best_stride",
    "execute",
    "plan",
    "schedule",
    "split_into_chunks",
]
