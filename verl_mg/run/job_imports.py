"""Imports what every job needs, quickly: in the process of which ranks are forks, or in the rank itself."""

import importlib

from verl_mg.quick_imports import quick_imports

IMPORTED = (
    "transformers.models.auto.tokenization_auto",
    "transformers.modeling_layers",
    "megatron.core.models.mimo",  # by megatron-core's optimizer, in a function
    "verl_mg.job.build_job",
    "verl_mg.run.loop",
)


def import_job() -> None:
    """Imports the modules of a job, of libraries only what it uses."""
    with quick_imports():
        for name in IMPORTED:
            importlib.import_module(name)
