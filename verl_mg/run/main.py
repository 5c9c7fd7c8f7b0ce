"""A job from the rendezvous of its ranks to their exit, for every launcher and interface."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

import psutil

from verl_mg.distributed.launcher import STARTED, Launcher
from verl_mg.errors import UserError
from verl_mg.phase_timer import HostMemory, PhaseTimer

if TYPE_CHECKING:
    from verl_mg.config import Config
    from verl_mg.distributed.world import World
    from verl_mg.job.recipe import Recipe


def run_recipe(load: Callable[[], tuple[Recipe, Config]], learns: bool = True, replayed: str | None = None) -> None:
    """Joins the other ranks, runs the recipe and exits with them. Invalid input: one line on one rank, exit code 2.

    `load` returns recipe and configuration. It is called after the rendezvous, so that one rank reports its errors.
    `learns` and `replayed` are those fields of `RunMode`.
    """
    from verl_mg.run.fetch_models import with_fetched_models

    timer = PhaseTimer()
    timer.seconds |= _seconds_before()
    timer.memory = HostMemory()

    def work(world: World) -> None:
        with timer("configuration"):
            recipe, config = load()
            world.set_timeouts(config.job)
            config = with_fetched_models(config, world)
        # Imports megatron-core, which takes seconds: errors of the configuration come before it.
        with timer("imports"):
            from verl_mg.run.job_imports import import_job

            import_job()
            from verl_mg.run.loop import RunMode, train

        train(recipe, config, world, RunMode(learns, replayed), timer)

    on_all_ranks(work, timer=timer)


def on_all_ranks(work: Callable[[World], None], resumable: bool = True, timer: PhaseTimer | None = None) -> None:
    """Joins the other ranks, does the work of a job and exits with them. Invalid input: one line on one rank, code 2.

    Work that is not `resumable` is ended immediately by a signal that requests a stop.
    """
    timer = timer or PhaseTimer()
    with timer("imports"):
        from verl_mg.distributed.world import World

    with timer("rendezvous"):
        world = World.join()
    with world.signals.handled() if resumable else nullcontext():
        try:
            work(world)
        except UserError as error:
            world.exit_with_user_error(error)
        except Exception as error:
            world.abort(error)
        world.shut_down()
    if world.signals.exit_code:
        sys.exit(world.signals.exit_code)


def _seconds_before() -> dict[str, float]:
    """Returns the seconds from the command to the start of this process, and up to now."""
    created = psutil.Process().create_time()
    seconds = {"process": time.time() - created}
    launcher = Launcher.of_this_rank()
    if launcher and (started := launcher.number(STARTED)):
        seconds["launcher"] = created - started / 1000
    return seconds
