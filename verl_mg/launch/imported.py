"""Imports what every job needs, in the process of which ranks are forks; see `program`."""

import gc
import importlib
from contextlib import suppress

from verl_mg.run.job_imports import import_job

INTERFACES = ("verl_mg.cli", "verl_mg.api")  # programs of ranks

gc.disable()  # what is imported stays
# A rank imports what is missing again, and reports the error.
with suppress(Exception):
    import_job()
    for name in INTERFACES:
        importlib.import_module(name)
gc.enable()
# Ranks share these objects as long as nothing writes to them; a collection would, in each of them.
gc.freeze()
