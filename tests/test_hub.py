"""Names on a hub become folders: downloads from a real server, the cache without a network, and errors of one line."""

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helpers import warm_start
from tests.helpers.hub_server import COMMIT, serving
from verl_mg.errors import UserError
from verl_mg.hub import HubName, fetch, files_of, matching

MODEL = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "consolidated.safetensors": b"the same weights",
    "pytorch_model.bin": b"the same weights",
}
CARD = b"""---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
---
"""
DATA = {
    "README.md": CARD,
    "main/train-00000-of-00002.jsonl": b'{"prompt": "a"}\n',
    "main/train-00001-of-00002.jsonl": b'{"prompt": "b"}\n',
    "main/test-00000-of-00001.jsonl": b'{"prompt": "c"}\n',
}
WORK = """
import json, sys
from pathlib import Path
from tests.helpers.hub_server import forget_client
forget_client()
from verl_mg.data.records import located_records
from verl_mg.errors import UserError
from verl_mg.models.named_models import local_model

def attempt(call, *arguments):
    try:
        return call(*arguments)
    except UserError as error:
        return f"error: {error}"

models = [str(attempt(local_model, Path(name), "model.path")) for name in json.loads(sys.argv[1])]
data = [attempt(located_records, name) for name in json.loads(sys.argv[2])]
print(json.dumps([models, data]))
"""


def started(
    endpoint: str, home: Path, models: list[str], data: list[str], before: str = "", **more: str
) -> subprocess.Popen[str]:
    variables = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    words = [warm_start.shared().python, "-c", f"{before}\n{WORK}", json.dumps(models), json.dumps(data)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=os.environ | variables | more)


def result(process: subprocess.Popen[str]) -> tuple[list[str], list[object]]:
    output, _ = process.communicate(timeout=600)
    models, data = json.loads(output)
    return models, data


def test_names_on_a_hub_are_downloaded_once_and_then_read_from_the_cache(tmp_path):
    """Two processes at once, as two ranks of a node; then one that cannot reach the hub, and one that must not."""
    models, data = ["a/model", "hf:a/model@v1", "a/none", "a/model@v2"], ["a/data:main:train", "a/data", "a/none"]
    with serving({"a/model": MODEL}, {"a/data": DATA}) as hub:
        ranks = [started(hub.url, tmp_path, models, data) for _ in range(2)]
        first, second = map(result, ranks)
        assert first == second
    folder = tmp_path / "hub" / "models--a--model" / "snapshots" / COMMIT
    assert first[0][:2] == [str(folder), str(folder)]
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert "model.path: a/none: no such model directory, and the Hugging Face hub shows no model" in first[0][2]
    assert "a/model@v2: has no revision 'v2'. Write" in first[0][3]
    snapshot = tmp_path / "hub" / "datasets--a--data" / "snapshots" / COMMIT / "main"
    shards = [snapshot / f"train-0000{number}-of-00002.jsonl" for number in range(2)]
    records = [[f"{file}:1", {"prompt": text}] for file, text in zip(shards, "ab", strict=True)]
    assert first[1][0] == records
    assert first[1][1] == "error: a/data: has several splits (test, train). Write one of: " + (
        "a/data:main:test, a/data:main:train."
    )
    assert "a/none: no such data file or folder, and" in str(first[1][2])
    assert set(hub.downloads.values()) == {1} and "main/test-00000-of-00001.jsonl" not in hub.downloads
    models, data = ["a/model", "b/model"], ["a/data:main:train", "a/data:main:test"]
    without = [started(hub.url, tmp_path, models, data, HF_HUB_OFFLINE=value) for value in "01"]
    for again, reason in zip(map(result, without), ("ConnectError", "HF_HUB_OFFLINE is set"), strict=True):
        assert (again[0][0], again[1][0]) == (str(folder), records)
        assert again[0][1].startswith(
            "error: model.path: b/model: no such model directory; the Hugging Face hub cannot"
        )
        assert reason in again[0][1] and "no copy of it. Correct the path, or download" in again[0][1]
        assert f"its cache {tmp_path}/hub has only a part of it" in str(again[1][1])


def test_fetch_from_a_hub_that_does_not_answer_uses_the_cache(tmp_path):
    with serving({"a/model": MODEL}, {}) as hub:
        ((folder, *_), _) = result(started(hub.url, tmp_path, ["a/model"], []))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        limit = "import verl_mg.hub; verl_mg.hub.ANSWER_SECONDS = 0.5"
        models, _ = result(started(endpoint, tmp_path, ["a/model", "b/model"], [], limit))
    assert models[0] == folder
    assert "cannot be reached (ReadTimeout: timed out) and its cache" in models[1]


def test_fetch_of_a_gated_model_and_of_a_commit_in_the_cache_of_an_older_client(tmp_path):
    """Older clients wrote no lists of files, which newer ones need for a commit."""
    commit = f"a/model@{COMMIT}"
    with serving(
        {"a/model": MODEL | {"metal/model.safetensors": b"again"}, "a/gated": MODEL}, {}, gated="a/gated"
    ) as hub:
        models, _ = result(started(hub.url, tmp_path, ["a/model", commit, "a/gated"], []))
    assert models[0] == models[1] and not (Path(models[0]) / "metal").exists()
    assert models[2] == (
        "error: model.path: a/gated: access to this model is restricted. Accept its terms on its page of the Hugging "
        "Face hub and set HF_TOKEN."
    )
    shutil.rmtree(tmp_path / "hub" / "models--a--model" / "trees")
    for offline in "01":
        assert result(started(hub.url, tmp_path, [commit], [], HF_HUB_OFFLINE=offline))[0] == models[:1]


def test_files_of_a_cache_without_lists_are_those_of_the_folder(tmp_path):
    name = HubName.parse("modelscope:a/b")
    assert name
    for number in range(2):
        (tmp_path / f"train-0000{number}-of-00002.jsonl").touch()
    assert files_of(name, tmp_path) == ["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"]
    (tmp_path / "train-00000-of-00002.jsonl").unlink()
    with pytest.raises(UserError, match=r"modelscope:a/b: the cache has 1 of 2 files train-\*-of-00002.jsonl \("):
        files_of(name, tmp_path)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen3-0.6B", ("hf", "Qwen/Qwen3-0.6B", None, "")),
        ("hf:gpt2", ("hf", "gpt2", None, "")),
        ("modelscope:Qwen/Qwen3-0.6B@v1.0", ("modelscope", "Qwen/Qwen3-0.6B", "v1.0", "")),
        ("openai/gsm8k:main:train", ("hf", "openai/gsm8k", None, "main:train")),
        ("hf:a/b@refs/convert/parquet::train", ("hf", "a/b", "refs/convert/parquet", ":train")),
    ],
)
def test_hub_name_of_a_name_has_its_parts(text, name):
    parsed = HubName.parse(Path(text))
    assert parsed and (parsed.site, parsed.repository, parsed.revision, parsed.part) == name


@pytest.mark.parametrize(
    "path",
    ["model", "/a/b", "./a", "../a", "a/b/c", "a/b c", "a/train-*.parquet", "gpt2:main", "reasoning_gym:x", "~/a"],
)
def test_hub_name_of_a_path_is_none(path):
    assert HubName.parse(path) is None


def test_hub_name_of_an_existing_path_is_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert HubName.parse("runs/model") is not None
    Path("runs/model").mkdir(parents=True)
    assert HubName.parse("runs/model") is None


def test_hub_name_with_a_prefix_and_no_name_raises():
    with pytest.raises(UserError, match=r"hf:a//b: not the name of a repository. Write hf:OWNER/NAME"):
        HubName.parse("hf:a//b")


def test_matching_patterns_reach_into_folders():
    assert matching(["main/train-0.parquet", "test.jsonl", "a/b/c.json"], ["main/train-*", "*.json"]) == [
        "main/train-0.parquet",
        "a/b/c.json",
    ]


def test_fetch_from_modelscope_uses_its_package(tmp_path, monkeypatch):
    """By contract: the functions and arguments are those of modelscope 1.40.2."""
    name = HubName.parse("modelscope:a/b@v1")
    assert name
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(UserError, match=r"a/b@v1: the package modelscope is not installed .* pip install modelscope"):
        fetch(name, "model", ["*.json"], "model.path")

    cached: list[str] = []

    def download(repository, repo_type, revision, allow_file_pattern, local_files_only=False):
        if repository not in cached and local_files_only:
            raise ValueError("no copy")
        if repo_type == "dataset" and not local_files_only:
            raise ConnectionError("no route\nto host")
        return str(tmp_path / f"{repository}-{revision}-{allow_file_pattern}")

    monkeypatch.setitem(sys.modules, "modelscope", SimpleNamespace(snapshot_download=download))
    assert fetch(name, "model", ["*.json"]) == tmp_path / "a/b-v1-['*.json']"
    with pytest.raises(UserError, match=r"ModelScope cannot be reached \(ConnectionError: no route\) and its cache"):
        fetch(name, "dataset", ["*.json"])
    cached.append("a/b")
    assert fetch(name, "dataset", ["*.json"]) == tmp_path / "a/b-v1-['*.json']"


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("modelscope") is None, reason="pip install modelscope, which is optional")
def test_fetch_from_modelscope_without_a_network_takes_what_its_cache_has(tmp_path):
    """With the real package; nothing listens at its address."""
    for kind, path in (("models", "config.json"), ("datasets", "train.jsonl")):
        folder = tmp_path / kind / "a--b" / "snapshots" / "master"
        folder.mkdir(parents=True)
        (folder / path).write_text('{"prompt": "a"}')
    variables = {"MODELSCOPE_CACHE": str(tmp_path), "MODELSCOPE_DOMAIN": "127.0.0.1:1"}
    models, data = result(started("", tmp_path, ["modelscope:a/b"], ["modelscope:a/b", "modelscope:a/c"], **variables))
    assert models == [str(tmp_path / "models/a--b/snapshots/master")]
    assert data[0] == [[f"{tmp_path}/datasets/a--b/snapshots/master/train.jsonl:1", {"prompt": "a"}]]
    assert "modelscope:a/c: no such data file or folder; ModelScope cannot be reached" in str(data[1])
