"""A job of collectives alone: python -m verl_mg.launch ... tests/distributed/watched.py LOST_AFTER STALLED_AFTER PYTHON

Each rank runs PYTHON in every step, with `rank`, `step` and `world`.
"""

import sys
import time

import torch
import torch.distributed as dist

from verl_mg.config import JobConfig
from verl_mg.distributed.world import World
from verl_mg.errors import UserError
from verl_mg.phase_timer import PhaseTimer


def main(heartbeat_timeout_s: str, stall_timeout_s: str, code: str) -> None:
    world, timer = World.join(), PhaseTimer()
    world.limit(JobConfig(heartbeat_timeout_s=heartbeat_timeout_s, stall_timeout_s=stall_timeout_s))
    world.watch_progress(timer)
    with world.signals.heeded():
        try:
            steps(world, timer, compile(code, "given", "exec"))
        except UserError as error:
            world.leave_with(error)
        except Exception as error:
            world.fail(error)
        world.leave()


def steps(world: World, timer: PhaseTimer, code: object) -> None:
    names = {"rank": world.rank, "world": world, "time": time, "UserError": UserError, "hang": hang}
    step = 0
    while not world.signals.asked_to_leave():
        step += 1
        with timer("work"):
            exec(code, names | {"step": step})
            dist.all_reduce(torch.zeros(4))
        if step == 2 and world.rank == 0:
            print("goes on", flush=True)
        time.sleep(0.01)


def hang() -> None:
    while True:
        time.sleep(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
