"""Waiting for what another thread or process does, as long as a busy machine may need."""

import time
from collections.abc import Callable

import pytest


def wait_until(is_true: Callable[[], object]) -> None:
    until = time.monotonic() + 600
    while not is_true():
        if time.monotonic() > until:
            pytest.fail("it takes longer than ten minutes")
        time.sleep(0.01)
