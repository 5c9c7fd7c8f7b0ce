"""Collectives over batches do not depend on the distribution of the rows."""

import os
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from verl_mg.batch import Batch
from verl_mg.distributed.collectives import (
    FIRST_BYTES,
    all_gather_bytes,
    all_gather_column,
    all_reduce_sum,
    global_kth_largest,
    raised_together,
    reassign_sample_ids,
)
from verl_mg.errors import UserError

COUNT = 7


def mine() -> Batch:
    """Rows of this rank in an arbitrary order; of three ranks the last has none."""
    batch = Batch([2, 3, 1, 2, 4, 2, 3])
    batch["sample_id"] = torch.tensor([50, 10, 40, 20, 60, 0, 30])
    batch["reward"] = batch["sample_id"].float() / 7
    batch["good"] = batch["sample_id"] > 25
    owners = max(dist.get_world_size() - 1, 1)
    return batch.select(range(dist.get_rank(), COUNT, owners) if dist.get_rank() < owners else [])


def collective_results() -> dict[str, object]:
    batch = mine()
    values = batch["reward"].double() ** 2
    twice = reassign_sample_ids(batch.select(torch.arange(len(batch)).repeat_interleave(2)))
    return {
        "total": all_reduce_sum(torch.stack([values.sum(), torch.tensor(len(batch), dtype=torch.float64)])),
        "reward": all_gather_column(batch, "reward"),
        "good": all_gather_column(batch, "good"),
        "ids": all_gather_column(batch, "sample_id"),
        "largest": [global_kth_largest(values, k) for k in (1, 3, COUNT, COUNT + 5)],
        "none": global_kth_largest(values[:0], 2),
        "renumbered": all_gather_column(twice, "sample_id"),
        "of": all_gather_column(twice, "reward"),
    }


def test_collectives_under_every_distribution_of_rows_agree_on_all_ranks(ranks):
    (alone,) = ranks.run(1, collective_results)
    ids = torch.arange(COUNT) * 10
    assert alone["ids"].tolist() == ids.tolist() and alone["good"].tolist() == (ids > 25).tolist()
    assert alone["reward"].dtype == torch.float32 and torch.equal(alone["reward"], ids.float() / 7)
    squares = sorted((alone["reward"].double() ** 2).tolist(), reverse=True)
    assert alone["largest"] == [squares[0], squares[2], squares[-1], squares[-1]]
    assert alone["none"] == float("inf") and alone["total"][1] == COUNT
    assert alone["renumbered"].tolist() == list(range(2 * COUNT))
    for count in (2, 3):
        for result in ranks.run(count, collective_results):
            assert torch.allclose(result["total"], alone["total"], rtol=1e-15)
            for name in ("reward", "good", "ids"):
                assert torch.equal(result[name], alone[name]), name
            assert result["largest"] == alone["largest"] and result["none"] == alone["none"]
            assert result["renumbered"].tolist() == list(range(2 * COUNT))
            assert sorted(result["of"].tolist()) == sorted(alone["of"].tolist())


def gathered_bytes(lengths):
    """Whether all ranks' bytes arrive, and the rounds for it."""
    rounds, all_gather = [], dist.all_gather

    def counting(*arguments, **options):
        rounds.append(1)
        all_gather(*arguments, **options)

    expected = [torch.arange(length).mul(rank + 3).to(torch.uint8) for rank, length in enumerate(lengths)]
    with mock.patch.object(dist, "all_gather", counting):
        got = all_gather_bytes(expected[dist.get_rank()])
    return all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), len(rounds)


def test_all_gather_bytes_of_short_tensors_is_one_round(ranks):
    assert ranks.run(3, gathered_bytes, [0, FIRST_BYTES, 7]) == [(True, 1)] * 3
    assert ranks.run(3, gathered_bytes, [FIRST_BYTES + 1, 5, 3 * FIRST_BYTES]) == [(True, 2)] * 3


def renumbered_trajectories() -> list[dict[str, int]]:
    """Rank 0 has two segments of trajectory 3 twice, rank 1 trajectory 5 once, and two of three segments of 4 twice."""
    rows = [(3, 0, 0), (3, 1, 0)] * 2 if dist.get_rank() == 0 else [(5, 0, 0), *[(4, 2, 1), (4, 0, 0)] * 2]
    batch = Batch([2] * len(rows))
    batch["trajectory"] = torch.tensor([trajectory for trajectory, _, _ in rows])
    batch["sample_id"] = torch.tensor([10 * trajectory + segment for trajectory, segment, _ in rows])
    batch["prefix_of"] = torch.tensor([10 * trajectory + prefix for trajectory, _, prefix in rows])
    batch["prefix_length"] = torch.tensor([1 if segment else 0 for _, segment, _ in rows])
    reassign_sample_ids(batch)
    names = ("sample_id", "trajectory", "prefix_of", "prefix_length")
    columns = zip(*(batch[name].tolist() for name in names), strict=True)
    return [dict(zip(names, row, strict=True)) | {"was": was} for row, was in zip(columns, rows, strict=True)]


def test_reassign_sample_ids_keeps_segments_of_each_copy_together(ranks):
    rows = [row for part in ranks.run(2, renumbered_trajectories) for row in part]
    assert sorted(row["sample_id"] for row in rows) == list(range(9))
    copies: dict[int, list[dict]] = {}
    for row in rows:
        copies.setdefault(row["trajectory"], []).append(row)
    segments = sorted(sorted((row["was"][0], row["was"][1]) for row in copy) for copy in copies.values())
    assert segments == [[(3, 0), (3, 1)]] * 2 + [[(4, 0), (4, 2)]] * 2 + [[(5, 0)]]
    for number, copy in copies.items():
        by_segment = {row["was"][1]: row for row in copy}
        assert number == by_segment[0]["sample_id"] == min(row["sample_id"] for row in copy)
        for row in copy:
            # Of trajectory 4 the segment that the last one repeats was not selected.
            prefix = by_segment.get(row["was"][2])
            expected = (prefix["sample_id"], int(row["was"][1] > 0)) if prefix else (row["sample_id"], 0)
            assert (row["prefix_of"], row["prefix_length"]) == expected


def threads_named(name):
    return sum((task / "comm").read_text().strip() == name for task in Path(f"/proc/{os.getpid()}/task").iterdir())


def sums_over_groups(groups):
    """Adds rank + 1 in new groups of all ranks, and returns the sums and this process's gloo event loops."""
    created = [dist.new_group(backend="gloo") for _ in range(groups)]
    numbers = [torch.tensor(float(dist.get_rank() + 1)) for _ in created]
    pairs = zip(numbers, created, strict=True)
    for work in [dist.all_reduce(number, group=group, async_op=True) for number, group in pairs]:
        work.wait()
    return [number.item() for number in numbers], threads_named("gloo_tcp_loop")


def raised(kinds: tuple[type[Exception], ...], errors: Sequence[Exception | None]) -> tuple[str, tuple[object, ...]]:
    try:
        with raised_together(*kinds):
            if error := errors[dist.get_rank()]:
                raise error
    except Exception as error:
        place = (error.filename,) if isinstance(error, OSError) else ()
        return type(error).__name__, (*error.args, *place)
    return "", ()


def test_raised_together_raises_the_first_error_of_any_rank_on_all(ranks):
    kinds = (UserError, OSError)
    assert ranks.run(2, raised, kinds, [None, None]) == [("", ())] * 2
    first = [UserError("a: wrong. Write b."), OSError(28, "No space left", "/a")]
    assert ranks.run(2, raised, kinds, first) == [("UserError", ("a: wrong. Write b.",))] * 2
    absent = [None, FileNotFoundError(2, "No such file", "/a")]
    assert ranks.run(2, raised, kinds, absent) == [("FileNotFoundError", (2, "No such file", "/a"))] * 2
    late = [TimeoutError("late"), None]
    assert ranks.run(2, raised, kinds, late) == [("OSError", (5, "late", ""))] * 2


def test_groups_of_a_process_share_one_event_loop(ranks):
    assert ranks.run(3, sums_over_groups, 12) == [([6.0] * 12, 1)] * 3


def sums_on_interfaces(interfaces):
    from verl_mg.distributed import world

    world._devices.cache_clear()
    os.environ["GLOO_SOCKET_IFNAME"] = interfaces
    try:
        return sums_over_groups(2)
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]
        world._devices.cache_clear()


def test_groups_on_two_interfaces_have_one_event_loop_for_each(ranks):
    # The default group was created before, on the default interface.
    assert ranks.run(2, sums_on_interfaces, "lo,lo") == [([3.0, 3.0], 3)] * 2
