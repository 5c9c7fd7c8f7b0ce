"""A rank that only fetches the models of a job: python tests/run/fetching.py '{"SECTION": "OWNER/NAME", ...}'"""

import json
import sys
from pathlib import Path

from tests.helpers.hub_server import forget_client
from verl_mg.config import Config
from verl_mg.distributed.world import World
from verl_mg.errors import UserError
from verl_mg.run.fetch_models import with_fetched_models


def fetch(names: dict[str, str]) -> None:
    world = World.join()
    sections = {section: {"path": name} for section, name in names.items()}
    config = Config.model_validate({"data": {"train": "x"}, "job": {"console": False}, **sections})
    try:
        fetched = with_fetched_models(config, world)
    except UserError as error:
        world.exit_with_user_error(error)
    folders: dict[str, Path] = {section: getattr(fetched, section).path for section in names}
    print(json.dumps({section: str(folder) for section, folder in folders.items()}))
    world.shut_down()


if __name__ == "__main__":
    forget_client()
    fetch(json.loads(sys.argv[1]))
