"""Scores of given tokens by servers: malformed responses, and those of real SGLang and vLLM against `transformers`."""

import asyncio
import math
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers.json_server import JsonResponse, serving
from tests.helpers.machine import VLLM_PYTHON
from tests.helpers.sglang_servers import RunningServer, ServerProcess, free_port
from tests.helpers.tiny_models import tiny_model
from tests.helpers.traces import needs_sglang, needs_vllm
from verl_mg.engines.scoring_server import ScoringServer
from verl_mg.engines.vllm.arguments import ON_CPU
from verl_mg.errors import UserError
from verl_mg.models.hf_config import read_config

TOKENS, VOCAB = (3, 5, 7, 5), 12


def sglang(scored: list[object], likeliest: list[object]) -> dict[str, object]:
    return {"meta_info": {"input_token_logprobs": scored, "input_top_logprobs": likeliest}}


def scored(logprob: float, *likeliest: list[float]) -> dict[str, object]:
    """Response in which the second of two tokens has a log-prob, and others in its place."""
    pairs = likeliest or ([-1.0, 5], [-2.0, 6])
    return sglang([[-1.0, 7, None], [logprob, 5, None]], [[[-1.0, 5, None], [-2.0, 6, None]], pairs])


@pytest.mark.parametrize(
    ("protocol", "body", "reason"),
    [
        ("sglang", {"text": ""}, "KeyError"),
        ("sglang", sglang([[-1.0, 5, None]], [[[-1.0, 5, None]]]), "ValueError"),
        ("sglang", sglang([[-1.0, 9, None]] * 2, [[[-1.0, 5, None]]] * 2), "token 9 in place of 7"),
        ("sglang", sglang([[-1.0, 7, None], [-1.0, 5, None]], [[], []]), "0 likeliest tokens"),
        ("sglang", scored(math.nan), "no numbers up to 0"),
        ("sglang", scored(0.5), "no numbers up to 0"),
        ("sglang", scored(-1.0, [-2.0, 1], [-1.0, 2]), "do not fall"),
        ("sglang", scored(-1.0, [-0.1, 1], [-0.2, 2]), "of more than 1"),
        ("sglang", scored(-1.0, [-1.0, 1], [-2.0, 1]), "not different ones of a vocabulary of 12"),
        ("sglang", scored(-1.0, [-1.0, 1], [-2.0, VOCAB]), "not different ones of a vocabulary of 12"),
        ("openai", {"choices": [{"prompt_logprobs": None}]}, "TypeError"),
        ("openai", {"choices": [{"prompt_logprobs": [None, {}, {}, {}]}]}, "KeyError"),
    ],
)
def test_malformed_response_is_an_error_with_the_key(protocol, body, reason):
    with serving(lambda request: JsonResponse(body)) as url:
        server = ScoringServer.at("teachers.a.url", url, protocol, VOCAB, "teacher")
        with pytest.raises(UserError, match=rf"teachers.a.url={url}/.*no log-probs of 2 tokens .*{reason}"):
            asyncio.run(server.score(TOKENS, 2, 2))


def sglang_server(model: Path, log: Path) -> RunningServer:
    return RunningServer(model, log, "tp1", load_format="auto")


class VllmServer(ServerProcess):
    """A server as users of vLLM start it, with OpenAI's protocol, of a model in float32 that is named `teacher`."""

    readiness = "health"

    def __init__(self, model: Path, log: Path) -> None:
        port = free_port()
        served = ["--model", str(model), "--served-model-name", "teacher", "--host", "127.0.0.1", "--port", str(port)]
        command = [str(VLLM_PYTHON), "-m", "vllm.entrypoints.openai.api_server", *served, "--dtype", "float32"]
        variables = os.environ | ON_CPU | {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        super().__init__([*command, "--enforce-eager"], variables, port, log)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("protocol", "start"),
    [
        pytest.param("sglang", sglang_server, marks=needs_sglang),
        pytest.param("openai", VllmServer, marks=needs_vllm),
    ],
)
def test_scores_of_a_server_are_those_of_transformers(tmp_path, protocol, start):
    # A size of heads that vLLM computes with on a CPU.
    model, k = tiny_model(tmp_path / "model", "qwen3", hidden=64, head_dim=32), 4
    running = start(model, tmp_path / "log")
    try:
        running.wait_until_ready()
        server = ScoringServer.at("teachers.a.url", running.url, protocol, read_config(model).vocab, "teacher")
        rows = [torch.randint(3, 20, (length,), generator=torch.Generator().manual_seed(length)).tolist()
                for length in (2, 9, 30)]  # fmt: skip
        net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        for tokens in rows:
            for first in {1, len(tokens) // 2, len(tokens) - 1} - {0}:
                scores = asyncio.run(server.score(tokens, first, k))
                with torch.no_grad():
                    whole = net(torch.tensor([tokens])).logits[0].log_softmax(-1)
                assert len(scores) == len(tokens) - first
                for place, score in enumerate(scores, start=first):
                    assert score.logprob == pytest.approx(whole[place - 1, tokens[place]].item(), abs=1e-4)
                    best = whole[place - 1].topk(k)
                    assert [token for _, token in score.likeliest] == best.indices.tolist()
                    assert [value for value, _ in score.likeliest] == pytest.approx(best.values.tolist(), abs=1e-4)
    finally:
        running.kill()
