"""Ranks that only fetch the models of a job: python tests/run/fetching.py RANKS '{"SECTION": "OWNER/NAME", ...}'

They are forked, so that the client is imported once. The store is that of the process that forks them, as under
torchrun.
"""

import importlib
import json
import os
import sys
from pathlib import Path

from torch.distributed import TCPStore

from tests.helpers.hub_server import forget_client
from verl_mg.config import Config
from verl_mg.distributed.world import World
from verl_mg.errors import UserError
from verl_mg.run.fetch_models import with_fetched_models


def fetch(names: dict[str, str]) -> None:
    """Prints the folder of each section that is named."""
    world = World.join()
    sections = {section: {"path": name} for section, name in names.items()}
    config = Config.model_validate({"data": {"train": "x"}, "job": {"console": False}, **sections})
    try:
        fetched = with_fetched_models(config, world)
    except UserError as error:
        world.exit_with_user_error(error)
    folders: dict[str, Path] = {section: getattr(fetched, section).path for section in names}
    line = json.dumps({section: str(folder) for section, folder in folders.items()})
    os.write(sys.stdout.fileno(), f"{line}\n".encode())  # at once: lines of ranks do not mix
    world.shut_down()


def main(count: int, names: dict[str, str]) -> int:
    forget_client()
    importlib.import_module("huggingface_hub")  # not in each rank
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    pids = []
    for rank in range(count):
        pids.append(os.fork())
        if not pids[-1]:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
            fetch(names)
            os._exit(0)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), json.loads(sys.argv[2])))
