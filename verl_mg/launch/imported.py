"""Imports what every job needs, in the process of which ranks are forks; see `program`."""

import gc
import importlib
from contextlib import suppress

IMPORTED = (
    "verl_mg.cli",
    "verl_mg.api",
    "verl_mg.run.main",
    "verl_mg.run.loop",
)

gc.disable()  # what is imported stays
for name in IMPORTED:
    # A rank that needs the module imports it again, and reports the error.
    with suppress(Exception):
        importlib.import_module(name)
gc.enable()
# Ranks share these objects as long as nothing writes to them; a collection would, in each of them.
gc.freeze()
