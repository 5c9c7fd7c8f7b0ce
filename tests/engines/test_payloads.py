"""Shards in memory that another process opens: one handle for all of them."""

import base64
import json
import os
import pickle

import pytest
import torch

from verl_mg.device import allocator_settings
from verl_mg.distributed.collectives import FIRST_BYTES
from verl_mg.engines import payloads
from verl_mg.engines.payloads import ALIGNMENT, Staging, named_views, open_payload, staging_bytes
from verl_mg.sharding.boxes import Piece, Shard

CPU = torch.device("cpu")
SHARDS = {
    "first": Shard((3, 5), (Piece("a", ((0, 3), (0, 5)), ((0, 3), (0, 5))),)),
    "padded": Shard((4, 2), (Piece("b", ((0, 3), (0, 2)), ((0, 3), (0, 2))),), (((3, 4), (0, 2)),)),
    "empty": Shard((0, 7), ()),
    "vector": Shard((9,), (Piece("c", ((0, 9),), ((0, 9),)),)),
    "scalar": Shard((), (Piece("d", (), ()),)),
    **{f"layer.{number}": Shard((1,), (Piece(f"f{number}", ((0, 1),), ((0, 1),)),)) for number in range(100)},
    "transposed": Shard((3, 2), (Piece("e", ((0, 3), (0, 2)), ((0, 3), (0, 2))),), order=(1, 0)),
}
DTYPES = dict.fromkeys(SHARDS, torch.float32) | {"first": torch.bfloat16, "empty": torch.bfloat16}


def filled(min_bytes=0):
    staging = Staging(SHARDS, DTYPES, CPU, min_bytes)
    for number, tensor in enumerate(staging.tensors.values()):
        tensor.fill_(number + 0.5)
    return staging


def test_payload_shares_one_memory_whatever_the_number_of_tensors(monkeypatch):
    shared, share = [], torch.UntypedStorage._share_filename_cpu_
    monkeypatch.setattr(
        torch.UntypedStorage, "_share_filename_cpu_", lambda storage: shared.append(storage) or share(storage)
    )
    staging = filled()
    shared.clear()
    text = staging.payload()
    assert len(shared) == 1
    assert len(json.dumps(text)) <= FIRST_BYTES, "ranks gather payloads in one round"
    received = dict(named_views(*open_payload(text, CPU)))
    assert received.keys() == SHARDS.keys()
    for name, tensor in received.items():
        assert tensor.dtype == DTYPES[name] and tensor.shape == SHARDS[name].parameter_shape
        assert torch.equal(SHARDS[name].described(tensor), staging.tensors[name])
    assert staging.tensors["transposed"].shape == (3, 2) and received["transposed"].shape == (2, 3)
    staging.tensors["first"].zero_()
    assert not received["first"].any(), "the memory itself has been passed, not its values"


def test_open_payload_with_anything_but_a_handle_raises():
    text = base64.b64encode(pickle.dumps(os.getcwd)).decode()
    with pytest.raises(pickle.UnpicklingError, match=r"getcwd is no part of a handle"):
        open_payload(text, CPU)


def test_open_payload_on_a_gpu_takes_the_index_of_this_process(monkeypatch):
    """torch's own reduction of a GPU tensor, but for the handle itself, which only CUDA can make."""
    rebuilt = []

    class Handle:
        def __reduce__(self):
            return _rebuild, (torch.Tensor, torch.Size((4,)), (1,), 0, torch.UntypedStorage, torch.uint8, 5, b"handle")

    def _rebuild(*arguments): ...

    _rebuild.__module__, _rebuild.__qualname__ = payloads.reductions.__name__, "rebuild_cuda_tensor"
    monkeypatch.setattr(payloads.reductions, "rebuild_cuda_tensor", _rebuild)
    text = base64.b64encode(pickle.dumps(Handle())).decode()
    held = payloads.SharedMemory("[]", 0, CPU)._whole
    monkeypatch.setattr(
        payloads.reductions, "rebuild_cuda_tensor", lambda *arguments: rebuilt.append(arguments) or held
    )
    assert open_payload(text, torch.device("cuda", 2))[0] == "[]"
    assert [arguments[6:] for arguments in rebuilt] == [(2, b"handle")]


def test_staging_aligns_tensors_zeroes_padding_and_has_at_least_the_asked_size(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(payloads.torch, "empty", lambda size, dtype, device: torch.full((size,), 255, dtype=dtype))
        staging = Staging(SHARDS, DTYPES, CPU, 50_000)
    first, *others = (tensor for name, tensor in staging.tensors.items() if name != "empty")
    assert first.untyped_storage().nbytes() == 50_000 > staging_bytes(SHARDS, DTYPES)
    assert all((tensor.data_ptr() - first.data_ptr()) % ALIGNMENT == 0 for tensor in others)
    assert not staging.tensors["padded"][3:].any()
    assert filled().tensors["first"].untyped_storage().nbytes() == staging_bytes(SHARDS, DTYPES)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_staging_on_a_gpu_is_allocated_without_expandable_segments(monkeypatch, device):
    before, seen, empty = allocator_settings(), [], torch.empty

    def on_cpu(size, dtype, device):
        seen.append(allocator_settings())
        return empty(size, dtype=dtype)

    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    try:
        monkeypatch.setattr(payloads.torch, "empty", on_cpu)
        Staging(SHARDS, DTYPES, torch.device(device))
    finally:
        torch._C._accelerator_setAllocatorSettings(before)
    assert seen == [f"expandable_segments:{device == 'cpu'}"]
