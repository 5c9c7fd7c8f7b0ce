"""Changes of weights: their code, and what members read of files of them."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from verl_mg.reshard.delta import (
    HEADER_BYTES,
    SLAB_ELEMENTS,
    Kind,
    Place,
    apply_delta,
    encode_delta,
    member_name,
    open_changes,
    write_changes,
)
from verl_mg.reshard.delta_transfer import apply_patches

DTYPES = [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int32, torch.int64]
HERE = torch.device("cpu")


def random_bits(shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def same_bits(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=3),
    st.sampled_from(DTYPES),
    st.sampled_from([0.0, 0.001, 0.02, 0.1, 0.3, 0.9, 1.0]),
    st.integers(0, 2**30),
)
def test_apply_delta_of_any_change_gives_the_new_bits(shape, dtype, share, seed):
    before, new = random_bits(shape, dtype, seed), random_bits(shape, dtype, seed + 1)
    changed = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    values = torch.where(changed, new.view(bits), before.view(bits)).view(dtype)
    target, kept = before.clone(), before.clone()
    code = encode_delta(values, kept)
    assert len(code) % 8 == 0 and len(code) <= HEADER_BYTES + values.nbytes + 7 + (values.numel() > 1) * 8
    assert same_bits(kept, values)
    assert apply_delta(code, target) and same_bits(target, values)
    # A box of a larger parameter, which is not contiguous.
    larger = torch.zeros([size + 3 for size in shape], dtype=torch.int64).to(bits).view(dtype)
    box = tuple(slice(1, 1 + size) for size in shape)
    larger[box] = before
    assert apply_delta(encode_delta(values, larger[box].clone()), larger[box]) and same_bits(larger[box], values)
    assert torch.equal(encode_delta(larger[box], before.clone()), code)
    larger.view(bits)[box] = 0
    assert int(larger.view(bits).count_nonzero()) == 0


@pytest.mark.parametrize(("share", "kind"), [(0.0, 0), (0.02, 1), (0.3, 2), (1.0, 3), (0.001, 4)])
def test_encode_delta_takes_the_smallest_form(share, kind):
    torch.manual_seed(0)
    before = torch.randn(1000, 100).bfloat16()
    values = torch.where(torch.rand(1000, 100) < share, before * 2, before)
    count = int((values != before).sum())
    code = encode_delta(values, before)
    assert code[:8].view(torch.int64).item() == Kind(kind)
    at_most = {0: 0, 1: 3.01 * count, 2: 2 * count + 12500, 3: values.nbytes, 4: 4 * count}[kind]
    assert len(code) <= HEADER_BYTES + at_most + 16


@pytest.mark.parametrize("columns", [40, 2_800_000 // 7])
def test_slabs_of_a_box_are_encoded_one_by_one(columns):
    before = torch.zeros(2_800_000 // columns, columns, dtype=torch.bfloat16)
    values, target = before.clone(), before.clone()
    places = torch.tensor([0, 1, 256, 257, 513, 33280, 66048, 2_200_000, 2_799_999])
    values.view(-1)[places] = torch.arange(1.0, 10.0).bfloat16()
    code = encode_delta(values, before)
    slabs = -(-before.shape[0] // (SLAB_ELEMENTS // columns))
    # Of each change 2 bytes and 2 of a distance, and 2 for each 32,767 elements without a change.
    assert len(code) <= slabs * (HEADER_BYTES + 14) + 4 * 9 + 2 * 2_800_000 // 32767
    assert apply_delta(code, target) and torch.equal(target, values) and torch.equal(before, values)
    assert not apply_delta(code[: -HEADER_BYTES - 8], target) and not apply_delta(torch.cat([code, code]), target)
    transposed = torch.zeros(columns, values.shape[0], dtype=torch.bfloat16).t()
    assert apply_delta(code, transposed) and torch.equal(transposed, values)


def test_apply_delta_of_a_damaged_code_or_other_base_is_refused():
    torch.manual_seed(0)
    before = torch.randn(50, 40).bfloat16()
    values = torch.where(torch.rand(50, 40) < 0.05, before + 1, before)
    code = encode_delta(values, before.clone())
    other = before.clone()
    other[7, 7] += 1
    assert not apply_delta(code, other) or values[7, 7] != before[7, 7]
    refused = 0
    for place in range(len(code)):
        damaged = code.clone()
        damaged[place] ^= 1 << (place % 8)
        target = before.clone()
        if apply_delta(damaged, target):
            assert same_bits(target, values)  # bytes that fill up a part
        else:
            refused += 1
    assert refused > len(code) - 16
    assert not apply_delta(code[:-8].clone(), before.clone())


def test_checksum_depends_on_values_and_places_and_not_on_strides():
    def checksum(values):
        return int(encode_delta(values, None)[:HEADER_BYTES].view(torch.int64)[3])

    values = random_bits((64, 32), torch.bfloat16, 1)
    number = checksum(values)
    assert checksum(values.t().contiguous().t()) == number != checksum(values.t())
    seen = {number}
    for place in range(0, 2048, 13):
        for bit in (0, 7, 15):
            changed = values.clone()
            changed.view(-1).view(torch.int16)[place] ^= -(2**15) if bit == 15 else 1 << bit
            seen.add(checksum(changed))
    assert len(seen) == 1 + 3 * len(range(0, 2048, 13))


def test_members_read_their_boxes_and_a_common_box_is_written_once(tmp_path):
    before = torch.arange(256, dtype=torch.bfloat16).view(8, 32)
    after = before.clone()
    after[3, 5], after[6, 30] = -1.0, 7.5
    first, second, third = (member_name("tp2", 0), member_name("tp2", 1), member_name("tp1", 0))
    top, bottom = ((0, 4), (0, 32)), ((4, 8), (0, 32))
    place = partial(Place, parameter="w", dtype=torch.bfloat16)
    changes = [
        (encode_delta(after[:4], before[:4].clone()), [place(first, box=top), place(third, box=top)]),
        (encode_delta(after[4:], before[4:].clone()), [place(second, box=top), place(third, box=bottom)]),
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
    complaint = "has the format verl_mg changes 9, this version .* reads verl_mg changes 3"
    with pytest.raises(ValueError, match=complaint), open_changes(tmp_path / "0.safetensors", "tp2/0"):
        pass
