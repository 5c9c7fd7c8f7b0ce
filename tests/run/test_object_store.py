"""Runs on an S3 server: equal to runs on a disk, interrupted at each place, and damaged."""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from urllib.request import urlopen

import pytest
import torch
import torch.distributed as dist

from tests.helpers.json_lines import read_lines
from tests.helpers.machine import Machine
from tests.helpers.rank_pool import RankError, RankPool, refusal
from tests.helpers.s3_server import BUCKET
from tests.helpers.tiny_jobs import metrics_of
from tests.helpers.waiting import wait_until
from tests.run.jobs import resumable_job
from verl_mg.checkpoint.safetensors_file import SafetensorsFile
from verl_mg.cli import main
from verl_mg.run.checkpointer import newest_intact
from verl_mg.stores.bucket import CHECK_STORE, PART_BYTES, Bucket
from verl_mg.stores.objects import MANIFEST, ObjectFolder, ObjectFolders
from verl_mg.stores.records import fetch_records
from verl_mg.stores.url import COPY_FIRST, ObjectUrl

SHORT = ["algorithm.prompts_per_iteration=2", "checkpoint.every=1"]
SAVED = [*SHORT, "checkpoint.export_every=2", "job.save=true"]


def stored_job(
    variables: Mapping[str, str], inputs: Path, url: ObjectUrl, iterations: int, settings: list[str], nodes: Path | None
) -> str:
    """A `resumable_job` on this rank; with a folder for `nodes` each rank has a disk of its own there."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        if nodes:
            patch.setenv("LOCAL_WORLD_SIZE", "1")
            patch.setattr(tempfile, "tempdir", str(nodes / str(dist.get_rank())))
            (nodes / str(dist.get_rank())).mkdir(exist_ok=True)
        return resumable_job("grpo", inputs, url, iterations, settings)


@pytest.fixture
def run(inputs, s3) -> Callable[..., list[str]]:
    """Runs a job whose output is on the server; returns the messages of the ranks."""

    def started(
        ranks: RankPool, url: ObjectUrl, iterations: int, settings: list[str] = SHORT, nodes: Path | None = None
    ) -> list[str]:
        return ranks.run(2, stored_job, s3.variables, inputs, url, iterations, settings, nodes)

    return started


@pytest.fixture(scope="module")
def whole(ranks, inputs, tmp_path_factory) -> Path:
    """The run of four iterations on a disk that no run on the server may differ from."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    ranks.run(2, resumable_job, "grpo", inputs, folder, 4, SAVED)
    return folder


def records_of(url: ObjectUrl, folder: Path) -> list[dict[str, float]]:
    fetch_records(Bucket(url), folder, lambda name: name == "metrics.jsonl")
    return metrics_of(folder)


def assert_same_run(url: ObjectUrl, whole: Path, folder: Path) -> None:
    """The metrics and the model, bit by bit."""
    assert records_of(url, folder) == metrics_of(whole)
    fetch_records(Bucket(url), folder, lambda name: name == "model/model.safetensors")
    ours, theirs = (SafetensorsFile(run / "model" / "model.safetensors") for run in (folder, whole))
    assert ours.tensors == theirs.tensors and ours.tensors
    assert all(torch.equal(ours.read(name), theirs.read(name)) for name in ours.tensors)


def damage(url: ObjectUrl, name: str) -> None:
    """Flips a bit in the middle of an object."""
    bucket = Bucket(url)
    content = bytearray(bucket.read(name))
    content[len(content) // 2] ^= 1
    bucket.put(name, [bytes(content)])


def test_run_with_a_lost_server_and_a_damaged_object_equals_one_on_a_disk(ranks, run, s3, whole, tmp_path):
    url = ObjectUrl(BUCKET, "runs/stored")
    with s3.lost_at("000002/rank-00001"):
        messages = run(ranks, url, 3, SAVED)
    lost = "job.output: lost the connection at s3://runs/runs/stored/checkpoints/000002/rank-00001.safetensors"
    assert lost in messages[1] and "attempt 2 of 9 in" in messages[1]
    bucket = Bucket(url)
    names = bucket.sizes()
    for folder in ("checkpoints/000002", "checkpoints/000003", "export/000002/model", "model"):
        manifest = json.loads(bucket.read(f"{folder}/{MANIFEST}"))
        assert {f"{folder}/{name}" for name in manifest} == {n for n in names if n.startswith(f"{folder}/")} - {
            f"{folder}/{MANIFEST}"
        }
        for name, (digest, size) in manifest.items():
            content = bucket.read(f"{folder}/{name}")
            assert (hashlib.sha256(content).hexdigest(), len(content)) == (digest, size)
    assert not any(name.startswith("checkpoints/000001") for name in names)  # checkpoint.keep=2
    written = (bucket.read("config.yaml") + bucket.read("status.json")).decode()
    assert f"output: {url}" in written and not any(value in written for value in list(s3.variables.values())[:3])

    damage(url, "checkpoints/000003/rank-00001.safetensors")
    messages = run(ranks, url, 4, SAVED)
    assert "000003/rank-00001.safetensors: damaged, its SHA-256 is not that of manifest.json: skipped" in messages[0]
    assert f"{url}: resumes after iteration 2" in messages[0]
    assert_same_run(url, whole, tmp_path)
    assert not url.working_folder.exists()


def test_status_of_a_run_on_a_store_is_printed(s3, capsys):
    # After the test above: the run is there.
    with pytest.raises(SystemExit) as exit:
        main(["status", "s3://runs/runs/stored"])
    assert exit.value.code == 0 and "iteration 4 of 4, on 2 ranks" in capsys.readouterr().out


def test_view_shows_a_run_on_a_store(s3):
    # After the first test.
    command = [sys.executable, "-m", "verl_mg", "view", "s3://runs/runs/stored"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | s3.variables) as process:
        try:
            url = process.stdout.readline().split()[1].decode()
            with urlopen(f"{url}api/runs", timeout=60) as answer:
                (run,) = json.load(answer)
            assert run["name"] == "stored" and run["status"]["state"] == "finished" and run["samples"] == [[1, 4]]
            with urlopen(f"{url}api/samples?run=0&first=4&last=4", timeout=60) as answer:
                assert json.load(answer)["rows"]
        finally:
            process.terminate()
            process.communicate()
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        (
            ["status", "s3://no-bucket/run"],
            {},
            f"s3://no-bucket/run: The specified bucket does not exist. {CHECK_STORE}",
        ),
        (["view", "s3://no-bucket/run"], {}, f"s3://no-bucket/run: The specified bucket does not exist. {CHECK_STORE}"),
        (["status", "s3://runs/absent"], {}, "s3://runs/absent: there is no run. Give the job.output of one."),
        (["status", "s3://runs/file"], {}, "s3://runs/file: there is no run. Give the job.output of one."),
        (
            ["view", "s3://runs/run"],
            {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"},
            "s3://runs/run: the connection was lost: EndpointConnectionError: ",
        ),
        (
            ["status", "s3://runs/run"],
            {"AWS_ENDPOINT_URL": "127.0.0.1:9"},
            "s3://runs/run: ValueError: Invalid endpoint",
        ),
        (
            ["status", "s3://runs/run"],
            {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""},
            f"s3://runs/run: NoCredentialsError: Unable to locate credentials. {CHECK_STORE}",
        ),
    ],
)
def test_place_that_has_no_run_is_an_error_of_one_line(s3, tmp_path, arguments, variables, message):
    Bucket(ObjectUrl(BUCKET, "file")).put("notes.txt", [b"a"])
    command = [sys.executable, "-m", "verl_mg", *arguments]
    environment = os.environ | s3.variables | {"HOME": str(tmp_path)} | variables
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr.startswith(f"error: {message}") and ended.stderr.count("\n") == 1
    assert ended.stderr.endswith((f"{CHECK_STORE}\n", "of one.\n"))


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        (["eval", "s3://runs/run"], "eval s3://runs/run"),
        (["eval", "--compare", "s3://runs/a", "b"], "--compare s3://runs/a"),
    ],
)
def test_command_that_takes_no_store_says_what_to_do(arguments, place, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and capsys.readouterr().err == f"error: {place}: {COPY_FIRST}.\n"


class LostAfterListing(ObjectFolders):
    """Folders of a store that a rank cannot reach after they were listed."""

    def __init__(self, url: ObjectUrl, local: Path, loses: bool) -> None:
        super().__init__(Bucket(url), local)
        self._loses = loses

    def open(self, name: str) -> ObjectFolder:
        if self._loses:
            os.environ["AWS_ENDPOINT_URL"] = "http://127.0.0.1:9"  # read at the first request
            self._bucket = Bucket(self._bucket.url, attempts=2, first_wait_s=0.01)
        return super().open(name)


def newest_of_lost(variables: Mapping[str, str], url: ObjectUrl, local: Path, all_lose: bool) -> str:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        rank = dist.get_rank()
        return refusal(newest_intact, LostAfterListing(url, local / str(rank), all_lose or rank == 1))


@pytest.mark.parametrize("all_lose", [True, False])
def test_checkpoints_of_a_store_that_is_lost_while_they_are_checked_are_not_skipped(ranks, s3, tmp_path, all_lose):
    # After the first test of the file: the checkpoints are there.
    url = ObjectUrl(BUCKET, "runs/stored/checkpoints")
    messages = ranks.run(2, newest_of_lost, s3.variables, url, tmp_path, all_lose)
    assert len(set(messages)) == 1 and messages[0].startswith(f"{url}/000004/manifest.json: the connection was lost")
    assert messages[0].endswith(". Start again when the store can be read.")


@pytest.fixture
def own_ranks() -> Iterator[RankPool]:
    """Ranks that may die."""
    pool = RankPool(Machine.this(2))
    yield pool
    pool.stop()


@pytest.mark.nightly
@pytest.mark.parametrize("held", ["000003/rank-00000", "000003/manifest.json"])
def test_run_killed_before_the_manifest_resumes_from_the_checkpoint_before(
    own_ranks, ranks, run, s3, whole, tmp_path, held
):
    url = ObjectUrl(BUCKET, f"runs/killed-{len(held)}")
    s3.hold(held)

    def kill() -> None:
        wait_until(s3.is_holding)
        s3.kill()  # with the request, so that it is never carried out
        for process, _ in own_ranks._workers:
            process.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(RankError, match="the process died"):
        run(own_ranks, url, 4, SAVED)
    killer.join()
    s3.release()
    s3.start()
    names = Bucket(url).sizes()
    assert "checkpoints/000003/rank-00001.safetensors" in names or "rank" in held
    assert f"checkpoints/000003/{MANIFEST}" not in names
    messages = run(ranks, url, 4, SAVED)
    assert f"{url}: resumes after iteration 2" in messages[0]
    assert_same_run(url, whole, tmp_path)


@pytest.mark.nightly
def test_store_that_stays_lost_leaves_the_last_checkpoint_and_the_run_says_so(
    own_ranks, run, s3, tmp_path, monkeypatch
):
    # With fewer attempts than in 91 s; its ranks are forked from here.
    monkeypatch.setattr(Bucket.__init__, "__defaults__", ("job.output", PART_BYTES, 2, 0.01))
    url = ObjectUrl(BUCKET, "runs/lost")
    s3.hold("000002/rank-00000")

    def kill() -> None:
        wait_until(s3.is_holding)
        s3.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(
        RankError, match=r"UserError: s3://runs/runs/lost/.* the last records are not stored \(the conn"
    ):
        run(own_ranks, url, 3)
    killer.join()
    s3.release()
    s3.start()
    assert f"checkpoints/000001/{MANIFEST}" in Bucket(url).sizes()
    assert f"checkpoints/000002/{MANIFEST}" not in Bucket(url).sizes()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rank-00000.safetensors", "rank-00000.safetensors: is missing, of the"),
        ("SHA256SUMS", "SHA256SUMS: is missing, of the"),
        (MANIFEST, ""),
    ],
)
def test_resume_without_an_object_takes_the_checkpoint_before(ranks, run, tmp_path, name, message):
    url = ObjectUrl(BUCKET, f"runs/without-{name.lower()}")
    run(ranks, url, 3)
    Bucket(url).remove([f"checkpoints/000003/{name}"])
    messages = run(ranks, url, 3)
    assert message in messages[0] and "resumes after iteration 2" in messages[0]


@pytest.mark.nightly
def test_nodes_without_a_common_disk_train_and_resume_in_another_layout(ranks, run, whole, tmp_path):
    url = ObjectUrl(BUCKET, "runs/nodes")
    with pytest.raises(RankError, match=r"which the nodes do not share\. Set TMPDIR to a folder that they share, or"):
        run(ranks, url, 2, SAVED, tmp_path)
    run(ranks, url, 2, SHORT, tmp_path)
    settings = [*SHORT, "actor.layout=tp2", "reference.layout=tp2"]
    messages = run(ranks, url, 4, settings, tmp_path)
    assert "resumes after iteration 2" in messages[0]
    ours, theirs = records_of(url, tmp_path), metrics_of(whole)
    assert [line["actor/loss"] for line in ours] == pytest.approx([line["actor/loss"] for line in theirs], abs=1e-5)
    fetched = fetch_records(Bucket(url), tmp_path / "all", lambda name: name.startswith("timeline"))
    assert len(read_lines(tmp_path / "all" / "timeline" / "rank-1.jsonl")) == 4 and "metrics.jsonl" in fetched
