"""What the server tells of runs: real files, real requests; a run that goes on, and requests that are not proper."""

import json
import random

import pytest

from tests.helpers.json_lines import write_lines
from tests.view.runs import GROUP, HOSTILE, PROMPTS, write_run
from tests.view.serving import fetch, serving

COUNT = PROMPTS * GROUP


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "first", iterations=3)


def ids(found):
    return [row["sample_id"] for row in found["rows"]]


def test_runs_contains_name_and_status(ask):
    (about,) = ask("runs")
    assert about["name"] == "first" and about["status"]["iteration"] == 3
    assert about["samples"] == [[1, 3]] and about["timeline"] == [1, 3]


# -- metrics


def latest(ask):
    return ask("runs")[0]["metrics"]["names"]


def curve(ask, *names, runs="[0]", **parameters):
    return ask("curves", runs=runs, names=json.dumps(names), **parameters)


def test_curves_follow_a_file_that_grows_and_is_replaced(tmp_path):
    run = write_run(tmp_path / "run", iterations=2)
    file = run / "metrics.jsonl"
    with serving(run) as ask:
        assert latest(ask)["eval/reward"] == 0.05
        assert curve(ask, "actor/loss")["actor/loss"]["steps"] == [1, 2]
        with file.open("a") as stream:
            stream.write('{"step": 3, "reward/me')
        before = ask("runs")[0]["metrics"]
        with file.open("a") as stream:
            stream.write('an": NaN, "text": "x"}\nnot json\n{"step": 4, "reward/mean": 0.25}\n{"step": "x"}\n')
        after = ask("runs")[0]["metrics"]
        assert after["version"] != before["version"] and after["names"]["reward/mean"] == 0.25
        reward = curve(ask, "reward/mean")["reward/mean"]
        assert reward["steps"] == [1, 2, 3, 4] and reward["values"][2:] == [None, 0.25] and "text" not in latest(ask)
        shorter = run / "metrics.jsonl.new"  # as a resumed run does
        shorter.write_text('{"step": 1, "reward/mean": 0.5}\n')
        shorter.replace(file)
        assert latest(ask) == {"reward/mean": 0.5}
        assert curve(ask, "reward/mean", "gone")["gone"]["steps"] == []


def test_curves_of_many_steps_keep_extremes(tmp_path, monkeypatch):
    monkeypatch.setattr("verl_mg.jsonl.MAX_READ_BYTES", 10_000)  # several reads
    run = write_run(tmp_path / "run", iterations=1)
    draw = random.Random(0)
    values = {step: draw.gauss(0, 1) for step in range(1, 5001)}
    values |= {1234: 50.0, 4321: -50.0, 2000: None}
    write_lines(run / "metrics.jsonl", [{"step": step, "x": value} for step, value in values.items()])
    with serving(run) as ask:
        shown = curve(ask, "x", pixels=100)["x"]
        points = dict(zip(shown["steps"], shown["values"], strict=True))
        assert len(points) < 500 and {1, 1234, 4321, 5000} <= points.keys()
        assert all(value == pytest.approx(values[step]) for step, value in points.items())
        for begin in range(1, 5001, 50):  # of each pixel the least and the largest value
            pixel = [value for step in range(begin, begin + 50) if (value := values[step]) is not None]
            assert {min(pixel), max(pixel)} <= {values[step] for step in points}
        part = curve(ask, "x", pixels=100, first=1200, last=1300, smoothing=0.5)["x"]
        assert part["steps"] == list(range(1200, 1301))
        mean = sum(0.5**back * values[1300 - back] for back in range(60)) / sum(0.5**back for back in range(60))
        assert part["smooth"][-1] == pytest.approx(mean)  # of all steps before, shown or not


def test_curves_of_seeds_have_a_mean_and_a_band(tmp_path):
    folders = [write_run(tmp_path / name, iterations=1) for name in ("one", "two", "three", "other", "none")]
    for number, folder in enumerate(folders):
        rate = "010" if folder.name == "other" else 1  # a text, as `load_config` reads it
        text = f"job: {{seed: {number}, output: {folder}}}\nactor: {{optimizer: {{lr: {rate}}}}}\n"
        (folder / "config.yaml").write_text(text if folder.name != "none" else "{")
        lines = [{"step": 1, "x": float(number)}, {"step": 2, "x": 3.0 * number}, {"step": 3 + number, "x": 7.0}]
        write_lines(folder / "metrics.jsonl", lines)
    with serving(*folders) as ask:
        groups = ask("groups")
        assert [group["runs"] for group in groups] == [[0, 1, 2], [3], [4]]
        assert groups[1]["differs"]["actor.optimizer.lr"] == "010"
        wide = curve(ask, "x", runs="[0, 1, 2]", band="range")["x"]
        assert wide["steps"] == [1, 2, 3, 4, 5] and wide["values"] == [1, 3, 7, 7, 7]
        assert (wide["low"], wide["high"]) == ([0, 0, 7, 7, 7], [2, 6, 7, 7, 7])
        narrow = curve(ask, "x", runs="[0, 1, 2]", band="error")["x"]
        # Standard deviations 1 and 3 (of n - 1), of three runs; of one run there is none.
        assert narrow["high"] == pytest.approx([1 + 3**-0.5, 3 + 3 * 3**-0.5, 7, 7, 7])


def test_run_without_files_is_empty(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").touch()
    with serving(run) as ask:
        about = ask("runs")[0]
        assert about["name"] == "run" and about["metrics"]["names"] == about["status"] == {}
        assert about["samples"] == about["timeline"] == [] and about["folder"] == str(run)
        assert curve(ask, "x") == {"x": {"steps": [], "values": [], "smooth": []}}
        assert curve(ask, "x", runs="[0, 0]")["x"]["steps"] == [] and ask("strip", first=1, stride=1) == {}
        assert ask("timeline", iteration=1) == []
        assert ask("samples")["total"] == 0 and ask("samples")["rows"] == []
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
    file = write_lines(run / "timeline" / "rank-7.jsonl", lines)
    file.write_text(file.read_text() + json.dumps({"iteration": 400, "start": 1, "spans": []}))
    with serving(run) as ask:
        assert ask("runs")[0]["timeline"] == [1, numbers[-1]]
        found = [[line["start"] for line in ask("timeline", iteration=i)] for i in range(301)]
        assert found == [[i] if i in numbers else [] for i in range(301)]
        assert ask("timeline", iteration=400) == []


# -- samples


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
        ("curves", {"runs": "[1]", "names": "[]"}, 404, "there are 1"),
        ("curves", {"runs": "[]", "names": "[]"}, 404, "there are 1"),
        ("curves", {"runs": "[true]", "names": "[]"}, 400, "not a list"),
        ("curves", {"runs": "[0]", "names": "[" * 9000}, 400, "not a list"),
        ("curves", {"runs": "[0]", "names": '["x"]', "pixels": 0}, 400, "write 0 to below 1"),
        ("curves", {"runs": "[0]", "names": '["x"]', "smoothing": 1}, 400, "write 0 to below 1"),
        ("strip", {"first": 1, "stride": 0}, 400, "write 1 or more"),
    ],
)
def test_request_invalid_parameters_are_rejected(ask, name, parameters, status, reason):
    assert reason in ask(name, status=status, **parameters)["error"]


def test_page_has_a_content_security_policy(run):
    with serving(run) as server:
        answer, body = fetch(server.viewer, "/")
        assert answer.status == 200 and b"<title>" in body
        policy = answer.getheader("Content-Security-Policy")
        assert "default-src 'none'" in policy and "unsafe" not in policy
        for path in ("/../run.py", "/%2e%2e/run.py", "/page/index.html", "//etc/passwd", "/config.yaml"):
            assert fetch(server.viewer, path)[0].status == 404
        assert fetch(server.viewer, "/", method="POST")[0].status == 501


def test_request_foreign_host_name_is_rejected(run):
    with serving(run) as server:
        assert fetch(server.viewer, "/api/runs", Host="evil.example")[0].status == 403
        assert fetch(server.viewer, "/api/runs", Host="[::1")[0].status == 400
        assert fetch(server.viewer, "/api/runs", Host="localhost:1234")[0].status == 200


def test_runs_with_equal_names_get_their_folder(tmp_path):
    folders = [write_run(tmp_path / parent / "run", iterations=1) for parent in ("first", "second")]
    with serving(*folders) as ask:
        assert [run["name"] for run in ask("runs")] == ["first/run", "second/run"]
