"""The task that every recipe is shown on."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from verl_mg.recipes.tasks import repeat_digit

Tasks = Callable[[int], Path]


@pytest.fixture(scope="session")
def tasks(tmp_path_factory) -> Tasks:
    """The folder of the task with the model and the data of a seed."""

    @cache
    def of(seed: int) -> Path:
        folder = tmp_path_factory.mktemp(f"letters-{seed}")
        repeat_digit.make(folder, seed)
        return folder

    return of
