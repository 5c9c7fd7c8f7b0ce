"""A job that only runs collectives: python -m verl_mg.launch ... tests/distributed/watched.py HEARTBEAT_S STALL_S CODE

Each rank executes CODE in every step, with `rank`, `step` and `world`. With --serve it reads jobs as JSON lines from
standard input, forks their ranks and prints JSON lines: torch is imported once, not once for each rank of each test.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from verl_mg.config import JobConfig
from verl_mg.distributed.world import World
from verl_mg.errors import UserError
from verl_mg.phase_timer import PhaseTimer


def main(heartbeat_timeout_s: float, stall_timeout_s: float, code: str, output: str | None = None) -> None:
    world, timer = World.join(), PhaseTimer()
    timeouts = {"heartbeat_timeout_s": heartbeat_timeout_s, "stall_timeout_s": stall_timeout_s}
    world.set_timeouts(JobConfig(output=Path(output or "run"), dump_on_stall=output is not None, **timeouts))
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
    names = {"rank": world.rank, "world": world, "time": time, "UserError": UserError, "hang": hang}
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
    while True:
        time.sleep(1)


def serve() -> None:
    """Runs the jobs of standard input, one after the other."""
    for line in sys.stdin:
        job = json.loads(line)
        pids = [_fork_rank(job, rank) for rank in range(job["size"])]
        print(json.dumps({"pids": pids}), flush=True)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(json.dumps({"codes": codes}), flush=True)


def _fork_rank(job: dict[str, Any], rank: int) -> int:
    if pid := os.fork():
        return pid
    for name, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(job[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    size = str(job["size"])
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    # The store is that of the test's process, as it is that of the launcher's under torchrun.
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job["port"]), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    code = 0
    try:
        main(job["heartbeat_timeout_s"], job["stall_timeout_s"], job["code"], job["output"])
    except SystemExit as exit:
        code = int(exit.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["--serve"] else main(*sys.argv[1:])
