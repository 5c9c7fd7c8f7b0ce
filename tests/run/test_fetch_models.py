"""Models by their names on a hub, fetched by real ranks from a real server: once for a node, and again after a kill."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers.hub_server import COMMIT, HubServer, serving
from tests.helpers.launched import ROOT, Program, error_lines, finished, ranks_of, torchrun, train_command
from tests.helpers.tiny_jobs import logged, write_sums
from tests.helpers.tiny_models import tiny_model
from verl_mg.errors import EXIT_CODE

FIRST, SECOND = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
MODEL = {"config.json": b"{}", FIRST: b"first" * 1000, SECOND: b"second" * 1000, "model.gguf": b"not wanted"}
CRITIC = {"config.json": b'{"of": "critic"}'}


@contextmanager
def fetching(hub: HubServer, home: Path, names: dict[str, str], **more: str) -> Iterator[list[Program]]:
    program = [str(ROOT / "tests" / "run" / "fetching.py"), json.dumps(names)]
    with ranks_of(2, program, **hub.variables(home) | more) as ranks:
        yield ranks


def folders(ranks: list[Program]) -> list[dict[str, str]]:
    return [json.loads(rank.ended().completed().out) for rank in ranks]


def refusal(ranks: list[Program]) -> str:
    """The line that one of the ranks prints."""
    ends = [rank.ended() for rank in ranks]
    (line,) = [line for end in ends for line in error_lines(end.err)]
    assert {end.code for end in ends} == {EXIT_CODE}
    return line


def test_model_whose_download_was_killed_is_completed_by_the_next_start(tmp_path):
    names = {"model": "a/model", "critic": "a/critic@v1"}
    with serving({"a/model": MODEL, "a/critic": CRITIC}, {}, held=SECOND) as hub:
        with fetching(hub, tmp_path, names):
            assert hub.held.acquire(timeout=600)
        snapshot = tmp_path / "hub" / "models--a--model" / "snapshots" / COMMIT
        assert not (snapshot / SECOND).exists()
        hub.release.set()
        with fetching(hub, tmp_path, names) as ranks:
            first, second = folders(ranks)
        assert first == second == {"model": str(snapshot), "critic": str(snapshot).replace("--model", "--critic")}
        assert {file.name: file.read_bytes() for file in snapshot.iterdir()} == {
            name: data for name, data in MODEL.items() if name != "model.gguf"
        }
        # One rank of both; what was complete is not sent again. Both repositories have a config.json.
        assert hub.downloads[SECOND] == 2 and hub.downloads[FIRST] <= 2 and hub.downloads["config.json"] == 2


@pytest.mark.nightly
def test_ranks_that_cannot_fetch_a_model_end_with_one_line(tmp_path):
    with serving({"a/model": MODEL, "a/gated": MODEL}, {}, gated="a/gated") as hub:
        with fetching(hub, tmp_path, {"model": "a/model"}) as ranks:
            known = folders(ranks)
        for name, words in (("a/none", "shows no model of this name"), ("a/gated", "is restricted. Accept its terms")):
            with fetching(hub, tmp_path, {"model": "a/model", "reward_model": name}) as ranks:
                line = refusal(ranks)
            assert line.startswith(f"error: reward_model.path: {name}: ") and words in line
    with fetching(hub, tmp_path, {"model": "a/model"}, HF_HUB_OFFLINE="1") as ranks:
        assert folders(ranks) == known
    with fetching(hub, tmp_path, {"model": "b/model"}) as ranks:
        assert "cannot be reached (ConnectError" in refusal(ranks)


@pytest.mark.nightly
def test_job_trains_a_model_of_a_hub(tmp_path):
    model = tiny_model(tmp_path / "model", "qwen3")
    write_sums(tmp_path)
    files = {file.name: file.read_bytes() for file in model.iterdir()}
    overrides = ["model.path=a/model@v1", "job.iterations=1", "job.console=true"]
    with serving({"a/model": files}, {}) as hub:
        variables = hub.variables(tmp_path / "home")
        command = [*torchrun(2), *train_command(tmp_path, tmp_path / "run", *overrides)]
        out = finished(command, warm=False, **variables).completed().out
    assert f"model.path: fetching a/model@v1, commit {COMMIT}\n" in out
    assert logged(tmp_path / "run")[0]["actor/grad_norm"] > 0
    assert set(hub.downloads.values()) == {1}
