"""Parameters of quantized engines against SGLang's own loader, element by element."""

import json
import os
import subprocess

import pytest

from tests.helpers import warm_start
from tests.helpers.traces import folder_of, needs_sglang
from verl_mg.engines.sglang.arguments import ON_CPU, QUANTIZATIONS
from verl_mg.layout import EngineLayout, EnginePlacement
from verl_mg.models.hf_config import read_config
from verl_mg.reshard.encode import EncodedTarget, quantized_tensors
from verl_mg.reshard.encoding import FP8, MXFP8, Int4, encoding_of
from verl_mg.sharding.traced_table import read_rank_shards
from verl_mg.sharding.weight_table import weight_table

BLOCK = 8
ENCODINGS = {
    "fp8": FP8(rows=BLOCK, columns=BLOCK),
    "w8a8_fp8": encoding_of("fp8_channel"),
    "mxfp8": MXFP8(columns=BLOCK),
    "compressed-tensors": Int4(columns=BLOCK),
}
GROUP = QUANTIZATIONS["int4"]["config_groups"]["group_0"]
FIELDS = {
    "compressed-tensors": QUANTIZATIONS["int4"]
    | {"config_groups": {"group_0": GROUP | {"weights": GROUP["weights"] | {"group_size": BLOCK}}}},
    "fp8": {"fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]},
    "w8a8_fp8": {},
    "mxfp8": QUANTIZATIONS["mxfp8"] | {"weight_block_size": [1, BLOCK]},
}


def comparable(shards):
    """Shapes and pieces; the order of pieces is irrelevant, and padding is that of the vocabulary."""
    return {
        name: (
            shard.shape,
            sorted((piece.tensor.removesuffix("_packed"), piece.source, piece.target) for piece in shard.pieces),
        )
        for name, shard in shards.items()
    }


@needs_sglang
@pytest.mark.parametrize(
    ("family", "method", "layout"),
    [
        ("deepseek_v3", "fp8", "tp2-ep2"),
        ("qwen3_moe", "w8a8_fp8", "tp2"),
        ("qwen3", "mxfp8", "tp2"),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (
                ("qwen3", "fp8", "tp2"),
                ("qwen3", "compressed-tensors", "tp2"),
                ("gemma2", "compressed-tensors", "tp2"),
                ("qwen2", "w8a8_fp8", "tp2"),
                ("qwen3_moe", "fp8", "tp2-ep2"),
                ("mixtral", "fp8", "tp2"),
                ("llama", "w8a8_fp8", "tp2"),
                ("gemma2", "mxfp8", "tp2"),
                ("qwen2", "mxfp8", "tp2-pp2"),
                ("qwen3_5", "mxfp8", "tp2"),
                ("deepseek_v2_lite", "fp8", "tp2-pp2"),
                ("deepseek_v3", "fp8", "tp2-adp2"),
            )
        ),
    ],
)
def test_encoded_target_equals_load_weights_of_a_quantized_checkpoint(tmp_path, family, method, layout):
    table, encoding = weight_table(read_config(folder_of(family))), ENCODINGS[method]
    engine = EngineLayout.parse(layout)
    names, shapes = quantized_tensors(table), {}
    for name, shard in table.huggingface().items():
        if name not in names:
            shapes[name] = shard.shape
        else:
            shapes[name + encoding.value_suffix] = (*shard.shape[:-1], shard.shape[-1] // encoding.packed)
            shapes[name + encoding.scale_suffix] = encoding.grid(shard.shape)
    config = json.loads((folder_of(family) / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method} | FIELDS[method]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "job.json").write_text(json.dumps({"layout": layout, "shapes": shapes}))
    environment = os.environ | ON_CPU | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    command = [warm_start.sglang().python, "-m", "tests.engines.sglang.quantized_probe", str(tmp_path)]
    ranks = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(engine.ranks)]
    assert [process.wait() for process in ranks] == [0] * engine.ranks
    target = EncodedTarget(table.shard_map_engine(EnginePlacement(engine, tuple(range(engine.ranks)))), encoding, names)
    for rank in range(engine.ranks):
        traced = read_rank_shards(tmp_path / f"{rank}.json")
        assert comparable(target.shards(rank)) == comparable(traced), rank
