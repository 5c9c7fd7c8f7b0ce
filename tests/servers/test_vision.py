"""A real SGLang server that is given images over HTTP, against the hf engine."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.engines.vision_requests import check_images
from tests.helpers.sglang_servers import SETTINGS, RunningServer
from tests.helpers.tiny_models import vision_model
from tests.helpers.traces import needs_sglang
from verl_mg.data.image_processor import ImageProcessor
from verl_mg.models.transformers_module import read_any_config
from verl_mg.servers.info import ServerRequirements
from verl_mg.servers.remote_engine import RemoteEngine

pytestmark = [needs_sglang, pytest.mark.nightly]


@pytest.fixture(params=["qwen3_vl", "qwen2_5_vl"])
def folders(request) -> list[Path]:
    """Two sets of weights of a model."""
    return [vision_model(request.param, seed=seed) for seed in (3, 4)]


@pytest.fixture
def server(folders, tmp_path) -> Iterator[RunningServer]:
    """A server that keeps no features of images."""
    running = RunningServer(folders[0], tmp_path / "server.log", "tp1", context_length=256)
    try:
        yield running.wait_until_ready()
    finally:
        running.kill()


def test_server_given_images_writes_the_tokens_of_the_hf_engine_after_each_update(folders, server):
    requirements = ServerRequirements(read_any_config(folders[0]), 200)
    processor = ImageProcessor.read(folders[0])
    engine = RemoteEngine(server.url, requirements, replace(SETTINGS, max_running=16), processor=processor)
    try:
        written = []
        for version, folder in enumerate(folders):
            engine.load_folder(folder, version)
            written += check_images(engine, folder, version)
        assert len(set(written)) == len(written)
    finally:
        engine.close()
