"""Slices read from and boxes written to real safetensors files."""

import json
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from verl_mg.checkpoint.hf_safetensors import CheckpointReader, CheckpointWriter, load_shards, split_by_size
from verl_mg.checkpoint.model_directory import ModelDirectory
from verl_mg.checkpoint.reader_assignment import OVERLOAD, ReaderShardMap
from verl_mg.checkpoint.safetensors_file import DTYPE_NAMES, DamagedFileError, SafetensorsFile
from verl_mg.errors import UserError
from verl_mg.layout import Layout, Placement
from verl_mg.models.hf_config import INDEX, SINGLE, read_config
from verl_mg.sharding.boxes import Piece, Shard, full_box, numel, slices
from verl_mg.sharding.weight_table import weight_table

SHAPES = {"a": (6, 4), "b": (5,), "c": (2, 3, 4), "d": (7, 2), "scalar": ()}
WHOLE = {name: Shard(shape, (Piece(name, full_box(shape), full_box(shape)),)) for name, shape in SHAPES.items()}


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("file_bytes", [100, 10**9])
def test_checkpoint_writer_boxes_of_two_processes_form_the_tensors(tmp_path, tensors, dtype, file_bytes):
    writers = [CheckpointWriter(tmp_path, WHOLE, dtype, file_bytes) for _ in range(2)]
    writers[0].create()
    writers[0].write("scalar", (), tensors["scalar"])
    for name, tensor in tensors.items():
        for number, cut in enumerate((slice(0, 3), slice(3, None)) if tensor.dim() else ()):  # of the last dimension
            bounds = cut.indices(tensor.shape[-1])[:2]
            if bounds[0] < bounds[1]:
                box = (*full_box(tensor.shape[:-1]), bounds)
                writers[number].write(name, box, tensor[slices(box)])
    files = sorted(tmp_path.glob("*.safetensors"))
    assert (len(files) > 1) == (file_bytes == 100) == (tmp_path / INDEX).exists()
    read = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(read[name], tensor.to(dtype))
    reader = CheckpointReader(ModelDirectory.find(tmp_path))
    box = ((1, 3), (2, 4))
    assert torch.equal(reader.read("a", box), tensors["a"].to(dtype)[1:3, 2:4])
    assert torch.equal(reader.read("scalar", ()), tensors["scalar"].to(dtype))


def test_checkpoint_writer_keeps_tensors_that_are_float32(tmp_path, tensors):
    writer = CheckpointWriter(tmp_path, WHOLE, torch.bfloat16, dtypes={"b": torch.float32})
    writer.create()
    for name, tensor in tensors.items():
        writer.write(name, full_box(tensor.shape), tensor)
    expected = {name: tensor if name == "b" else tensor.bfloat16() for name, tensor in tensors.items()}
    read = load_file(tmp_path / SINGLE)
    assert {name: tensor.dtype for name, tensor in read.items()} == {n: tensor.dtype for n, tensor in expected.items()}
    assert all(torch.equal(read[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool])
def test_table_of_integers_is_loaded_and_exported_bit_for_bit(tmp_path, dtype):
    """Values beyond the 24 bits of float32, into a wider parameter."""
    table = torch.tensor([[2**30 + 1, 0], [1, 3]]).to(dtype)
    whole, box = {"t": Shard((2, 2), (Piece("t", *2 * [full_box((2, 2))]),))}, full_box((2, 2))
    writer = CheckpointWriter(tmp_path, whole, torch.bfloat16, dtypes={"t": dtype})
    writer.create()
    writer.write("t", box, table.long())
    directory, parameter = ModelDirectory.find(tmp_path), torch.zeros(2, 2, dtype=torch.int64)
    directory.check(whole, {"t": dtype})
    load_shards(CheckpointReader(directory), whole, {"t": parameter})
    assert torch.equal(parameter, table.long())
    read = load_file(tmp_path / SINGLE)["t"]
    assert read.dtype is dtype and torch.equal(read, table)
    for needed, message in ((torch.int16, "but I16 is needed"), (None, "supported are F32")):
        with pytest.raises(UserError, match=message):
            directory.check(whole, {"t": needed} if needed else None)


def test_load_shards_fills_requested_slices_and_zeroes_padding(tmp_path, tensors):
    save_file(tensors, tmp_path / SINGLE)
    shard = Shard((4, 2), (Piece("a", ((2, 5), (1, 3)), ((0, 3), (0, 2))),), padding=(((3, 4), (0, 2)),))
    parameter = torch.full((4, 2), torch.nan)
    reader = CheckpointReader(ModelDirectory.find(tmp_path))
    load_shards(reader, {"p": shard}, {"p": parameter})
    assert torch.equal(parameter, torch.cat([tensors["a"][2:5, 1:3], torch.zeros(1, 2)]))


def test_model_directory_missing_or_different_tensor_is_named(tmp_path, tensors):
    with pytest.raises(UserError, match=r"no model\.safetensors and no"):
        ModelDirectory.find(tmp_path)
    save_file(tensors, tmp_path / SINGLE)
    directory = ModelDirectory.find(tmp_path)
    directory.check(WHOLE)
    with pytest.raises(UserError, match=r"has no tensor 'x', .* the box \(\(0, 6\), \(0, 4\)\)"):
        directory.check(WHOLE | {"x": WHOLE["a"]})
    with pytest.raises(UserError, match=r"'a' has shape \(6, 4\), but \(6, 5\) in config.json"):
        directory.check(WHOLE | {"a": Shard((6, 5), ())})
    save_file(tensors | {"a": tensors["a"].to(torch.int32)}, tmp_path / SINGLE)
    with pytest.raises(UserError, match="'a' is I32"):
        ModelDirectory.find(tmp_path).check(WHOLE)
    (tmp_path / SINGLE).write_bytes(b"\x10" * 20)
    with pytest.raises(UserError, match="not a readable safetensors file"):
        ModelDirectory.find(tmp_path)


@pytest.mark.parametrize(
    ("files", "named", "reason"),
    [
        (["model.safetensors"], "model-1.safetensors", r"model\.safetensors is there too.* Remove the index"),
        (["model.safetensors", "model-1.safetensors"], "model-1.safetensors", "Remove model.safetensors, or the index"),
        (["model.safetensors", "old-1.safetensors"], "model.safetensors", None),
        (["model-1.safetensors", "old-1.safetensors", "model.bin"], "model-1.safetensors", None),
        (
            ["old-1.safetensors"],
            "model-1.safetensors",
            r"model-1\.safetensors: missing, although .*index.json",
        ),
        (["model-1.safetensors"], None, r"contains model-1\.safetensors, but no model.*index\.json names it"),
        (["adapter_model.safetensors"], None, "contains adapter_model.safetensors, but not the model"),
        (["model.safetensors", "adapter_config.json"], None, r"adapter_config\.json: adapters of another model"),
        (["model.bin"], None, "Convert the weights to safetensors files"),
    ],
)
def test_model_directory_of_two_models_or_none_is_named(tmp_path, tensors, files, named, reason):
    for file in files:
        save_file(tensors, tmp_path / file)
    if named:
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, named)}))
    if reason is None:
        ModelDirectory.find(tmp_path).check(WHOLE)
        return
    with pytest.raises(UserError, match=reason):
        ModelDirectory.find(tmp_path).check(WHOLE)


def test_model_directory_damaged_file_is_named_with_its_tensor(tmp_path, tensors):
    writer = CheckpointWriter(tmp_path, WHOLE, torch.float32, file_bytes=100)
    writer.create()
    found = ModelDirectory.find(tmp_path)
    assert ModelDirectory.unpacked(tmp_path, found.packed()).file_of == found.file_of
    parts = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    part = tmp_path / parts["c"]
    whole = part.read_bytes()
    part.write_bytes(whole[:-4])
    with pytest.raises(UserError, match=rf"{parts['c']}: not a readable .* the box .* of 'c'"):
        ModelDirectory.find(tmp_path).check(WHOLE)
    part.unlink()
    with pytest.raises(UserError, match=rf"{parts['c']}: missing.* the box .* of 'c'"):
        ModelDirectory.find(tmp_path).check(WHOLE)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {**parts, "c": parts["a"]}}))
    with pytest.raises(UserError, match="no tensor 'c' with the box .* although"):
        ModelDirectory.find(tmp_path).check(WHOLE)


CONFIGS = Path(__file__).parents[2] / "tools" / "model_configs"


def readers_of(model, layout, ranks, file_bytes):
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


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in DTYPE_NAMES])
def test_read_box_equals_the_slice_of_the_tensor(tmp_path, dtype):
    values = torch.arange(60).view(3, 4, 5).to(dtype)
    save_file({"first": torch.ones(3), "x": values, "none": torch.empty(0, 2), "last": torch.tensor(7)}, tmp_path / "f")
    file = SafetensorsFile(tmp_path / "f")
    assert torch.equal(file.read("x"), values) and file.read("x").dtype is dtype
    assert torch.equal(file.read("x", ((1, 3), (0, 4), (2, 3))), values[1:3, :, 2:3])
    assert file.read("none").shape == (0, 2) and file.read("last") == 7
    with pytest.raises(KeyError):
        file.read("y")


def test_read_of_an_unknown_dtype_raises(tmp_path):
    save_file({"x": torch.ones(4).to(torch.float8_e5m2)}, tmp_path / "f")
    file = SafetensorsFile(tmp_path / "f")
    assert file.tensors["x"].dtype == "F8_E5M2"
    with pytest.raises(DamagedFileError, match="F8_E5M2 of 'x'"):
        file.read("x")


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    "fields",
    [
        [],
        {"x": 1},
        {"x": {"dtype": "F32"}},
        {"x": entry(shape=(3,))},
        {"x": entry(shape=(-2,))},
        {"x": entry(shape="2")},
        {"x": entry(dtype=["F32"])},
        {"x": entry(offsets=(0, 4))},
        {"x": entry(offsets=(8, 16))},
        {"x": entry(offsets=(8, 0))},
        {"x": entry(), "y": entry()},
        {},
    ],
)
def test_open_damaged_header_raises(tmp_path, fields):
    text = json.dumps(fields).encode()
    (tmp_path / "f").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(SafetensorError):
        safe_open(tmp_path / "f", framework="pt")
    with pytest.raises(DamagedFileError):
        SafetensorsFile(tmp_path / "f")


@pytest.mark.parametrize("content", [b"", b"\x10" * 7, b"\xff" * 20, b"\x04\0\0\0\0\0\0\0{{{{"])
def test_open_what_is_no_safetensors_file_raises(tmp_path, content):
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(DamagedFileError):
        SafetensorsFile(tmp_path / "f")
