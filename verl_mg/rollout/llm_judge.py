"""A language model as judge: it is asked what it thinks of a response, and its verdict is read off the answer."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from verl_mg.device import current_device
from verl_mg.errors import UserError
from verl_mg.rewards import Reward, Sample
from verl_mg.rewards.http import JsonService
from verl_mg.rollout.engine import Request, Sampling
from verl_mg.rollout.hf.engine import HFEngine

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
"""After the single-answer grading of MT-Bench [arXiv:2306.05685, appendix A]."""
VERDICT = r"\[\[(-?\d+(?:\.\d+)?)\]\]"
GENERATE = "/generate"


class LLMJudge:
    """Asks a model about each response. The reward is the last verdict in its answer, divided by `scale`.

    Its parts are "judged" (a verdict was found, 0.0 or 1.0; the reward is 0 without) and, where it was, "verdict".

    The model is either that of an SGLang server at `url`, or the Hugging Face directory `model`, for which this rank
    holds an engine of its own. With both, the server writes, and the tokenizer of `model` turns the question into a
    conversation; a server alone is sent the bare text. Sampling is greedy unless `temperature` says otherwise. The
    engine works on `batch_size` questions at once; their company can decide a near tie between two tokens, which
    batch_size=1 rules out. A question that is longer than it can take, with `max_new_tokens`, is not judged.

    template: the question, with {response}, and {prompt} and {answer} where wanted.
    pattern: its first group is the verdict, a number.
    timeout, retries, headers: as in `rewards.http.JsonService`; parallel: requests to the server at once.
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
            raise UserError("the judge's template has no {response}; write where the response goes")
        if scale <= 0 or batch_size < 1 or parallel < 1:
            raise UserError(f"scale is {scale}, batch_size {batch_size}, parallel {parallel}: give positive numbers")
        if dtype not in ("float32", "bfloat16"):
            raise UserError(f"dtype is {dtype!r}: write float32 or bfloat16")
        self._template, self._scale, self._pattern = template, scale, _compiled(pattern)
        self._sampling = Sampling(max_new_tokens=max_new_tokens, temperature=temperature)
        self._tokenizer = _read_tokenizer(Path(model)) if model is not None else None
        self._service: JsonService | None = None
        if url is not None:
            address = url.rstrip("/") + GENERATE
            self._service = JsonService(address, timeout=timeout, retries=retries, headers=headers)
            self.batch_size, self.parallel = 1, parallel
        elif model is not None:
            where = torch.device(device) if device else current_device()
            self._engine = HFEngine(model, where, getattr(torch, dtype), max_running_requests=batch_size)
            self._engine_lock = threading.Lock()
            self.batch_size, self.parallel = batch_size, 1
        else:
            raise UserError("the judge has neither url nor model; give the URL of a server or a model's directory")

    async def score_many(self, samples: Sequence[Sample]) -> list[Reward]:
        """One reward a sample."""
        questions = [self.question(sample) for sample in samples]
        if self._service is None:
            answers = await asyncio.to_thread(self._write, questions)
        else:
            answers = await asyncio.gather(*(self._ask(self._service, question) for question in questions))
        return [self.verdict(answer) for answer in answers]

    def question(self, sample: Sample) -> str:
        """What the model is asked, as it stands before its answer."""
        fields = {"prompt": sample.prompt, "response": sample.response, "answer": sample.answer or ""}
        # In one go: a response that has {answer} in it must not be shown the answer.
        text = re.sub(r"\{(prompt|response|answer)\}", lambda match: fields[match[1]], self._template)
        if self._tokenizer is None or self._tokenizer.chat_template is None:
            return text
        messages = [{"role": "user", "content": text}]
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def verdict(self, answer: str) -> Reward:
        """The reward that an answer gives."""
        found = [match[1] for match in self._pattern.finditer(answer)]
        try:
            number = float(found[-1])
        except (IndexError, TypeError, ValueError):  # no verdict, or none that is a number
            return Reward(0.0, {"judged": 0.0})
        return Reward(number / self._scale, {"judged": 1.0, "verdict": number})

    async def _ask(self, service: JsonService, question: str) -> str:
        sampling = {"max_new_tokens": self._sampling.max_new_tokens, "temperature": self._sampling.temperature}
        answer = await service.post({"text": question, "sampling_params": sampling})
        if not isinstance(answer, dict) or not isinstance(answer.get("text"), str):
            raise UserError(f"{service.url}: answered {answer!r:.200} without a text; give the URL of an SGLang server")
        return str(answer["text"])

    def _write(self, questions: Sequence[str]) -> list[str]:
        assert self._tokenizer is not None
        sampling = self._stopping()
        special = self._tokenizer.chat_template is None  # a template writes them itself
        rows = self._tokenizer(list(questions), add_special_tokens=special)["input_ids"]
        limit = self._engine.module.config.get_text_config().max_position_embeddings - sampling.max_new_tokens
        # A question draws the same whatever its company.
        requests = [Request(number, tuple(row), seed=0) for number, row in enumerate(rows) if 0 < len(row) <= limit]
        with self._engine_lock:
            samples = self._engine.generate(requests, sampling)
        written = {sample.id: self._tokenizer.decode(sample.tokens, skip_special_tokens=True) for sample in samples}
        return [str(written.get(number, "")) for number in range(len(rows))]

    def _stopping(self) -> Sampling:
        """With the tokens that end an answer, by the tokenizer and by the model."""
        assert self._tokenizer is not None
        told = self._engine.module.generation_config.eos_token_id
        stops = {self._tokenizer.eos_token_id, *(told if isinstance(told, list) else [told])} - {None}
        return Sampling(
            max_new_tokens=self._sampling.max_new_tokens,
            temperature=self._sampling.temperature,
            stop_token_ids=tuple(sorted(stops)),
        )


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise UserError(f"pattern {pattern!r} is no regular expression ({error}); mend it") from None
    if compiled.groups < 1:
        raise UserError(f"pattern {pattern!r} has no group; put the verdict in parentheses")
    return compiled


def _read_tokenizer(directory: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(f"{directory} has no readable tokenizer: {error}") from error
