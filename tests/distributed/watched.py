"""A job that only runs collectives: [python -m verl_mg.launch ...] watched.py HEARTBEAT_S STALL_S CODE [OUTPUT]

Each rank executes CODE in every step, with `rank`, `step` and `world`; dumps are in the folder OUTPUT.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from verl_mg.config import JobConfig
from verl_mg.distributed.world import World
from verl_mg.errors import UserError
from verl_mg.phase_timer import PhaseTimer
from verl_mg.stores.url import ObjectUrl


def main(heartbeat_timeout_s: float, stall_timeout_s: float, code: str, output: str = "") -> None:
    world, timer = World.join(), PhaseTimer()
    timeouts = {"heartbeat_timeout_s": heartbeat_timeout_s, "stall_timeout_s": stall_timeout_s}
    place = ObjectUrl.parse(output) or Path(output or "run")
    world.set_timeouts(JobConfig(output=place, dump_on_stall=bool(output), **timeouts))
    world.watch_progress(timer)
    with world.signals.handled():
        try:
            run_steps(world, timer, compile(code, "given", "exec"))
        except UserError as error:
            world.exit_with_user_error(error)
        except Exception as error:
            world.abort(error)
        world.shut_down()


def run_steps(world: World, timer: PhaseTimer, code: object) -> None:
    names = {"rank": world.rank, "world": world, "time": time, "os": os, "UserError": UserError, "hang": hang}
    step = 0
    while not world.signals.any_rank_stop_requested():
        step += 1
        with timer("work"):
            exec(code, names | {"step": step})
            dist.all_reduce(torch.zeros(4))
        if step == 2 and world.rank == 0:
            print("steps done", flush=True)
        time.sleep(0.01)


def hang() -> None:
    for _ in range(90):
        time.sleep(1)
    raise UserError("nothing has ended the rank that hangs")


if __name__ == "__main__":
    main(*sys.argv[1:])
