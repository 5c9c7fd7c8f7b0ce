"""Reinforcement learning of language models as one SPMD program over megatron-core."""

import sys

from verl_mg.renamed import RenamedModuleFinder

__version__ = "0.1.0"

# Last in the path, so it is asked only for modules that no other finder knows.
sys.meta_path.append(RenamedModuleFinder())
