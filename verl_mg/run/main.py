"""A job from the meeting of its ranks to their end, whoever started them and however it was described."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from verl_mg.errors import UserError

if TYPE_CHECKING:
    from verl_mg.config import Config
    from verl_mg.job.recipe import Recipe


def run_recipe(
    described: Callable[[], tuple[Recipe, Config]], learns: bool = True, replayed: str | None = None
) -> None:
    """Join the other ranks, run, leave together; a user's mistake is one line on one rank and exit code 2.

    described: called when this rank has joined, so that what it refuses is told once. learns, replayed: see `RunMode`.
    """
    from verl_mg.distributed.world import World

    world = World.join()
    with world.signals.handled():
        try:
            recipe, config = described()
            world.set_timeouts(config.job)
            from verl_mg.run.loop import train
            from verl_mg.run.mode import RunMode

            train(recipe, config, world, RunMode(learns, replayed))
        except UserError as error:
            world.exit_with_user_error(error)
        except Exception as error:
            world.abort(error)
        world.shut_down()
