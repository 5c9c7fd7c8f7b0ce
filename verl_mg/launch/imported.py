"""Imports what every job needs, in the process of which ranks are forks; see `program`."""

import gc
from contextlib import suppress

from verl_mg.run.job_imports import import_job

gc.disable()  # what is imported stays
# A rank imports what is missing again, and reports the error.
with suppress(Exception):
    import_job()
    import verl_mg.api
    import verl_mg.cli  # noqa: F401
gc.enable()
# Ranks share these objects as long as nothing writes to them; a collection would, in each of them.
gc.freeze()
