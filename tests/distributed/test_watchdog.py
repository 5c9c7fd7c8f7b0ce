"""Watchdog: a rank that dies, hangs or raises is named, once, and all ranks of the job exit."""

import json
import re
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from torch.distributed import HashStore

from tests.helpers.counted_store import CountedStore
from tests.helpers.launched import (
    Program,
    error_lines,
    program_of,
    ranks_of,
    started,
    torchrun,
    train_command,
    watched,
    write_inputs,
)
from tests.helpers.s3_server import BUCKET
from verl_mg.config import JobConfig
from verl_mg.distributed import watchdog
from verl_mg.distributed.stall_dump import upload_dumps
from verl_mg.distributed.watchdog import (
    EXIT_RANK_LOST,
    HEARTBEAT_SECONDS,
    MAX_REQUESTS_PER_SECOND,
    REQUESTS_PER_HEARTBEAT,
    RankWatchdog,
    heartbeat_seconds,
)
from verl_mg.stores.bucket import Bucket
from verl_mg.stores.url import ObjectUrl


@pytest.mark.nightly  # the restart test stops a rank in the same way
def test_train_with_stopped_rank_names_it_with_its_stack(tmp_path):
    inputs = write_inputs(tmp_path / "inputs")
    command = [
        *torchrun(2, "--shutdown-timeout", "1"),
        *train_command(inputs, tmp_path / "run", "job.heartbeat_timeout_s=6"),
    ]
    with started(command) as launcher:
        launcher.iterations_done(tmp_path / "run", 2)
        time.sleep(2 * HEARTBEAT_SECONDS)  # until its heartbeat has a stack from inside the loop
        stopped = launcher.rank(1)
        stopped.send_signal(signal.SIGSTOP)
        code, _, err = launcher.ended()
    assert code == EXIT_RANK_LOST, err
    (line,) = error_lines(err)
    assert line.startswith("error: rank 1 (host ")
    seconds = int(line.partition(f"pid {stopped.pid}): no heartbeat for ")[2].partition(" s")[0])
    assert 6 <= seconds < JobConfig().heartbeat_timeout_s
    assert "It was last at " in line and "\n    verl_mg/run/loop.py:" in err
    assert "Traceback" not in err


def ends_of(ranks: Sequence[Program]) -> tuple[list[int], str]:
    ends = [rank.ended() for rank in ranks]
    return [end.code for end in ends], "".join(end.err for end in ends)


def test_launcher_with_killed_rank_exits_with_its_signal():
    with started([*torchrun(3), *watched(heartbeat_timeout_s=4)]) as launcher:
        launcher.wait_for_steps()
        killed = launcher.rank(2)
        killed.kill()
        code, _, err = launcher.ended()
    assert code == 128 + signal.SIGKILL, err
    (line,) = error_lines(err)
    assert "rank 2 (host " in line and f"pid {killed.pid})" in line


def dumped(output: Path, err: str, lost: int | None = None) -> dict[int, str]:
    """Stacks of the three ranks, of which all but the lost one have written the records of their collectives."""
    (folder,) = (output / "stalls").iterdir()
    assert f"The stacks and latest collectives of all ranks are in {folder}.\n" in err
    for rank in {0, 1, 2} - {lost}:
        records = json.loads((folder / f"rank-{rank}.gloo.json").read_text())["entries"]
        assert records[-1]["profiling_name"] == "gloo:all_reduce"
    return {rank: (folder / f"rank-{rank}.txt").read_text() for rank in range(3)}


@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.nightly)])
def test_watchdog_with_killed_rank_names_it_on_all_others(tmp_path, rank):
    with ranks_of(3, watched(heartbeat_timeout_s=4, output=tmp_path)) as ranks:
        ranks[0].wait_for_steps()
        killed = psutil.Process(program_of(ranks[rank].pid))
        killed.kill()
        codes, err = ends_of(ranks)
    assert codes == [-signal.SIGKILL if r == rank else EXIT_RANK_LOST for r in range(3)], err
    (line,) = error_lines(err)
    assert f"rank {rank} (host " in line and f"pid {killed.pid})" in line
    assert "It was last at verl_mg/" in line or "It was last at tests/distributed/watched.py:" in line
    assert "Traceback" not in err
    texts = dumped(tmp_path, err, lost=rank)
    assert texts[rank].startswith(f"rank {rank}, host {socket.gethostname()}, pid {killed.pid}: lost;")
    assert all("tests/distributed/watched.py" in text for text in texts.values())


@pytest.mark.nightly
def test_stacks_of_a_run_on_a_store_are_uploaded_by_each_rank_also_of_a_lost_one(s3, tmp_path):
    url = ObjectUrl(BUCKET, "stalled")
    with ranks_of(3, watched(heartbeat_timeout_s=4, output=url)) as ranks:
        ranks[0].wait_for_steps()
        psutil.Process(program_of(ranks[2].pid)).kill()
        codes, err = ends_of(ranks)
    assert codes == [EXIT_RANK_LOST] * 2 + [-signal.SIGKILL], err
    (place,) = re.findall(rf"of all ranks are in ({url}/stalls/\S+)\.\n", err)
    names = Bucket(url).sizes()
    folder = place.removeprefix(f"{url}/")
    files = ["rank-0.gloo.json", "rank-0.txt", "rank-1.gloo.json", "rank-1.txt", "rank-2.txt"]
    assert sorted(names) == [f"{folder}/{name}" for name in files]
    assert b": lost;" in Bucket(url).read(f"{folder}/rank-2.txt")


def test_stacks_that_a_store_does_not_take_stay_in_a_folder_that_is_named(s3, tmp_path, capfd):
    (tmp_path / "rank-1.txt").write_text("stack")
    upload_dumps(tmp_path, ObjectUrl("no-such-bucket", "run/stalls/1"), [1])
    reason = "s3://no-such-bucket/run/stalls/1/rank-1.txt: The specified bucket does not exist"
    assert capfd.readouterr().err.endswith(
        f"error: s3://no-such-bucket/run/stalls/1: stacks are not stored ({reason}). They are in {tmp_path}.\n"
    )


def test_watchdog_with_hanging_rank_names_its_function(tmp_path):
    code = "if rank == 1 and step == 5: hang()"
    with ranks_of(3, watched(code, stall_timeout_s=5, output=tmp_path)) as ranks:
        codes, err = ends_of(ranks)
    assert codes == [EXIT_RANK_LOST] * 3, err
    (line,) = error_lines(err)
    assert line.startswith("error: no progress on any rank for ") and "Rank 1 (host " in line
    assert "is not in a collective while the others are" in line
    assert line.endswith(" in hang.") and "tests/distributed/watched.py:" in line
    assert "\nrank 1:\n" in err and "\nranks 0, 2:\n" in err
    assert "Traceback" not in err
    texts = dumped(tmp_path, err)
    assert "in hang\n    time.sleep(1)" in texts[1] and "in hang" not in texts[0] + texts[2]
    assert all("dist.all_reduce(torch.zeros(4))" in texts[rank] for rank in (0, 2))
    assert all("thread Thread-" in text and "_store_guard_loop" in text for text in texts.values())


def test_watchdog_with_progress_on_one_rank_does_not_stall():
    """Rank 0 alone would exceed `stall_timeout_s`, but rank 1 makes progress."""
    code = (
        "[world.watchdog.watch_progress(lambda: time.monotonic()), time.sleep(8)] if rank == 1 and step == 3 else 0\n"
    )
    code += "if step == 5: raise UserError('enough')"
    with ranks_of(2, watched(code, heartbeat_timeout_s=4, stall_timeout_s=5)) as ranks:
        assert ends_of(ranks) == ([2, 2], "error: enough\n")


@pytest.mark.parametrize("condition", ["rank == 1", "True"])
def test_abort_on_one_or_all_ranks_prints_one_traceback(condition):
    with ranks_of(3, watched(f"if step == 3 and {condition}: raise KeyError('ouch')")) as ranks:
        codes, err = ends_of(ranks)
    assert codes == [1, 1, 1], err
    assert err.count("Traceback") == 1 and err.count("KeyError: 'ouch'") == 1
    assert not error_lines(err)


def test_user_error_on_one_rank_ends_ranks_that_sleep():
    code = "if step == 3:\n  if rank == 1: raise UserError('no ruler')\n  time.sleep(10**6)"
    with ranks_of(3, watched(code)) as ranks:
        assert ends_of(ranks) == ([2, 2, 2], "error: no ruler\n")


def test_watchdog_heartbeat_is_two_requests_whatever_the_number_of_ranks(monkeypatch):
    monkeypatch.setattr(watchdog, "HEARTBEAT_SECONDS", 0.05)
    shared, size = HashStore(), 5
    stores = [CountedStore(shared) for _ in range(size)]
    watched = [RankWatchdog(rank, size, store) for rank, store in enumerate(stores)]
    while not all(rank.heartbeat_ages() for rank in watched):  # until all have read the others once
        time.sleep(0.01)
    for store in stores:
        store.requests.clear()
    while any(len(store.requests) < 8 for store in stores):
        time.sleep(0.01)
    requests = [tuple(store.requests) for store in stores]
    for rank in watched:
        rank.stop()
    for sent in requests:
        assert len(sent) >= 8 and set(sent) == {"multi_set", "multi_get"}, sent
        assert abs(sent.count("multi_set") - sent.count("multi_get")) <= 1


@pytest.mark.parametrize("size", [2, 250, 1024, 4096])
def test_heartbeats_of_all_ranks_stay_below_the_limit_of_requests(size):
    assert size * REQUESTS_PER_HEARTBEAT / heartbeat_seconds(size) <= MAX_REQUESTS_PER_SECOND
    assert heartbeat_seconds(250) == HEARTBEAT_SECONDS and heartbeat_seconds(4096) < 20
