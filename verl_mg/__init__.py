"""Reinforcement learning of language models as one SPMD program over megatron-core."""

import sys

from verl_mg.renamed import RenamedModuleFinder

__version__ = "0.1.0"

sys.meta_path.append(RenamedModuleFinder())
