"""What the server returns of agents' conversations; and runs whose files have none."""

import json
import random

import pyarrow.parquet as pq
import pytest

from tests.view.agent_runs import (
    DAMAGED,
    ERROR,
    FAILED,
    FORKED,
    LOG,
    MAX_SEGMENTS,
    TRAJECTORIES,
    forked_conversation,
    write_agent_run,
)
from tests.view.runs import GROUP, PROMPTS, set_column, write_samples
from tests.view.serving import serving

ROWS = TRAJECTORIES + 2
"""In an iteration: FORKED has three segments."""
TURNS = {number: 4 if number == FORKED else number + 1 for number in range(TRAJECTORIES) if number != DAMAGED}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_agent_run(tmp_path_factory.mktemp("runs") / "agents")


def trajectories(found):
    return [row["trajectory"] for row in found["rows"]]


def test_samples_of_agents_have_turns_and_segments(ask):
    listed = ask("samples", first=1, last=1)
    assert listed["total"] == ROWS
    assert ask("facets", first=1, last=1)["agents"] is True
    for row in listed["rows"]:
        number = row["trajectory"]
        expected = {"agent_turns": TURNS.get(number), "agent_error": ERROR if number == FAILED else None}
        expected |= {"agent_segments": None if number == DAMAGED else 3 if number == FORKED else 1}
        expected["segment"] = None if number == DAMAGED else row["sample_id"] - number * MAX_SEGMENTS
        assert {name: row[name] for name in expected} == expected
    assert [row["segment"] for row in listed["rows"] if row["trajectory"] == FORKED] == [0, 1, 2]


@pytest.mark.parametrize(
    ("query", "holds"),
    [
        ({"turns_from": 4}, lambda number: TURNS.get(number, 0) >= 4),
        ({"turns_from": 2, "turns_to": 4}, lambda number: 2 <= TURNS.get(number, 0) <= 4),
        ({"agent": "failed"}, lambda number: number == FAILED),
        ({"agent": "completed", "turns_to": 3}, lambda number: TURNS.get(number, 9) <= 3),
        ({"agent": "completed", "text": "segment 2"}, lambda number: number == FORKED),
    ],
)
def test_samples_of_agents_are_filtered(ask, query, holds):
    segments = {number: 3 if number == FORKED else 1 for number in range(TRAJECTORIES)}
    segments[FORKED] = 1 if "text" in query else 3
    expected = [number for number in range(TRAJECTORIES) if holds(number) for _ in range(segments[number])]
    found = ask("samples", first=1, last=1, **query)
    assert trajectories(found) == expected and found["total"] == len(expected)
    assert ask("samples", **query)["total"] == 2 * len(expected)


def test_samples_of_agents_are_sorted_by_turns(ask):
    turns = [row["agent_turns"] for row in ask("samples", sort="agent_turns", descending="true")["rows"]]
    counted = [value for value in turns if value is not None]
    assert counted == sorted(counted, reverse=True) and turns[-2:] == [None, None]
    page = ask("samples", sort="agent_segments", descending="true", limit=3, first=2, last=2)
    assert trajectories(page) == [TRAJECTORIES + FORKED] * 3 and page["total"] == ROWS


@pytest.mark.parametrize("segment", [0, 2])
def test_conversation_of_any_segment_is_returned(ask, segment):
    sample = FORKED * MAX_SEGMENTS + segment
    answer = ask("conversation", iteration=1, call=0, sample_id=sample)
    assert answer["conversation"] == forked_conversation() and answer["conversation"]["log"].splitlines() == LOG
    assert answer["sample"]["sample_id"] == sample and answer["sample"]["parts"].keys() == {"exact", "form"}
    # Token columns are many times as large as the conversation.
    assert not any(isinstance(value, list) for value in answer["sample"].values())
    assert [(row["segment"], row["sample_id"]) for row in answer["rows"]] == [
        (number, FORKED * MAX_SEGMENTS + number) for number in range(3)
    ]
    assert "conversation" not in ask("sample", iteration=1, call=0, sample_id=sample)


def test_conversation_that_is_damaged_or_missing_is_not_found(ask):
    for sample in (DAMAGED * MAX_SEGMENTS, DAMAGED * MAX_SEGMENTS + 1):
        reason = ask("conversation", status=404, iteration=1, call=0, sample_id=sample)["error"]
        assert f"no conversation of sample {sample}" in reason
    assert ask("sample", iteration=1, call=0, sample_id=DAMAGED * MAX_SEGMENTS)["tokens"]


def test_samples_are_listed_once_for_each_trajectory(ask):
    every = ask("samples", trajectories="true")
    assert trajectories(every) == list(range(2 * TRAJECTORIES)) and every["total"] == 2 * TRAJECTORIES
    assert all(row["segment"] in (0, None) for row in every["rows"])
    page = ask("samples", trajectories="true", sort="reward", descending="true", limit=3, first=1, last=1)
    best = sorted(every["rows"][:TRAJECTORIES], key=lambda row: (-row["reward"], -row["sample_id"]))[:3]
    assert trajectories(page) == [row["trajectory"] for row in best] and page["total"] == TRAJECTORIES
    found = ask("samples", trajectories="true", text="segment 2", first=1, last=1)
    assert [row["segment"] for row in found["rows"]] == [2]


def test_prompts_count_a_trajectory_once(ask):
    assert [one["samples"] for one in ask("prompts", iteration=1)] == [GROUP] * (TRAJECTORIES // GROUP)


def test_iterations_with_and_without_conversations_are_listed_together(tmp_path):
    run = write_agent_run(tmp_path / "run", iterations=1)
    write_samples(run, 2, random.Random(0))
    with serving(run) as ask:
        assert ask("samples", limit=1000)["total"] == ROWS + PROMPTS * GROUP
        assert {row["agent_turns"] for row in ask("samples", first=2)["rows"]} == {None}
        assert ask("facets", first=1, last=1)["agents"] is True and ask("facets", first=2)["agents"] is False
        assert ask("samples", agent="completed")["total"] == ROWS - 2
        row = ask("samples", first=2)["rows"][0]
        assert row["trajectory"] == row["sample_id"]
        assert "error" in ask("conversation", status=404, iteration=2, call=0, sample_id=row["sample_id"])


def test_trajectory_on_two_ranks_has_each_row_once(tmp_path):
    run = write_agent_run(tmp_path / "run", iterations=1)
    target = run / "samples" / "000001"
    table = pq.read_table(target / "rank-1.parquet")
    place = table["trajectory"].to_pylist().index(FORKED)
    pq.write_table(table.slice(place + 1, 2), target / "rank-2.parquet")
    set_column(target / "rank-2.parquet", "conversation", [table["conversation"][place].as_py(), None])
    rest = table.filter([not place < row <= place + 2 for row in range(len(table))])
    pq.write_table(rest, target / "rank-1.parquet")
    with serving(run) as ask:
        rows = [row for row in ask("samples")["rows"] if row["trajectory"] == FORKED]
        assert [(row["segment"], row["agent_turns"]) for row in rows] == [(0, 4), (1, 4), (2, 4)]
        assert ask("samples", turns_from=1)["total"] == ROWS - 1
        answer = ask("conversation", iteration=1, call=0, sample_id=FORKED * MAX_SEGMENTS + 1)
        assert [row["segment"] for row in answer["rows"]] == [0, 1, 2]


def test_counts_of_a_replaced_file_are_read_again(tmp_path):
    run = write_agent_run(tmp_path / "run", iterations=1)
    file = run / "samples" / "000001" / "rank-0.parquet"
    with serving(run) as ask:
        before = ask("samples")["rows"][0]
        short = json.dumps({"turns": [], "segments": [{}], "log": "", "error": "it ended"})
        texts = pq.read_table(file)["conversation"].to_pylist()
        set_column(file, "conversation", [text and short for text in texts])
        after = ask("samples")["rows"][0]
    assert (before["agent_turns"], before["agent_error"]) == (1, None)
    assert (after["agent_turns"], after["agent_error"]) == (0, "it ended")


def test_conversation_of_agents_with_names_is_that_of_their_episode(tmp_path):
    # The first agent has the segments 0 and 2, the second one 1; numbers are as in recorded files.
    run = write_agent_run(tmp_path / "run", iterations=1)
    file = run / "samples" / "000001" / f"rank-{FORKED % 2}.parquet"
    table = pq.read_table(file)
    ids = zip(table["sample_id"].to_pylist(), table["trajectory"].to_pylist(), strict=True)
    numbers = [number + (2**40 if sample == FORKED * MAX_SEGMENTS + 1 else 0) for sample, number in ids]
    pq.write_table(table.set_column(table.schema.get_field_index("trajectory"), "trajectory", [numbers]), file)
    with serving(run) as ask:
        for segment in range(3):
            answer = ask("conversation", iteration=1, call=0, sample_id=FORKED * MAX_SEGMENTS + segment)
            assert answer["conversation"]["turns"] == forked_conversation()["turns"]
            assert [row["segment"] for row in answer["rows"]] == [0, 2, 1]
        listed = [row for row in ask("samples", trajectories="true")["rows"] if row["trajectory"] % 2**40 == FORKED]
        assert [row["segment"] for row in listed] == [0, 1]
