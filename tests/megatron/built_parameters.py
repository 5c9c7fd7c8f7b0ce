"""Parameters of real models on the ranks of a layout, and the weight table's of the same."""

from pathlib import Path

import torch
import torch.distributed as dist

from verl_mg.layout import Layout, Placement
from verl_mg.megatron.model import PackedModel, build_chunks, parameters_by_name
from verl_mg.megatron.process_groups import ParallelGroups
from verl_mg.models.hf_config import HFConfig
from verl_mg.sharding.megatron import Kernels
from verl_mg.sharding.weight_table import weight_table
from verl_mg.training.model_spec import ModelSpec

Shape = tuple[int, ...]


def build(configs: dict[str, HFConfig], text: str, kernels: Kernels = "torch") -> dict[str, list[PackedModel]]:
    """{family: its chunks on this rank}, all on the same groups."""
    groups = ParallelGroups(Placement.on(Layout.parse(text), dist.get_world_size()))
    spec = ModelSpec(Path(), torch.bfloat16, kernels=kernels)
    with groups.active():
        return {family: build_chunks(weight_table(c), groups, spec) for family, c in configs.items()}


def differences(
    configs: dict[str, HFConfig], text: str, kernels: Kernels = "torch"
) -> dict[tuple[str, str], tuple[Shape | None, Shape | None]]:
    """What table and model say differently on this rank: {(family, name): (shape by the table, in the model)}."""
    layout, found = Layout.parse(text).fit(dist.get_world_size()), {}
    for family, chunks in build(configs, text, kernels).items():
        shards = weight_table(configs[family]).megatron(layout, dist.get_rank(), kernels)
        expected = {name: shard.shape for name, shard in shards.items()}
        built = {name: tuple(tensor.shape) for name, tensor in parameters_by_name(chunks).items()}
        for name in expected.keys() | built.keys():
            if expected.get(name) != built.get(name):
                found[family, name] = (expected.get(name), built.get(name))
    return found
