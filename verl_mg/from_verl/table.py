"""The one table of keys of verl and what they are here, which the command and docs/coming_from_verl.md read."""

from verl_mg.from_verl.algorithm_rows import ALGORITHM, DATA
from verl_mg.from_verl.model_rows import MODELS
from verl_mg.from_verl.run_rows import RUN

ROWS = (*DATA, *ALGORITHM, *MODELS, *RUN)
"""All rows, in the order of the page."""
