"""Slices read from and boxes written to real safetensors files."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from verl_mg.checkpoint.hf_safetensors import CheckpointReader, CheckpointWriter, load_shards
from verl_mg.checkpoint.model_directory import ModelDirectory
from verl_mg.errors import UserError
from verl_mg.models.hf_config import INDEX, SINGLE
from verl_mg.sharding.boxes import Piece, Shard, full_box, slices

SHAPES = {"a": (6, 4), "b": (5,), "c": (2, 3, 4), "d": (7, 2)}
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
    for name, tensor in tensors.items():
        for number, cut in enumerate((slice(0, 3), slice(3, None))):  # two halves of the last dimension
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
    with CheckpointReader(ModelDirectory.find(tmp_path)) as reader:
        box = ((1, 3), (2, 4))
        assert torch.equal(reader.read("a", box), tensors["a"].to(dtype)[1:3, 2:4])


def test_checkpoint_writer_keeps_tensors_that_are_float32(tmp_path, tensors):
    writer = CheckpointWriter(tmp_path, WHOLE, torch.bfloat16, float32=["b"])
    writer.create()
    for name, tensor in tensors.items():
        writer.write(name, full_box(tensor.shape), tensor)
    expected = {name: tensor if name == "b" else tensor.bfloat16() for name, tensor in tensors.items()}
    read = load_file(tmp_path / SINGLE)
    assert {name: tensor.dtype for name, tensor in read.items()} == {n: tensor.dtype for n, tensor in expected.items()}
    assert all(torch.equal(read[name], tensor) for name, tensor in expected.items())


def test_load_shards_fills_requested_slices_and_zeroes_padding(tmp_path, tensors):
    save_file(tensors, tmp_path / SINGLE)
    shard = Shard((4, 2), (Piece("a", ((2, 5), (1, 3)), ((0, 3), (0, 2))),), padding=(((3, 4), (0, 2)),))
    parameter = torch.full((4, 2), torch.nan)
    with CheckpointReader(ModelDirectory.find(tmp_path)) as reader:
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
    (tmp_path / SINGLE).write_bytes(b"\x10" * 20)
    with pytest.raises(UserError, match="not a readable safetensors file"):
        ModelDirectory.find(tmp_path)


def test_model_directory_damaged_file_is_named_with_its_tensor(tmp_path, tensors):
    writer = CheckpointWriter(tmp_path, WHOLE, torch.float32, file_bytes=100)
    writer.create()
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


def test_model_directory_unsupported_dtype_is_user_error(tmp_path, tensors):
    save_file(tensors | {"a": tensors["a"].to(torch.int32)}, tmp_path / SINGLE)
    with pytest.raises(UserError, match="'a' is I32"):
        ModelDirectory.find(tmp_path).check(WHOLE)


def test_model_directory_unpacked_has_the_same_files(tmp_path, tensors):
    CheckpointWriter(tmp_path, WHOLE, torch.float32, file_bytes=100).create()
    found = ModelDirectory.find(tmp_path)
    assert len(set(found.file_of.values())) > 1
    assert ModelDirectory.unpacked(tmp_path, found.packed()).file_of == found.file_of
