"""`verl-mg models` of a model on a hub: configuration and tokenizer are fetched, weights are not."""

import os
import subprocess
import sys

import pytest

from tests.helpers.hub_server import serving
from tests.helpers.tiny_models import tiny_model


@pytest.mark.nightly
def test_models_of_a_name_on_a_hub_downloads_no_weights(tmp_path):
    model = tiny_model(tmp_path / "model", "qwen3")
    with serving({"a/model": {file.name: file.read_bytes() for file in model.iterdir()}}, {}) as hub:
        variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "verl_mg", "models", "a/model"],
            env=os.environ | variables | {"HF_HUB_OFFLINE": "0"},
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path}/home/hub/models--a--model/snapshots/" in done.stdout and ": qwen3, 4 layers, " in done.stdout
    assert "weights                   yes: not downloaded" in done.stdout
    assert "config.json" in hub.downloads and "model.safetensors" not in hub.downloads
