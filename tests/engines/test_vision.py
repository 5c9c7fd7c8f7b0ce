"""Vision towers of SGLang and vLLM with images of requests, against the hf engine, which equals `transformers`."""

from contextlib import closing

import pytest

from tests.engines.vision_requests import check_images
from tests.helpers.engines import bring_weights, options_of
from tests.helpers.tiny_models import vision_model
from tests.helpers.traces import needs_sglang, needs_vllm
from verl_mg.engines.kinds import SGLANG, VLLM
from verl_mg.engines.process_engine import ProcessEngine
from verl_mg.layout import EngineLayout
from verl_mg.tracing.tracer import TracedEngine, trace


@needs_sglang
@pytest.mark.parametrize("family", ["qwen3_vl", pytest.param("qwen2_5_vl", marks=pytest.mark.nightly)])
def test_sglang_given_images_writes_the_tokens_of_the_hf_engine(tmp_path, family):
    folder = vision_model(family)
    # The first weight sync of a job brings the weights and their version; here SGLang reads them from the directory.
    options = options_of("sglang", routed_experts=False, extra={"load_format": "auto", "weight_version": "0"})
    with closing(ProcessEngine(SGLANG, folder, options, tmp_path / "0.log")) as engine:
        engine._version = 0
        check_images(engine, folder, version=0)


@needs_vllm
@pytest.mark.nightly
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_vllm_given_images_writes_the_tokens_of_the_hf_engine_after_each_update(tmp_path, family):
    # vLLM's attention on the CPU has no heads narrower than 32.
    folders = [vision_model(family, hidden=128, seed=seed) for seed in (3, 4)]
    options, written = options_of("vllm", routed_experts=False), []
    (traced,) = trace([(folders[0], EngineLayout())], TracedEngine("vllm", options.python))
    with closing(ProcessEngine(VLLM, folders[0], options, tmp_path / "0.log")) as engine:
        for version, folder in enumerate(folders):
            bring_weights(engine, folder, version, traced)
            written += check_images(engine, folder, version)
    assert len(set(written)) == len(written)
