"""The index of samples: what it finds against a scan of the files, what is replaced, merged, damaged; real files."""

import random
import shutil
import subprocess
import sys
import time

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.view.agent_runs import write_agent_run
from tests.view.runs import GROUP, HOSTILE, PROMPTS, set_column, write_run, write_samples
from verl_mg.view import index_builder
from verl_mg.view.index import FOLDER, TAIL, SampleIndex, stored_segments
from verl_mg.view.index_builder import IndexBuilder
from verl_mg.view.samples import Samples
from verl_mg.view.search import Query
from verl_mg.view.segments import candidates, sign

COUNT = PROMPTS * GROUP
ITERATIONS = TAIL + 8


@pytest.fixture(autouse=True)
def settled(monkeypatch):
    """Files of tests are new, but complete, and all of them are read, however slow the machine is."""
    monkeypatch.setattr(index_builder, "SETTLED_SECONDS", -1.0)
    monkeypatch.setattr("verl_mg.view.index.READ_SECONDS", 600.0)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that no test changes, and its index."""
    folder = write_run(tmp_path_factory.mktemp("runs") / "run", ITERATIONS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_builder, "SETTLED_SECONDS", -1.0)
        build(folder)
    return folder


@pytest.fixture(scope="module")
def rows(run):
    return stored(run)


def build(folder):
    (folder / FOLDER).mkdir(exist_ok=True)
    IndexBuilder(folder / "samples", folder / FOLDER).update()


def indexed(index):
    """How many iterations are in the index on disk."""
    return len({iteration for item in stored_segments(index._folder, {}).values() for iteration in item.versions})


def segments(folder):
    return sorted(entry.name for entry in (folder / FOLDER).iterdir() if entry.is_dir())


def stored(folder):
    """All rows of the files, without the index."""
    files = sorted((folder / "samples").glob("*/rank-*.parquet"))
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    return sorted(rows, key=lambda row: (row["iteration"], row["call"], row["sample_id"]))


def ids(samples, **query):
    while samples.find(Query(limit=0, **query))["share"] < 1:
        pass
    search = samples.find(Query(limit=1000, **query))
    assert search["total"] == len(search["rows"])
    return [row["sample_id"] for row in search["rows"]]


# -- signatures


def test_candidates_contain_every_block_with_the_text():
    draw = random.Random(0)
    blocks = [bytes(draw.choices(b"abcdefg \xc3\xbc", k=draw.choice((2, 40, 900)))) for _ in range(45)]
    signatures = sign(blocks)
    excluded = 0
    for _ in range(300):
        block = draw.choice(blocks)
        begin = draw.randrange(len(block))
        text = block[begin : begin + draw.choice((1, 2, 3, 4, 6, 12))]
        possible = candidates(signatures, text)
        assert all(possible[number] for number, other in enumerate(blocks) if text in other)
        excluded += int((~possible[: len(blocks)]).sum())
    assert excluded > 1000 and not candidates(signatures, b"not one of them")[: len(blocks)].any()


# -- what is found


@pytest.mark.parametrize(
    ("query", "holds"),
    [
        ({"text": "PLUS 11 makes"}, lambda row, text: "plus 11 makes" in text),
        ({"text": "is"}, lambda row, text: "is" in text),
        ({"text": "ÜNÏ"}, lambda row, text: "ünï" in text),
        ({"text": HOSTILE}, lambda row, text: HOSTILE in text),
        ({"text": "?\n3"}, lambda row, text: False),  # the end of a prompt, the begin of a response
        ({"text": "makes  9", "words": True}, lambda row, text: "makes" in text and "9" in text),
        ({"text": "plus 11", "reward_from": 0.5}, lambda row, text: "plus 11" in text and row["reward"] >= 0.5),
        ({"text": "so on", "first": 5, "last": 9}, lambda row, text: "so on" in text and 5 <= row["iteration"] <= 9),
        ({"source": "none of these"}, lambda row, text: False),
        ({"source": "carry", "finish": "stop"}, lambda row, text: (row["source"], row["finish"]) == ("carry", "stop")),
        ({"reward_from": 0.25, "reward_to": 0.75}, lambda row, text: 0.25 <= row["reward"] <= 0.75),
        ({"length_from": 6, "length_to": 20}, lambda row, text: 6 <= len(row["tokens"]) - row["prompt_length"] <= 20),
        ({"prompt_id": 4, "first": 2, "last": 3}, lambda row, text: row["prompt_id"] == 4 and row["iteration"] == 3),
        ({"group": 7, "call": 0}, lambda row, text: row["group"] == 7),
        ({"text": "(.*"}, lambda row, text: False),
    ],
)
def test_search_finds_what_a_scan_finds(run, rows, query, holds):
    def text(row):
        return f"{row['prompt'].lower()}\n\0{row['response'].lower()}"

    assert len(segments(run)) == 1
    expected = [row["sample_id"] for row in rows if holds(row, text(row))]
    assert ids(Samples(run / "samples"), **query) == expected


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("sort", ["sample_id", "prompt_id", "reward", "length", "source", "finish", "policy_version"])
def test_pages_are_those_of_a_sorted_list(run, rows, sort, descending):
    samples = Samples(run / "samples")
    rows = [row | {"length": len(row["tokens"]) - row["prompt_length"]} for row in rows]
    rows.sort(key=lambda row: (row[sort], row["iteration"], row["sample_id"]), reverse=descending)
    for offset in (0, 7, 200, len(rows) - 3, len(rows)):
        page = samples.find(Query(sort=sort, descending=descending, offset=offset, limit=20))
        assert [row["sample_id"] for row in page["rows"]] == [row["sample_id"] for row in rows[offset : offset + 20]]


def test_rows_without_a_reward_are_last(tmp_path):
    run = write_run(tmp_path / "run", 1)
    rewards = [None if row % 3 else 0.5 for row in range(COUNT // 2)]
    set_column(run / "samples" / "000001" / "rank-0.parquet", "reward", rewards)
    for descending in (False, True):
        rows = Samples(run / "samples").find(Query(sort="reward", descending=descending, limit=100))["rows"]
        missing = [row["reward"] is None for row in rows]
        assert sum(missing) == 8 and missing == sorted(missing)


def test_long_search_continues_with_each_request(run, rows, monkeypatch):
    monkeypatch.setattr("verl_mg.view.samples.SEARCH_SECONDS", 0.0)
    monkeypatch.setattr("verl_mg.view.segments.BLOCK_BYTES", 100)
    samples, backwards = Samples(run / "samples"), Samples(run / "samples")
    for item in (samples, backwards):
        monkeypatch.setattr(item.index, "_folder", run / "none")  # blocks of this size, in memory
    expected = [row["sample_id"] for row in rows if "plus" in row["response"]]
    query = {"text": "plus", "first": 1, "last": 4}
    first, *_, second = (samples.find(Query(**query)) for _ in range(6))
    assert 0 < first["share"] < second["share"] < 1 and first["total"] < second["total"]
    assert [row["sample_id"] for row in second["rows"]] == expected[: second["total"]]
    assert ids(samples, **query) == [number for number in expected if number < 4 * COUNT]
    # What the list begins with is searched first.
    late = [backwards.find(Query(**query, descending=True)) for _ in range(6)][-1]
    assert late["share"] < 1 and late["rows"][0]["sample_id"] == ids(samples, **query)[-1]


def test_excerpt_begins_near_the_text(tmp_path):
    run = write_run(tmp_path / "run", 1)
    texts = ["word " * 1000 + "The Needle" + " word" * 1000] * (COUNT // 2)
    set_column(run / "samples" / "000001" / "rank-0.parquet", "response", texts)
    (row, *_) = Samples(run / "samples").find(Query(text="needle"))["rows"]
    assert "The Needle" in row["response"] and len(row["response"]) < 300


# -- what changes


def test_new_iterations_are_found_before_and_after_they_are_indexed(tmp_path):
    run = write_run(tmp_path / "run", ITERATIONS)
    build(run)
    samples, draw = Samples(run / "samples"), random.Random(0)
    assert len(ids(samples, text="plus 11", first=ITERATIONS + 1)) == 0
    for iteration in range(ITERATIONS + 1, ITERATIONS + TAIL + 2):
        write_samples(run, iteration, draw)
    expected = [row["sample_id"] for row in stored(run) if "11 plus" in row["response"]]
    assert ids(samples, text="11 plus") == expected
    build(run)
    assert len(segments(run)) == 2 and indexed(samples.index) == ITERATIONS + TAIL + 1
    assert ids(samples, text="11 plus") == ids(Samples(run / "samples"), text="11 plus") == expected


def test_replaced_iteration_is_indexed_again(tmp_path):
    run = write_run(tmp_path / "run", ITERATIONS)
    build(run)
    before = segments(run)
    shutil.rmtree(run / "samples" / "000003")  # as a resumed run does
    write_samples(run, 3, random.Random(77))
    shutil.rmtree(run / "samples" / "000009")
    expected = [row["sample_id"] for row in stored(run) if row["reward"] >= 0.5]
    assert ids(Samples(run / "samples"), reward_from=0.5) == expected
    build(run)
    assert segments(run) != before and ids(Samples(run / "samples"), reward_from=0.5) == expected


def test_small_segments_are_merged(tmp_path, monkeypatch):
    monkeypatch.setattr(index_builder, "SMALL_SEGMENTS", 3)
    monkeypatch.setattr(index_builder, "TAIL", 0)
    run, draw = write_run(tmp_path / "run", 2), random.Random(0)
    counts = []
    for iteration in range(3, 8):
        build(run)
        counts.append(len(segments(run)))
        write_samples(run, iteration, draw)
    assert counts == [1, 2, 1, 2, 1]
    samples = Samples(run / "samples")
    assert ids(samples, text="so on") == [row["sample_id"] for row in stored(run) if "so on" in row["response"]]
    assert ids(samples, source="carry") == [row["sample_id"] for row in stored(run) if row["source"] == "carry"]


def test_damaged_segment_is_built_again(tmp_path):
    run = write_run(tmp_path / "run", ITERATIONS)
    build(run)
    (run / FOLDER / ".half.partial").mkdir()  # what an interrupted builder leaves
    (name,) = (entry for entry in segments(run) if entry[0] != ".")
    for file in ("rows.arrow", "signatures.npy"):
        (run / FOLDER / name / file).write_bytes(b"damaged")
        assert len(ids(Samples(run / "samples"), first=4, last=4)) == COUNT
        build(run)
        assert segments(run) == [name] and indexed(SampleIndex(run / "samples")) == ITERATIONS


def test_index_of_agents_has_their_turns(tmp_path, monkeypatch):
    monkeypatch.setattr(index_builder, "TAIL", 0)
    run = write_agent_run(tmp_path / "run")
    queries = [{"turns_from": 3, "turns_to": 5}, {"agent": "failed"}, {"agent": "completed"}, {"trajectories": True}]
    before = [ids(Samples(run / "samples"), **query) for query in queries]
    build(run)
    samples = Samples(run / "samples")
    assert before == [ids(samples, **query) for query in queries] and all(before)
    assert samples.facets(None, None)["agents"] is True


# -- where it is


def test_index_that_cannot_be_written_is_temporary(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run = write_run(tmp_path / "run", TAIL + 2)
    (run / FOLDER).write_text("not a folder")
    index = SampleIndex(run / "samples")
    index.start()
    try:
        (folder,) = tmp_path.glob("verl-mg-view-*")
        deadline = time.monotonic() + 600
        while indexed(index) < TAIL + 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        found = index.segments(None, None)
        assert index.progress(found, None, None) == {"iterations": TAIL + 2, "indexed": TAIL + 2}
        assert index.progress(found, 3, 5) == {"iterations": 3, "indexed": 3} and len(found) == 1
    finally:
        index.close()
    assert not folder.exists() and (run / FOLDER).read_text() == "not a folder"


def test_one_of_two_builders_builds(tmp_path):
    run = write_run(tmp_path / "run", 1)
    (run / FOLDER).mkdir()
    index = SampleIndex(run / "samples")
    command = [sys.executable, "-m", "verl_mg.view.index_builder", str(run / "samples"), str(run / FOLDER)]
    with (run / FOLDER / "lock").open("w") as lock:
        index_builder.fcntl.flock(lock, index_builder.fcntl.LOCK_EX)
        for iteration in range(2, TAIL + 3):
            write_samples(run, iteration, random.Random(0))
        with subprocess.Popen(command) as process:
            time.sleep(0.2)
            assert indexed(index) == 0
            process.terminate()
    assert segments(run) == [] and np.all(index.iterations() == np.arange(1, TAIL + 3))
