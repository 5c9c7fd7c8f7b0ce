"""Changes sent along schedules between 8 real ranks, against the whole transfer of the new weights."""

import pytest
import torch
import torch.distributed as dist

from tests.helpers.random_models import checkpoint
from tests.reshard.moves import CASES, RANKS, hold, room_for, shard_map_of
from verl_mg.reshard import execute, plan, schedule
from verl_mg.reshard.delta_transfer import SentValues, apply_patches, transfer_changes


def changed(tensors, share, seed):
    """Some elements of each tensor, the same ones on every rank, become others."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.where(torch.rand(tensor.shape, generator=generator) < share, -tensor, tensor)
        for name, tensor in tensors.items()
    }


def transfer_cases(family, node, bucket_bytes):
    """Each pair of layouts: a whole transfer, two of changes, and one into a damaged target; what went wrong."""
    c, cases = CASES[family]
    wrong, rank = [], dist.get_rank()
    for case in cases:
        source, target = (shard_map_of(c, side) for side in case)
        parts = schedule(plan(source, target, node), rank, torch.bfloat16, bucket_bytes)
        tensors = {name: tensor.bfloat16() for name, tensor in checkpoint(c, torch.float32).items()}
        got, sent = room_for(target, torch.bfloat16), SentValues()
        execute(parts, hold(source, tensors), got)
        sent.keep_all(parts, hold(source, tensors))
        for number, share in enumerate((0.03, 0.0, 0.5)):
            tensors = changed(tensors, share, number)
            patches, traffic = transfer_changes(parts, hold(source, tensors), sent)
            if not apply_patches(patches, got):
                wrong.append(f"{case}: the checksum of step {number}")
            expected = hold(target, tensors)
            wrong += [f"{case}: {name} in step {number}" for name in got if not torch.equal(got[name], expected[name])]
            segments = sum(len(m.segments) for b in parts.buckets for m in b.messages if not m.outgoing)
            if share == 0.0 and traffic.bytes_received != 40 * segments:
                wrong.append(f"{case}: {traffic.bytes_received} bytes for {segments} boxes without a change")
        patches, _ = transfer_changes(parts, hold(source, tensors), sent)
        if got:
            name = next(name for name in got if "norm" in name)
            got[name].view(torch.int16)[0] ^= 1
            if apply_patches(patches, got):
                wrong.append(f"{case}: a damaged target has the checksum")
        patches, _ = transfer_changes(parts, hold(source, tensors), SentValues())
        intact, expected = apply_patches(patches, got), hold(target, tensors)
        if not intact or any(not torch.equal(got[name], expected[name]) for name in got):
            wrong.append(f"{case}: all elements")
    return wrong


@pytest.mark.parametrize(
    ("family", "node"),
    [("mixtral", 2), *(pytest.param(name, 2, marks=pytest.mark.nightly) for name in CASES if name != "mixtral")],
)
def test_transfer_changes_gives_the_weights_of_a_whole_transfer(ranks, family, node):
    assert ranks.run(RANKS, transfer_cases, family, node, 4000) == [[]] * RANKS
