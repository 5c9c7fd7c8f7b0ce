"""Which rank reads which box of a Hugging Face directory, on paper."""

from math import prod
from pathlib import Path

import pytest

from verl_mg.checkpoint.hf_safetensors import split_by_size
from verl_mg.checkpoint.reader_assignment import OVERLOAD, ReaderShardMap
from verl_mg.layout import Layout, Placement
from verl_mg.models.hf_config import read_config
from verl_mg.sharding.boxes import numel
from verl_mg.sharding.weight_table import weight_table

CONFIGS = Path(__file__).parents[2] / "tools" / "model_configs"


def readers_of(model, layout, ranks, file_bytes):
    """The assignment, and the number of files."""
    table = weight_table(read_config(CONFIGS / f"{model}.json"))
    files = split_by_size({name: info.shape for name, info in table.tensor_index.tensors.items()}, 2, file_bytes)
    file_of = {tensor: str(number) for number, tensors in enumerate(files) for tensor in tensors}
    whole = table.shard_map_megatron(Placement(Layout.parse(layout).fit(ranks), tuple(range(ranks))))
    return ReaderShardMap(whole, file_of), whole, len(files)


@pytest.mark.parametrize(
    ("model", "layout", "ranks"),
    [
        ("qwen2_5_7b", "tp4", 16),
        ("qwen2_5_7b", "tp2-pp2", 32),
        pytest.param("qwen3_30b_a3b", "tp2-ep8", 16, marks=pytest.mark.nightly),
    ],
)
def test_each_box_has_one_reader_that_has_it_and_the_work_is_balanced(model, layout, ranks):
    readers, whole, _ = readers_of(model, layout, ranks, 4 * 10**9)
    total = sum(prod(info.shape) for info in whole.tensors.values())
    load = []
    for rank in range(ranks):
        held = {(p.tensor, p.source, p.target) for shard in whole.shards(rank).values() for p in shard.pieces}
        read = [(p.tensor, p.source, p.target) for shard in readers.shards(rank).values() for p in shard.pieces]
        assert held.issuperset(read) and len(read) == len(set(read))
        load.append(sum(numel(box) for _, box, _ in read))
        assert load[-1] == sum(elements.get(rank, 0) for elements in readers.elements.values())
    assert sum(load) == total  # boxes of a tensor are disjoint
    assert max(load) < (OVERLOAD + 0.2) * total / ranks


def test_deepseek_v3_on_1024_ranks_opens_few_files():
    readers, _, files = readers_of("deepseek_v3", "tp8-pp32-ep16-etp1", 1024, 8_280_000_000)
    assert len(readers.elements) == files == 163
    assert sum(map(len, readers.elements.values())) < 1400
