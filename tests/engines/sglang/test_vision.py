"""SGLang's own vision towers with images from requests, against the hf engine, which equals `transformers`."""

from contextlib import closing

import pytest
import torch

from tests.engines.vision_requests import check_images
from tests.helpers.tiny_models import vision_model
from tests.helpers.traces import needs_sglang
from verl_mg.engines.engine_options import EngineOptions
from verl_mg.engines.kinds import SGLANG
from verl_mg.engines.process_engine import ProcessEngine
from verl_mg.layout import EngineLayout

pytestmark = needs_sglang
# The first weight sync of a job brings the weights; here SGLang reads them from the directory.
SETTINGS = EngineOptions(
    layout=EngineLayout(),
    dtype=torch.float32,
    max_running=16,
    max_positions=256,
    extra={"load_format": "auto", "weight_version": "0"},
)


@pytest.mark.parametrize("family", ["qwen3_vl", pytest.param("qwen2_5_vl", marks=pytest.mark.nightly)])
def test_engine_given_images_writes_the_tokens_of_the_hf_engine(tmp_path, family):
    folder = vision_model(family)
    with closing(ProcessEngine(SGLANG, folder, SETTINGS, tmp_path / "0.log")) as engine:
        check_images(engine, folder, version=0)
