"""One weight table an architecture: which box of which Hugging Face tensor each parameter shard holds.

    table(config).megatron(layout, rank) -> {parameter: Shard}
    table(config).huggingface()          -> {tensor: Shard}

Loading, saving and weight sync are all the same operation, an intersection of boxes.
"""

from verl_mg.weights.boxes import Box, Piece, Shard
from verl_mg.weights.model_config import HFConfig, read_config
from verl_mg.weights.table import WeightTable, table

__all__ = ["Box", "HFConfig", "Piece", "Shard", "WeightTable", "read_config", "table"]
