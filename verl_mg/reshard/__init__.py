"""Moving weights between two placements, each byte over the wire at most once.

    plan(source, target)         -> Plan       pure: which box goes from which rank to which
    schedule(plan, rank, dtype)  -> Schedule   pure: one rank's messages, in buckets
    execute(schedule, source, target)          fills the target's tensors in place, over a process group
"""

from verl_mg.reshard.execute import Traffic, execute
from verl_mg.reshard.plan import Plan, RankPlan, RankTraffic, plan
from verl_mg.reshard.portions import portions
from verl_mg.reshard.schedule import BUCKET_BYTES, Schedule, schedule
from verl_mg.reshard.share import aliases, shared
from verl_mg.reshard.stride import best_stride

__all__ = [
    "BUCKET_BYTES",
    "Plan",
    "RankPlan",
    "RankTraffic",
    "Schedule",
    "Traffic",
    "aliases",
    "best_stride",
    "execute",
    "plan",
    "portions",
    "schedule",
    "shared",
]
