"""vLLM's own vision towers with images from requests and weights from updates, against the hf engine."""

from contextlib import closing
from pathlib import Path

import pytest
import torch

from tests.engines.vision_requests import check_images
from tests.helpers import warm_start
from tests.helpers.engines import bring_weights
from tests.helpers.tiny_models import vision_model
from tests.helpers.traces import needs_vllm
from verl_mg.engines.engine_options import EngineOptions
from verl_mg.engines.kinds import VLLM
from verl_mg.engines.process_engine import ProcessEngine
from verl_mg.engines.tracing.tracer import TracedEngine, trace
from verl_mg.layout import EngineLayout

pytestmark = [needs_vllm, pytest.mark.nightly]


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_engine_given_images_writes_the_tokens_of_the_hf_engine_after_each_update(tmp_path, family):
    # vLLM's attention on the CPU has no heads narrower than 32.
    folders = [vision_model(family, hidden=128, seed=seed) for seed in (3, 4)]
    python = Path(warm_start.vllm().python)
    settings = EngineOptions(
        layout=EngineLayout(), dtype=torch.float32, max_running=16, max_positions=256, python=python
    )
    (traced,) = trace([(folders[0], EngineLayout())], TracedEngine("vllm", python))
    with closing(ProcessEngine(VLLM, folders[0], settings, tmp_path / "0.log")) as engine:
        written = []
        for version, folder in enumerate(folders):
            bring_weights(engine, folder, version, traced)
            written += check_images(engine, folder, version)
        assert len(set(written)) == len(written)
