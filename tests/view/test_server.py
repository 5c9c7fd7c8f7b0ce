"""What the server tells of runs: real files, real requests; a run that goes on, and requests that are not proper."""

import json
import random

import pytest

from tests.view.runs import GROUP, HOSTILE, PROMPTS, write_run, write_samples
from tests.view.serving import fetch, serving

COUNT = PROMPTS * GROUP


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Three iterations that no test changes."""
    return write_run(tmp_path_factory.mktemp("runs") / "first", iterations=3)


@pytest.fixture(scope="module")
def ask(run):
    with serving(run) as ask:
        yield ask


def ids(found):
    return [row["sample_id"] for row in found["rows"]]


def test_runs_contains_name_and_status(ask):
    (about,) = ask("runs")
    assert about["name"] == "first" and about["status"]["iteration"] == 3
    assert about["samples"] == [1, 2, 3] and about["timeline"] == [1, 3]


# -- metrics


def test_metrics_returns_each_complete_line_once(tmp_path):
    run = write_run(tmp_path / "run", iterations=2)
    file = run / "metrics.jsonl"
    with serving(run) as ask:
        first = ask("metrics")
        assert [line["step"] for line in first["lines"]] == [0, 1, 2] and first["begin"] == 0
        with file.open("a") as stream:
            stream.write('{"step": 3, "reward/me')
        place = {"file": first["file"], "offset": first["end"]}
        assert ask("metrics", **place)["lines"] == []
        with file.open("a") as stream:
            stream.write('an": NaN}\nnot json\n{"step": 4}\n')
        assert ask("metrics", **place)["lines"] == [{"step": 3, "reward/mean": None}, {"step": 4}]
        shorter = run / "metrics.jsonl.new"  # as a resumed run does
        shorter.write_text('{"step": 1, "reward/mean": 0.5}\n')
        shorter.replace(file)
        anew = ask("metrics", **place)
        assert anew["begin"] == 0 and anew["lines"] == [{"step": 1, "reward/mean": 0.5}]


def test_metrics_long_file_is_returned_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr("verl_mg.jsonl.MAX_READ_BYTES", 1000)
    with serving(write_run(tmp_path / "run", iterations=40)) as ask:
        steps, part = [], {"file": "", "end": 0, "more": True}
        while part["more"]:
            part = ask("metrics", file=part["file"], offset=part["end"])
            steps += [line["step"] for line in part["lines"]]
    assert steps == list(range(41))


def test_run_without_files_is_empty(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").touch()
    with serving(run) as ask:
        assert ask("runs")[0] == {"name": "run", "folder": str(run), "status": {}, "samples": [], "timeline": []}
        assert ask("metrics")["lines"] == []
        assert ask("timeline", iteration=1) == []
        assert ask("samples") == {"total": 0, "rows": []}
        assert ask("facets") == {"source": [], "finish": [], "agents": False}
        assert ask("prompts", iteration=1) == []
        (run / "timeline").mkdir()
        (run / "timeline" / "rank-0.jsonl").write_text('{"iteration": 1, "st')
        (run / "status.json").write_text('{"half')
        (run / "samples" / "000001").mkdir(parents=True)
        (run / "samples" / "000001" / "rank-0.parquet.partial").write_text("half")
        assert ask("runs")[0]["timeline"] == [] and ask("runs")[0]["status"] == {}
        assert ask("timeline", iteration=1) == [] and ask("samples")["total"] == 0


# -- time lines


def test_timeline_returns_the_spans_of_each_rank(ask):
    lines = ask("timeline", iteration=2)
    assert [line["rank"] for line in lines] == [0, 1]
    assert lines[0]["start"] == 1.0e9 + 14 and lines[0]["spans"][0][:2] == ["generate", 0.0]
    assert ask("timeline", iteration=0) == ask("timeline", iteration=4) == []


@pytest.mark.parametrize("gaps", [1, 3])
def test_find_line_finds_every_complete_line(tmp_path, gaps):
    run = tmp_path / "run"
    (run / "timeline").mkdir(parents=True)
    draw = random.Random(0)
    numbers = list(range(1, 300, gaps))
    lines = [{"iteration": i, "start": i, "spans": [["x" * draw.randrange(9000), 0, 1]]} for i in numbers]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run / "timeline" / "rank-7.jsonl").write_text(text + json.dumps({"iteration": 400, "start": 1, "spans": []}))
    with serving(run) as ask:
        assert ask("runs")[0]["timeline"] == [1, numbers[-1]]
        found = [[line["start"] for line in ask("timeline", iteration=i)] for i in range(301)]
        assert found == [[i] if i in numbers else [] for i in range(301)]
        assert ask("timeline", iteration=400) == []


# -- samples


def test_samples_are_returned_in_pages(ask):
    whole = ask("samples", limit=1000)
    assert whole["total"] == 3 * COUNT and ids(whole) == list(range(3 * COUNT))
    assert set(whole["rows"][0]) >= {"iteration", "reward", "length", "finish", "source", "prompt", "response"}
    page = ask("samples", offset=10, limit=5)
    assert page["total"] == 3 * COUNT and ids(page) == list(range(10, 15))


def test_samples_are_sorted(ask):
    for name in ("reward", "length", "iteration", "source", "finish", "prompt_id"):
        for descending in (False, True):
            rows = ask("samples", sort=name, descending=str(descending).lower(), limit=1000)["rows"]
            values = [row[name] for row in rows]
            assert values == sorted(values, reverse=descending) and len(set(values)) > 1


@pytest.mark.parametrize(
    ("query", "holds"),
    [
        ({"first": 2, "last": 2}, lambda row: row["iteration"] == 2),
        ({"reward_from": 0.25, "reward_to": 0.75}, lambda row: 0.25 <= row["reward"] <= 0.75),
        ({"length_from": 6, "length_to": 20}, lambda row: 6 <= row["length"] <= 20),
        ({"finish": "length"}, lambda row: row["finish"] == "length"),
        ({"source": "carry", "finish": "stop"}, lambda row: row["source"] == "carry" and row["finish"] == "stop"),
        ({"prompt_id": 4}, lambda row: row["prompt_id"] == 4),
        ({"group": 7, "call": 0}, lambda row: row["group"] == 7),
        ({"text": "PLUS 11 makes"}, lambda row: "plus 11 makes" in row["response"]),
        ({"text": "is 3 +"}, lambda row: "is 3 +" in row["prompt"]),
        ({"text": "ÜNÏ"}, lambda row: "Ünï" in row["response"]),
        ({"text": "(.*", "first": 1}, lambda row: False),
    ],
)
def test_samples_are_filtered(ask, query, holds):
    everything = ask("samples", limit=1000)["rows"]
    wanted = [row["sample_id"] for row in everything if holds(row)]
    found = ask("samples", limit=1000, **query)
    assert ids(found) == wanted and found["total"] == len(wanted) < len(everything)
    assert wanted or query.get("text") == "(.*"


def test_sample_returns_all_columns(ask):
    whole = ask("sample", iteration=2, call=0, sample_id=COUNT + 1)
    assert [turn["by"] for turn in whole["turns"]] == ["policy", "tool", "policy"]
    assert whole["parts"].keys() == {"exact", "form"} and whole["answer"] == "26"
    tokens = len(whole["tokens"])
    columns = ("pieces", "loss_mask", "policy_versions", "advantages", "old_logprobs", "rollout_logprobs")
    assert all(len(whole[name]) == tokens for name in columns)
    assert whole["prompt"] + whole["response"] == "".join(whole["pieces"])
    assert ask("sample", iteration=1, call=0, sample_id=0)["response"].startswith(HOSTILE)
    assert "no sample" in ask("sample", status=404, iteration=2, call=1, sample_id=COUNT + 1)["error"]


def test_facets_and_prompts_of_an_iteration(ask, run):
    texts = {"source": ["carry", "sums"], "finish": ["length", "stop"]}
    assert ask("facets", first=1, last=1) == texts | {"agents": False}
    prompts = ask("prompts", iteration=2)
    assert [one["prompt_id"] for one in prompts] == list(range(PROMPTS, 2 * PROMPTS))
    rows = [row for row in ask("samples", first=2, last=2)["rows"] if row["prompt_id"] == PROMPTS]
    assert prompts[0]["samples"] == GROUP and prompts[0]["prompt"].startswith("What is 9 + 17")
    assert prompts[0]["reward"] == pytest.approx(sum(row["reward"] for row in rows) / GROUP)


def test_samples_damaged_file_does_not_hide_others(tmp_path):
    run = write_run(tmp_path / "run", iterations=1)
    (run / "samples" / "000001" / "rank-1.parquet").write_bytes(b"PAR1 and no more")
    with serving(run) as ask:
        assert ids(ask("samples")) == list(range(COUNT // 2))


def test_samples_new_files_appear(tmp_path):
    run = write_run(tmp_path / "run", iterations=1)
    with serving(run) as ask:
        assert ask("runs")[0]["samples"] == [1]
        write_samples(run, 2, random.Random(0))
        assert ask("runs")[0]["samples"] == [1, 2]
        assert ask("samples", first=2, last=2)["total"] == COUNT


# -- requests


@pytest.mark.parametrize(
    ("name", "parameters", "status", "reason"),
    [
        ("nothing", {}, 404, "no nothing"),
        ("samples", {"run": 1}, 404, "run=1"),
        ("samples", {"run": -1}, 404, "run=-1"),
        ("samples", {"run": "../.."}, 400, "not a number"),
        ("samples", {"sort": "__filename"}, 400, "not one of"),
        ("samples", {"agent": "tired"}, 400, "not one of failed, completed"),
        ("samples", {"turns_from": "x"}, 400, "not a number"),
        ("samples", {"limit": 10**6}, 400, "at most 1000"),
        ("samples", {"group": 10**30}, 400, "too large"),
        ("sample", {"iteration": "../../000001", "call": 0, "sample_id": 0}, 400, "not a number"),
        ("sample", {"iteration": 1, "call": 0}, 400, "sample_id is missing"),
        ("timeline", {}, 400, "iteration is missing"),
    ],
)
def test_request_invalid_parameters_are_rejected(ask, name, parameters, status, reason):
    assert reason in ask(name, status=status, **parameters)["error"]


def test_page_has_a_content_security_policy(run):
    server = serving(run)
    with server:
        answer, body = fetch(server.viewer, "/")
        assert answer.status == 200 and b"<title>" in body
        policy = answer.getheader("Content-Security-Policy")
        assert "default-src 'none'" in policy and "unsafe" not in policy
        for path in ("/../run.py", "/%2e%2e/run.py", "/page/index.html", "//etc/passwd", "/config.yaml"):
            assert fetch(server.viewer, path)[0].status == 404
        assert fetch(server.viewer, "/", method="POST")[0].status == 501


def test_request_foreign_host_name_is_rejected(run):
    server = serving(run)
    with server:
        assert fetch(server.viewer, "/api/runs", Host="evil.example")[0].status == 403
        assert fetch(server.viewer, "/api/runs", Host="[::1")[0].status == 400
        assert fetch(server.viewer, "/api/runs", Host="localhost:1234")[0].status == 200


def test_runs_with_equal_names_get_their_folder(tmp_path):
    folders = [write_run(tmp_path / parent / "run", iterations=1) for parent in ("first", "second")]
    with serving(*folders) as ask:
        assert [run["name"] for run in ask("runs")] == ["first/run", "second/run"]
