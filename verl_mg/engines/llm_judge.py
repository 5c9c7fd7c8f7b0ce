"""LLM as a judge: a reward that is read from a language model's verdict about a response.

It belongs to this package rather than to `rewards` since it builds a rollout engine, which is on a higher layer.
"""

from __future__ import annotations

import asyncio
import math
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from verl_mg.data.stop_tokens import read_stop_tokens
from verl_mg.device import current_device
from verl_mg.engines.engine import Request, Sampling
from verl_mg.engines.hf.engine import HFEngine
from verl_mg.errors import UserError
from verl_mg.http_client import JsonService
from verl_mg.rewards import Reward, Sample

# Default question, after the single-answer grading of MT-Bench [arXiv:2306.05685, appendix A].
TEMPLATE = """\
Please judge, without bias, the quality of the response to the question below, as to whether it is helpful, relevant, \
accurate and complete. The reference answer is: {answer}
Explain your judgement in a few sentences. Then rate the response from 1 to 10, strictly in this form: [[rating]].

[Question]
{prompt}

[Response]
{response}
[End of the response]
"""
VERDICT = r"\[\[(-?\d+(?:\.\d+)?)\]\]"
GENERATE = "/generate"


class LLMJudge:
    """Requests a verdict about each response. The reward is the last verdict in the model's text, divided by `scale`.

    Its parts are "judged" (whether the text has a verdict, 0.0 or 1.0; without one the reward is 0) and "verdict".

    The model is that of an SGLang server at `url`, or the Hugging Face directory `model`, for which this rank builds
    an engine. With both, the server generates, and the tokenizer of `model` applies the chat template; with only `url`
    it receives plain text. The tokenizer adds no special tokens to a question; `template` may contain them. A question
    that does not fit into the model's context with `max_new_tokens` gets no verdict.

    `template` contains {response}, and optionally {prompt} and {answer}; the first group of `pattern` is the verdict, a
    number. The engine answers `batch_size` questions together; the others of a batch can decide a near tie between two
    tokens, which batch_size=1 excludes. `timeout`, `retries` and `headers` are as in `JsonService`.
    """

    def __init__(
        self,
        template: str = TEMPLATE,
        pattern: str = VERDICT,
        scale: float = 10.0,
        url: str | None = None,
        model: str | Path | None = None,
        max_new_tokens: int = 512,
        temperature: float = 0.0,
        batch_size: int = 8,
        device: str | None = None,
        dtype: str = "bfloat16",
        timeout: float = 600.0,
        retries: int = 4,
        headers: Mapping[str, str] | None = None,
        parallel: int = 32,
    ) -> None:
        if "{response}" not in template:
            raise UserError("template: {response} is missing. Write it where the response is to be inserted.")
        if scale <= 0 or batch_size < 1 or parallel < 1:
            raise UserError(
                f"scale={scale}, batch_size={batch_size}, parallel={parallel}: out of range. Give positive numbers."
            )
        if dtype not in ("float32", "bfloat16"):
            raise UserError(f"dtype: {dtype!r} is not supported. Write float32 or bfloat16.")
        self._template, self._scale, self._pattern = template, scale, _compiled(pattern)
        self._sampling = Sampling(max_new_tokens=max_new_tokens, temperature=temperature)
        self._tokenizer: Any = _read_tokenizer(Path(model)) if model is not None else None
        self._service: JsonService | None = None
        if url is not None:
            address = url.rstrip("/") + GENERATE
            self._service = JsonService(address, timeout=timeout, retries=retries, headers=headers)
            self.batch_size, self.parallel = 1, parallel
        elif model is not None:
            target = torch.device(device) if device else current_device()
            self._engine = HFEngine(model, target, getattr(torch, dtype), max_running_requests=batch_size)
            stops = read_stop_tokens(model, self._tokenizer).ids
            self._sampling = replace(self._sampling, stop_token_ids=stops)
            self._engine_lock = threading.Lock()  # `score_many` generates in a thread for each call
            self.batch_size, self.parallel = batch_size, 1
        else:
            raise UserError(
                "LLMJudge: neither url nor model is set. Set the URL of a server or the directory of a model."
            )

    async def score_many(self, samples: Sequence[Sample]) -> list[Reward]:
        """Returns one reward per sample."""
        questions = [self.question(sample) for sample in samples]
        if self._service is None:
            texts = await asyncio.to_thread(self._generate, questions)
        else:
            texts = await asyncio.gather(*(self._post(self._service, question) for question in questions))
        return [self.verdict(text) for text in texts]

    def question(self, sample: Sample) -> str:
        """Returns the text that the model continues."""
        fields = {"prompt": sample.prompt, "response": sample.response, "answer": sample.answer or ""}
        # In one pass: {answer} in a response must not be replaced.
        text = re.sub(r"\{(prompt|response|answer)\}", lambda match: fields[match[1]], self._template)
        if self._tokenizer is None or self._tokenizer.chat_template is None:
            return text
        messages = [{"role": "user", "content": text}]
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def verdict(self, text: str) -> Reward:
        """Reads the reward from the model's text."""
        matches = [match[1] for match in self._pattern.finditer(text)]
        try:
            number = float(matches[-1])
        except (IndexError, TypeError, ValueError):  # no verdict, or one that is not a number
            number = math.nan
        if not math.isfinite(number):
            return Reward(0.0, {"judged": 0.0})
        return Reward(number / self._scale, {"judged": 1.0, "verdict": number})

    async def _post(self, service: JsonService, question: str) -> str:
        sampling = {"max_new_tokens": self._sampling.max_new_tokens, "temperature": self._sampling.temperature}
        # Tokens where there is a tokenizer: the server would add special tokens, which a chat template has written.
        body = {"text": question} if self._tokenizer is None else {"input_ids": self._tokens([question])[0]}
        response = await service.post(body | {"sampling_params": sampling})
        if not isinstance(response, dict) or not isinstance(response.get("text"), str):
            raise UserError(
                f"{service.url}: the response {response!r:.200} has no text. Give the URL of an SGLang server."
            )
        return str(response["text"])

    def _tokens(self, questions: Sequence[str]) -> list[list[int]]:
        rows: list[list[int]] = self._tokenizer(list(questions), add_special_tokens=False)["input_ids"]
        return rows

    def _generate(self, questions: Sequence[str]) -> list[str]:
        rows = self._tokens(questions)
        limit = self._engine.max_positions - self._sampling.max_new_tokens
        # The same seed for all: a sample does not depend on the position of its question.
        requests = [Request(number, tuple(row), seed=0) for number, row in enumerate(rows) if 0 < len(row) <= limit]
        with self._engine_lock:
            samples = self._engine.generate(requests, self._sampling)
        texts = {sample.id: self._tokenizer.decode(sample.tokens, skip_special_tokens=True) for sample in samples}
        return [str(texts.get(number, "")) for number in range(len(rows))]


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise UserError(f"pattern: {pattern!r} is not a regular expression ({error}). Correct it.") from None
    if compiled.groups < 1:
        raise UserError(f"pattern: {pattern!r} has no group. Put the verdict in parentheses.")
    return compiled


def _read_tokenizer(directory: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{directory}: the tokenizer cannot be read ({error}). Give the directory of a Hugging Face model."
        ) from error
