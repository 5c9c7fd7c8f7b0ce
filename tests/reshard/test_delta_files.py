"""Files of changes: what members read of them."""

from functools import partial

import pytest
import torch
from safetensors.torch import save_file

from verl_mg.reshard.delta import encode_delta
from verl_mg.reshard.delta_files import Place, member_name, open_changes, write_changes
from verl_mg.reshard.delta_transfer import apply_patches

HERE = torch.device("cpu")


def test_members_read_their_boxes_and_a_common_box_is_written_once(tmp_path):
    before = torch.arange(256, dtype=torch.bfloat16).view(8, 32)
    after = before.clone()
    after[3, 5], after[6, 30] = -1.0, 7.5
    first, second, third = (member_name("tp2", 0), member_name("tp2", 1), member_name("tp1", 0))
    top, bottom = ((0, 4), (0, 32)), ((4, 8), (0, 32))
    place = partial(Place, parameter="w", dtype=torch.bfloat16)
    changes = [
        (encode_delta(after[:4], before[:4]), [place(first, box=top), place(third, box=top)]),
        (encode_delta(after[4:], before[4:]), [place(second, box=top), place(third, box=bottom)]),
    ]
    path = tmp_path / "0.safetensors"
    size = write_changes(path, changes)
    codes = sum(len(code) for code, _ in changes)
    assert size == path.stat().st_size and codes < size < codes + 1000
    for member, held, expected in (
        (first, before[:4], after[:4]),
        (second, before[4:], after[4:]),
        (third, before, after),
    ):
        parameters = {"w": held.clone()}
        with open_changes(path, member) as file:
            assert apply_patches(file.patches(HERE), parameters) and file.dtypes == {"w": "bfloat16"}
            assert file.nbytes == codes or member != third
        assert torch.equal(parameters["w"], expected)
    with open_changes(path, "tp8/3") as file:
        assert list(file.patches(HERE)) == []
    with pytest.raises(Exception, match="closed"):
        list(file.patches(HERE))


def test_file_of_another_format_is_refused(tmp_path):
    save_file({"codes": torch.zeros(8, dtype=torch.uint8)}, tmp_path / "0.safetensors", {"format": "verl_mg changes 9"})
    complaint = "has the format verl_mg changes 9, this version .* reads verl_mg changes 1"
    with pytest.raises(ValueError, match=complaint), open_changes(tmp_path / "0.safetensors", "tp2/0"):
        pass
