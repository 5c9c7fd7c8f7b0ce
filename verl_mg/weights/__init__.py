"""One weight table an architecture: which box of which Hugging Face tensor each parameter shard holds.

    table(config).megatron(layout, rank) -> {parameter: Shard}      the parameters of one rank of Megatron
    table(config).sglang(layout, rank)   -> {parameter: Shard}      ... of one rank of an SGLang engine
    table(config).transformers()         -> {parameter: Shard}      ... of the module of transformers
    table(config).huggingface()          -> {tensor: Shard}         the tensors of the checkpoint
    table(config).on_megatron(placement), .on_sglang, .on_modules -> Holdings of all ranks at once

Loading, saving and weight sync are all the same operation, an intersection of boxes.
"""

from verl_mg.weights.boxes import Box, Piece, Shard
from verl_mg.weights.catalogue import TensorInfo
from verl_mg.weights.holdings import Holdings, ListedHoldings, Place
from verl_mg.weights.model_config import HFConfig, read_config
from verl_mg.weights.table import SCORE, Head, WeightTable, table

__all__ = [
    "SCORE",
    "Box",
    "HFConfig",
    "Head",
    "Holdings",
    "ListedHoldings",
    "Piece",
    "Place",
    "Shard",
    "TensorInfo",
    "WeightTable",
    "read_config",
    "table",
]
