"""Moving weights between two placements: a pure plan, and its execution over a process group.

    plan(source, target) -> Plan        no collective; every rank derives the same plan
    execute(plan, ...)                  fills the target's tensors in place
"""

from verl_mg.reshard.execute import execute
from verl_mg.reshard.plan import Holdings, Move, Plan, owners, plan

__all__ = ["Holdings", "Move", "Plan", "execute", "owners", "plan"]
