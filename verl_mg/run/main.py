"""A job from the rendezvous of its ranks to their exit, for every launcher and interface."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from verl_mg.errors import UserError

if TYPE_CHECKING:
    from verl_mg.config import Config
    from verl_mg.job.recipe import Recipe


def run_recipe(load: Callable[[], tuple[Recipe, Config]], learns: bool = True, replayed: str | None = None) -> None:
    """Joins the other ranks, runs the recipe and exits with them. Invalid input: one line on one rank, exit code 2.

    Args:
        load: returns recipe and configuration. It is called after the rendezvous, so that one rank reports its errors.
        learns: whether models are trained; see `RunMode`.
        replayed: RUN@ITERATION to train on; see `RunMode`.
    """
    from verl_mg.distributed.world import World
    from verl_mg.run.fetch_models import with_fetched_models

    world = World.join()
    with world.signals.handled():
        try:
            recipe, config = load()
            world.set_timeouts(config.job)
            config = with_fetched_models(config, world)
            from verl_mg.run.loop import train
            from verl_mg.run.mode import RunMode

            train(recipe, config, world, RunMode(learns, replayed))
        except UserError as error:
            world.exit_with_user_error(error)
        except Exception as error:
            world.abort(error)
        world.shut_down()
    if world.signals.exit_code:
        sys.exit(world.signals.exit_code)
