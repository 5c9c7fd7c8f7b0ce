"""Engines of vLLM's second model runner beyond the promises of all (`test_conformance.py`): speculative decoding."""

from contextlib import closing

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers import second_runner
from tests.helpers.engines import bring_weights, options_of, requests
from tests.helpers.traces import needs_vllm
from verl_mg.engines.engine import ACCEPTED, Sampling
from verl_mg.engines.process_engine import ProcessEngine
from verl_mg.models.tiny_model import make_tiny_model

DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


@needs_vllm
@pytest.mark.nightly
def test_engine_that_verifies_drafts_returns_logprobs_before_limits(tmp_path):
    sizes = {"hidden": 32, "head_dim": 32, "ffn": 64, "max_positions": 256, "init_std": 0.2}
    path = make_tiny_model(tmp_path / "model", "qwen3", characters="abcdefgh", **sizes)
    whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    (tmp_path / "path").mkdir()
    kind = second_runner.kind_with_links_in(tmp_path / "path")
    extra = {"speculative_config": DRAFTS}
    options = options_of("vllm", routed_experts=False, python=second_runner.VLLM_PYTHON, extra=extra)
    with closing(ProcessEngine(kind, path, options, tmp_path / "0.log")) as engine:
        bring_weights(engine, path, 1)
        for temperature, limits in ((0.7, {"top_k": 3}), (1.0, {}), (0.0, {}), (1.0, {"top_p": 0.5})):
            samples = engine.generate(requests(), Sampling(max_new_tokens=12, temperature=temperature, **limits))
            for request, sample in zip(requests(), samples, strict=True):
                with torch.no_grad():
                    logits = whole(torch.tensor([[*request.prompt, *sample.tokens]])).logits[0]
                scores = (logits / (temperature or 1.0)).log_softmax(-1)[len(request.prompt) - 1 : -1]
                expected = scores.gather(1, torch.tensor(sample.tokens)[:, None])[:, 0]
                torch.testing.assert_close(torch.tensor(sample.logprobs), expected, atol=1e-4, rtol=0)
        assert engine.take_counts()[ACCEPTED] > 0
