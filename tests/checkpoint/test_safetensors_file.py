"""The reader of safetensors files, against the files and the refusals of the safetensors package."""

import json

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from verl_mg.checkpoint.safetensors_file import DTYPE_NAMES, DamagedFileError, SafetensorsFile


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
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
