"""The Megatron model against `transformers` on the same weights."""

import io
import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from tests.helpers.rank_pool import RankError
from tests.helpers.roles import megatron_runner
from tests.helpers.tiny_models import (
    LATENT,
    LINEAR,
    MIXTURES,
    TRAINED,
    nightly,
    oracle,
    oracle_outputs,
    random_rows,
    rows_for,
    tiny_model,
)
from verl_mg.checkpoint.hf_safetensors import CheckpointReader
from verl_mg.checkpoint.model_directory import ModelDirectories, ModelDirectory
from verl_mg.checkpoint.reader_assignment import ReaderShardMap
from verl_mg.checkpoint.safetensors_file import SafetensorsFile
from verl_mg.errors import UserError
from verl_mg.layout import Layout, Placement
from verl_mg.megatron.model_runner import MegatronRunner, check_layout
from verl_mg.megatron.process_groups import ParallelGroups
from verl_mg.models.hf_config import INDEX, SINGLE, read_config
from verl_mg.models.tiny_model import make_tiny_model
from verl_mg.sharding.boxes import numel, slices
from verl_mg.sharding.weight_table import weight_table
from verl_mg.training.model_spec import ModelSpec

LAYOUTS = [
    *(("tp1", 1, False), ("cp2", 2, False), ("tp2-pp2", 4, True)),
    *nightly(("tp1", 1, True), ("tp2", 2, False), ("pp3", 3, False), ("tp2-pp2", 4, False)),
]


@pytest.fixture(scope="module", params=[*TRAINED, *MIXTURES, *LATENT, *LINEAR])
def model(request, tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("models") / request.param, request.param)


def logprobs_and_entropy(model, layout, recompute):
    net = megatron_runner(model, layout, recompute=recompute)
    with torch.no_grad():
        reports = net.run(
            rows_for(model, 6).split([4, 2]),
            0.7,
            lambda micro, out: (out.sum(), {"entries": micro.token_index, "out": out}),
            forward_only=True,
        )
    return [(r["entries"], r["out"]) for r in reports] if net.is_output_rank_for(net.layout.cp) else None


@pytest.mark.parametrize("layout,count,recompute", LAYOUTS)
def test_logprobs_and_entropy_at_the_sampling_temperature_equal_transformers(ranks, model, layout, count, recompute):
    assert_equals_transformers(ranks, model, layout, count, recompute)


def assert_equals_transformers(ranks, model, layout, count, recompute=False, module=None):
    module, rows = module or oracle(model), rows_for(model, 6)
    answers = ranks.run(count, logprobs_and_entropy, model, layout, recompute)
    (answer,) = [part for part in answers if part is not None]
    with torch.no_grad():
        logprobs, entropy = oracle_outputs(module, rows, 0.7)
    assert logprobs.std() > 0.3
    sizes = [int(part.sum()) for part in rows.lengths.split([4, 2])]
    parts = (column.split(sizes) for column in (rows["loss_mask"] & (rows.positions > 0), logprobs, entropy))
    for (entries, out), mask, *wanted in zip(answer, *parts, strict=True):
        assert entries.tolist() == mask.nonzero().flatten().tolist()
        torch.testing.assert_close(out, torch.stack(wanted)[:, entries], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
        ("gemma2", {"layer_types": ["full_attention"] * 3 + ["sliding_attention"], "query_pre_attn_scalar": 3}),
        ("deepseek_v2", {"topk_method": "greedy", "rms_norm_eps": 0.1}),
        ("deepseek_v3", {"rope_interleave": False, "rms_norm_eps": 0.1}),
        ("deepseek_v3", {"norm_topk_prob": False, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}),
    ],
)
def test_logprobs_of_family_options_equal_transformers(ranks, tmp_path, name, fields):
    config = tiny_model(tmp_path / name, name) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    assert_equals_transformers(ranks, tmp_path / name, "tp2", 2)


@pytest.mark.parametrize(("model_type", "q_rank"), [("deepseek_v3", 0), ("kimi_k2", 12)])
def test_logprobs_of_moonlight_and_kimi_equal_transformers(ranks, tmp_path, model_type, q_rank):
    """One group of experts, queries without a low rank, a `model_type` that transformers does not know, and code."""
    options = {"experts": 8, "shared_experts": 2, "dense_layers": 1, "init_std": 0.2, "perturb": True}
    model = make_tiny_model(tmp_path, "deepseek_v3", hidden=32, layers=3, q_rank=q_rank, **options)
    module = oracle(model)
    code = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
    config = json.loads((model / "config.json").read_text()) | {"model_type": model_type, "auto_map": code}
    (model / "config.json").write_text(json.dumps(config))
    assert_equals_transformers(ranks, model, "tp2", 2, module=module)


def in_files(source, target, count):
    """Copies a model directory with its tensors distributed over `count` files; returns the tensors."""
    shutil.copytree(source, target)
    tensors = load_file(target / SINGLE)
    (target / SINGLE).unlink()
    names = sorted(tensors)
    parts = [names[len(names) * n // count : len(names) * (n + 1) // count] for n in range(count)]
    for number, part in enumerate(parts):
        save_file({name: tensors[name] for name in part}, target / f"{number}.safetensors")
    weight_map = {name: f"{number}.safetensors" for number, part in enumerate(parts) for name in part}
    (target / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return tensors


def said_of_unread(model, heads):
    """What roles with shared directories say about tensors of the files."""
    lines, directories = io.StringIO(), ModelDirectories()
    handler, placement = logging.StreamHandler(lines), Placement.on(Layout.parse("tp1"), 1)
    logging.getLogger("verl_mg.checkpoint.model_directory").addHandler(handler)
    for head in heads:
        MegatronRunner(ModelSpec(model, torch.float32, head=head), ParallelGroups(placement), directories=directories)
    logging.getLogger("verl_mg.checkpoint.model_directory").removeHandler(handler)
    return lines.getvalue().splitlines()


def test_load_tensors_of_files_that_config_json_has_no_place_for_are_named_once(ranks, tmp_path):
    model = tiny_model(tmp_path, "qwen2")
    assert ranks.run(1, said_of_unread, model, ["language", "language"]) == [[]]
    layers = len({name.split(".")[2] for name in load_file(model / "model.safetensors") if ".layers." in name})
    config = json.loads((model / "config.json").read_text())
    kept = config.get("layer_types", [])[: layers - 1]
    changed = {"num_hidden_layers": layers - 1} | ({"layer_types": kept} if kept else {})
    (model / "config.json").write_text(json.dumps(config | changed))
    ((line,),) = ranks.run(1, said_of_unread, model, ["language", "value"])
    assert f"model.layers.{layers - 1}.input_layernorm.weight" in line and "which are not read" in line


def load_counting(model, layout, dtype, roles):
    """Loads roles with shared headers; returns (elements read, opens) of each, and the parameters of the last."""
    directories, counts = ModelDirectories(), []
    read, opened = CheckpointReader.read, SafetensorsFile.__init__

    def counting_read(self, tensor, box):
        counts[-1][0] += numel(box)
        return read(self, tensor, box)

    def counting_open(self, path):
        counts[-1][1] += 1
        opened(self, path)

    CheckpointReader.read, SafetensorsFile.__init__ = counting_read, counting_open
    placement = Placement.on(Layout.parse(layout), dist.get_world_size())
    try:
        for head in roles:
            counts.append([0, 0])
            net = MegatronRunner(ModelSpec(model, dtype, head=head), ParallelGroups(placement), directories=directories)
    finally:
        CheckpointReader.read, SafetensorsFile.__init__ = read, opened
    readers = ReaderShardMap(net.shard_map(), ModelDirectory.find(model).file_of)
    planned = [elements[rank] for elements in readers.elements.values() if (rank := dist.get_rank()) in elements]
    return counts, planned, {name: weight.detach() for name, weight in net.parameters().items()}


@pytest.mark.parametrize(
    ("name", "layout", "count", "dtype"),
    [
        ("qwen3", "tp2", 4, torch.float32),
        ("deepseek_v3", "tp2-ep2", 4, torch.bfloat16),
        *nightly(("qwen3_moe", "tp2-pp2-ep2", 8, torch.bfloat16), ("gemma2", "pp2-vpp2", 4, torch.bfloat16)),
        *nightly(("qwen3", "tp2-cp2", 8, torch.float32)),
    ],
)
def test_model_runner_reads_each_element_once_over_all_ranks(ranks, tmp_path, name, layout, count, dtype):
    tensors = in_files(tiny_model(tmp_path / "one", name), tmp_path / "several", 5)
    results = ranks.run(count, load_counting, tmp_path / "several", layout, dtype, ["language", "language"])
    table = weight_table(read_config(tmp_path / "several"))
    elements = sum(tensors[name].numel() for name in table.huggingface())
    for role in range(2):
        opens = [counts[role][1] - (5 if rank == role == 0 else 0) for rank, (counts, _, _) in enumerate(results)]
        assert sum(counts[role][0] for counts, _, _ in results) == elements
        assert opens == [len(planned) for _, planned, _ in results]  # rank 0 opened all files once, for the headers
    assert [counts[1][0] for counts, _, _ in results] == [sum(planned) for _, planned, _ in results]
    assert max(counts[1][0] for counts, _, _ in results) < 0.6 * elements
    shards = table.shard_map_megatron(Placement.on(Layout.parse(layout), count))
    for rank, (_, _, parameters) in enumerate(results):
        for parameter, shard in shards.shards(rank).items():
            for piece in shard.pieces:
                values = parameters[parameter][slices(piece.target)]
                expected = tensors[piece.tensor][slices(piece.source)].to(values.dtype)
                assert torch.equal(values.view(expected.shape), expected), parameter


def test_model_runner_new_head_is_equal_on_all_replicas(ranks, tmp_path):
    model = tiny_model(tmp_path / "one", "qwen3")
    results = ranks.run(4, load_counting, model, "tp2", torch.float32, ["value"])
    heads = [parameters["output_layer.weight"] for _, _, parameters in results]
    assert heads[0].std() > 0 and all(torch.equal(head, heads[0]) for head in heads)


def test_model_runner_missing_tensor_is_reported_by_one_rank(ranks, tmp_path):
    in_files(tiny_model(tmp_path / "one", "qwen3"), tmp_path / "several", 3)
    index = tmp_path / "several" / INDEX
    weight_map = json.loads(index.read_text())["weight_map"]
    del weight_map["model.norm.weight"]
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(RankError, match=r"rank 0 of 2: (.|\n)*has no tensor 'model.norm.weight'"):
        ranks.run(2, load_counting, tmp_path / "several", "tp2", torch.float32, ["language"])


def empty_micro_batch(model):
    net = megatron_runner(model, "tp2")
    rows = random_rows(3, net.table.config.vocab).select([])
    reports = net.run([rows], 1.0, lambda micro, out: (out.sum(), {"n": out.shape[1]}), forward_only=True)
    odd = random_rows(1, net.table.config.vocab, longest=3)
    micro = net.pack(odd, 1, trains=False)
    return reports, micro.input_ids.shape[1]


def test_micro_batch_empty_runs_and_padding_is_below_tp(ranks, model):
    for reports, length in ranks.run(2, empty_micro_batch, model):
        assert reports == [{"n": 0}]
        assert length == 4  # 3 tokens and 1 that makes the sequence divisible by tp


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("tp3", "tp3 does not divide the 4 attention heads. Choose tp from 1, 2, 4."),
        ("tp4", "tp4 does not divide the 2 key-value heads"),
        ("pp5", "5 pipeline chunks are more than the model's 4 layers"),
        ("ep2", "ep2 distributes experts, but the model has none"),
        ("cp8", "cp8 does not divide the 4 attention heads. Choose cp from 1, 2, 4."),
        ("tp2-cp4", r"tp2-cp4 does not divide the 4 attention heads. Choose tp\*cp from 1, 2, 4."),
    ],
)
def test_check_layout_invalid_layout_raises(configs, layout, message):
    with pytest.raises(UserError, match=message):
        check_layout(configs["qwen3"], Layout.parse(layout), ModelSpec(Path(), torch.float32))
