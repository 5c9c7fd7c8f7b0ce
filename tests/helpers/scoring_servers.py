"""Servers that score given tokens in the protocols of SGLang and vLLM, with a model of `transformers` behind them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.helpers.json_server import JsonRequest, JsonResponse, serving


@contextmanager
def scoring(model: Path) -> Iterator[str]:
    """Runs a server of a model directory, and yields its URL."""
    net: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def logprobs(tokens: list[int]) -> Tensor:
        with torch.no_grad():
            scores: Tensor = net(torch.tensor([tokens])).logits[0].log_softmax(-1)
        return scores

    def respond(request: JsonRequest) -> JsonResponse:
        body = request.body
        if request.path == "/generate":
            return JsonResponse(_sglang(body, logprobs(body["input_ids"])))
        if request.path == "/v1/completions" and body["model"] == "teacher":
            return JsonResponse(_vllm(body, logprobs(body["prompt"])))
        return JsonResponse({"error": {"message": "no such model"}}, 404)

    with serving(respond) as url:
        yield url


def _sglang(body: dict[str, Any], scores: Tensor) -> dict[str, Any]:
    tokens, first = body["input_ids"], body["logprob_start_len"]
    places = range(max(first, 1), len(tokens))
    given: list[Any] = [[scores[place - 1, tokens[place]].item(), tokens[place], None] for place in places]
    likeliest: list[Any] = []
    for place in places:
        best = scores[place - 1].topk(body["top_logprobs_num"])
        likeliest.append([[value, token, None] for value, token in zip(*map(Tensor.tolist, best), strict=True)])
    unknown = first == 0  # the first token of a sequence has no log-prob
    return {
        "text": "",
        "meta_info": {
            "input_token_logprobs": [[None, tokens[0], None]] * unknown + given,
            "input_top_logprobs": [None] * unknown + likeliest,
        },
    }


def _vllm(body: dict[str, Any], scores: Tensor) -> dict[str, Any]:
    tokens, entries = body["prompt"], [None]
    for place in range(1, len(tokens)):
        best = scores[place - 1].topk(body["prompt_logprobs"]).indices.tolist()
        chosen = dict.fromkeys([tokens[place], *best])
        entries.append({str(token): {"logprob": scores[place - 1, token].item(), "rank": 1} for token in chosen})
    return {"choices": [{"text": "", "prompt_logprobs": entries}]}
