"""Client of a server that scores given tokens: log-probs of each, and the tokens that are likeliest in its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from verl_mg.engines.reports import check_scores
from verl_mg.errors import UserError
from verl_mg.http_client import JsonService

ScoringApi = Literal["sglang", "openai"]
PATHS: Mapping[str, str] = {"sglang": "/generate", "openai": "/v1/completions"}  # path of the requests, by protocol
TIMEOUT_SECONDS, RETRIES = 600.0, 4


class TokenScore(NamedTuple):
    """Score of a given token after those in front of it."""

    logprob: float  # log-prob of the token, in nats, at temperature 1
    likeliest: Sequence[tuple[float, int]]  # log-probs and ids of the k likeliest tokens in its place, falling


@dataclass(frozen=True)
class ScoringServer:
    """Client of an SGLang server, or of one with OpenAI's completions and vLLM's field `prompt_logprobs` in them."""

    key: str  # configuration key of the address, for errors
    protocol: ScoringApi
    model: str  # name of the model in requests of the protocol openai
    service: JsonService  # connection to the path of the protocol
    vocab: int  # size of the vocabulary

    @classmethod
    def at(
        cls, key: str, url: str, protocol: ScoringApi, vocab: int, model: str = "", api_key: str = ""
    ) -> ScoringServer:
        """Returns the client of a server; it connects with the first request."""
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        address = url.rstrip("/").removesuffix("/v1") + PATHS[protocol]
        service = JsonService(address, timeout=TIMEOUT_SECONDS, retries=RETRIES, headers=headers)
        return cls(key, protocol, model, service, vocab)

    async def score(self, tokens: Sequence[int], first: int, k: int) -> list[TokenScore]:
        """Returns the scores of tokens[first:], where `first` is at least 1, each with the `k` likeliest tokens.

        UserError where the server refuses, or its response has other tokens, too few, or scores that are none.
        """
        request: dict[str, Any]
        if self.protocol == "sglang":
            request = {"input_ids": list(tokens), "sampling_params": {"max_new_tokens": 0, "temperature": 1.0}}
            request |= {"return_logprob": True, "logprob_start_len": first - 1, "top_logprobs_num": k}
            read = _read_sglang
        else:
            request = {"model": self.model, "prompt": list(tokens), "max_tokens": 1, "temperature": 1.0}
            request["prompt_logprobs"] = k
            read = _read_openai
        response = await self.service.post(request)
        try:
            scores = read(response, tokens, first, k)
            check_scores(scores, self.vocab)
            return scores
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise UserError(
                f"{self.key}={self.service.url}: the response has no log-probs of {len(tokens) - first} tokens with "
                f"{k} likeliest ones each ({type(error).__name__}: {error}). Correct the protocol, or allow more "
                "log-probs on the server, such as with vLLM's --max-logprobs."
            ) from None


def _read_sglang(response: Any, tokens: Sequence[int], first: int, k: int) -> list[TokenScore]:
    count = len(tokens) - first
    scored = response["meta_info"]["input_token_logprobs"][-count:]
    likeliest = response["meta_info"]["input_top_logprobs"][-count:] if k else [[]] * count
    scores = []
    for token, (logprob, number, *_), best in zip(tokens[first:], scored, likeliest, strict=True):
        if number != token:
            raise ValueError(f"token {number} in place of {token}")
        pairs = [(float(value), int(other)) for value, other, *_ in best]
        scores.append(TokenScore(float(logprob), _first(pairs, k)))
    return scores


def _read_openai(response: Any, tokens: Sequence[int], first: int, k: int) -> list[TokenScore]:
    of_tokens = response["choices"][0]["prompt_logprobs"]
    scores = []
    for token, entries in zip(tokens[first:], of_tokens[first:], strict=True):
        # Each entry has the k likeliest tokens, and the given one in addition where it is not among them.
        pairs = sorted(((float(entry["logprob"]), int(other)) for other, entry in entries.items()), reverse=True)
        scores.append(TokenScore(float(entries[str(token)]["logprob"]), _first(pairs, k)))
    return scores


def _first(pairs: Sequence[tuple[float, int]], k: int) -> Sequence[tuple[float, int]]:
    if len(pairs) < k:
        raise ValueError(f"{len(pairs)} likeliest tokens")
    return pairs[:k]
