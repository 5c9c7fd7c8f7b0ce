"""Forms of decoding a family of `transformers`; a narrow copy of the family proves which is the fastest right one.

    PADDED    prompts of any length together, padded on the left, with a cache that grows in place (`decoding.decode`)
    EQUAL     prompts of equal length together, without padding, with the family's cache
    WHOLE     each prompt by itself without a cache: all tokens are computed again for each new one

A form is right where its tokens have the log-probs of the family's eager attention over each whole row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedConfig,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from verl_mg.engines.engine import Sampling
from verl_mg.engines.hf.decoding import Completion, Reports, TextEnd, decode, draw_tokens
from verl_mg.errors import UserError, one_line
from verl_mg.models.hf_families import FAMILIES
from verl_mg.models.shrunk_config import LONGEST_ROW, narrow_module, random_rows, row_logits, row_logprobs, shrink
from verl_mg.models.tiny_vision_model import ARCHITECTURES as VISION_LANGUAGE

NEW_TOKENS = 12  # of each proving row
PROMPTS = (LONGEST_ROW // 3, LONGEST_ROW - NEW_TOKENS, LONGEST_ROW // 3, LONGEST_ROW // 2)  # their tokens
TOLERANCE = 1e-4  # nats in float32


class Form(Enum):
    """Form of decoding, the fastest first."""

    PADDED = "left-padded rows with a cache"
    EQUAL = "rows of equal length with the cache of the family"
    WHOLE = "one row after another without a cache"


class FamilyForm(NamedTuple):
    """Form in which a family is decoded, and its attention by the name of `transformers`."""

    form: Form
    attention: str
    reason: str = ""  # why no faster form is right

    @property
    def chosen(self) -> str:
        """Returns what the start of a job says."""
        return f"{self.form.value}{self.reason and f', since {self.reason}'}"


def family_form(config: PreTrainedConfig, longest_row: int, is_trained: bool) -> FamilyForm:
    """Returns the fastest form that is right for rows up to `longest_row` tokens.

    UserError if a policy that `is_trained` has none, as where frequencies depend on the length of a row so far.
    """
    text = config.get_text_config()
    if text.model_type in FAMILIES or config.model_type in VISION_LANGUAGE:  # proved by tests of the engine
        # torch's kernel, except for what it does not have: the softcap of Gemma 2 and the sinks of gpt-oss.
        eager = getattr(text, "attn_logit_softcapping", None) or text.model_type == "gpt_oss"
        return FamilyForm(Form.PADDED, "eager" if eager else "sdpa")
    narrow = shrink(config, longest_row).config
    prompts = random_rows(narrow, PROMPTS)
    reason, attention = "", "eager"
    try:
        attentions = _attentions(narrow, prompts)
    except Exception as error:  # of any kind: it is the code of any family
        attentions, reason = [], f"its eager attention does not run over whole rows ({one_line(error)})"
    for form in Form if attentions else ():
        failures = []
        for attention in attentions:
            if not (failure := _failure(narrow, attention, form, prompts)):
                return FamilyForm(form, attention, reason)
            failures.append(failure)
        reason = f"with {form.value} {failures[0]}"
    if is_trained:
        raise UserError(
            f"rollout.engine=hf: a narrow copy of {config.model_type!r} decodes rows, in proportion to {longest_row} "
            f"tokens, otherwise than it computes whole rows: {reason}. Use shorter rows, or another rollout.engine."
        )
    return FamilyForm(Form.WHOLE, attention, reason)


def generate(
    module: PreTrainedModel,
    form: Form,
    prompts: Sequence[tuple[int, ...]],
    uniforms: Tensor,
    limits: Sequence[int],
    sampling: Sampling,
    aborted: Callable[[], bool],
    text_end: TextEnd | None = None,
) -> list[Completion]:
    """Does the same as `decoding.decode` in the other forms; EQUAL by `generate` of the module."""
    groups: dict[object, list[int]] = defaultdict(list)
    for number, prompt in enumerate(prompts):
        groups[len(prompt) if form is Form.EQUAL else number].append(number)
    results: dict[int, Completion] = {}
    for numbers in groups.values():
        index, ids = torch.tensor(numbers), torch.tensor([prompts[number] for number in numbers], device=module.device)
        draw = _Draw(index, uniforms[index], torch.tensor(limits)[index], sampling, aborted, text_end)
        if form is Form.WHOLE:
            while draw.running.any() and not (draw.started and aborted()):
                drawn = draw(ids, row_logits(module, ids)[:, -1]).argmax(-1, keepdim=True)
                ids = torch.cat([ids, drawn], 1)
            results |= dict(zip(numbers, draw.results(), strict=True))
            continue
        options = GenerationConfig(max_new_tokens=int(draw.limits.max()), do_sample=False, pad_token_id=0)
        module.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=options,
            logits_processor=LogitsProcessorList([draw]),
            stopping_criteria=StoppingCriteriaList([_End(draw)]),
        )
        results |= dict(zip(numbers, draw.results(), strict=True))
    return [results[number] for number in range(len(prompts))]


class _Draw(LogitsProcessor):
    """Draws tokens by the engine's rules, and leaves `generate` no other choice; index, uniforms, limits: n rows."""

    def __init__(
        self,
        index: Tensor,
        uniforms: Tensor,
        limits: Tensor,
        sampling: Sampling,
        aborted: Callable[[], bool],
        text_end: TextEnd | None,
    ) -> None:
        self.limits, self.aborted = limits, aborted
        self.running = torch.ones(len(index), dtype=torch.bool)
        self._index, self._uniforms, self._sampling, self._text_end = index, uniforms, sampling, text_end
        self._stops = torch.tensor(sampling.stop_token_ids, dtype=torch.int64)
        self._tokens: list[Tensor] = []
        self._logprobs: list[Tensor] = []
        self._lengths = torch.zeros(len(index), dtype=torch.int64)
        self._reports = Reports(len(index))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]  # annotated LongTensor
        """Returns logits with which only the drawn tokens are possible."""
        step = len(self._tokens)
        draws = draw_tokens(scores, self._uniforms[:, step].to(scores.device), self._sampling)
        tokens = draws.tokens.cpu()
        self._tokens.append(tokens)
        self._logprobs.append(draws.logprobs.cpu())
        self._reports.add(torch.arange(len(tokens)), draws)
        self._lengths += self.running
        self.running &= ~torch.isin(tokens, self._stops) & (self.limits > step + 1)
        if self._text_end:
            self.running &= ~self._text_end.reached(self._index, tokens, self.running)
        return torch.full_like(scores, -torch.inf).scatter(1, draws.tokens[:, None], 0.0)

    @property
    def started(self) -> bool:
        """Returns whether any tokens were drawn."""
        return bool(self._tokens)

    def results(self) -> list[Completion]:
        """Returns the tokens of each row up to its end."""
        tokens, logprobs = torch.stack(self._tokens, 1).tolist(), torch.stack(self._logprobs, 1).tolist()
        ends = zip(tokens, logprobs, self._lengths.tolist(), strict=True)
        return [
            self._reports.completion(row, of_row[:length], scores[:length])
            for row, (of_row, scores, length) in enumerate(ends)
        ]


class _End(StoppingCriteria):
    """Ends rows that have their last token, and all of them where the engine is aborted."""

    def __init__(self, draw: _Draw) -> None:
        self._draw = draw

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:  # type: ignore[override]
        """Returns which rows have ended, (n,) bool."""
        return (~self._draw.running | self._draw.aborted()).to(input_ids.device)


# -- the proof


def _attentions(narrow: PreTrainedConfig, prompts: Sequence[tuple[int, ...]]) -> list[str]:
    """Returns the attentions that compute whole rows as the eager one does, the faster first."""
    expected = row_logprobs(narrow_module(narrow, "eager"), prompts)
    try:
        fails = _difference(expected, row_logprobs(narrow_module(narrow, "sdpa"), prompts))
    except Exception as error:  # of any kind: some families have no such attention
        fails = one_line(error)
    return ["eager"] if fails else ["sdpa", "eager"]


def _failure(narrow: PreTrainedConfig, attention: str, form: Form, prompts: Sequence[tuple[int, ...]]) -> str:
    """Returns what is wrong with a form, "" where it is right."""
    sampling = Sampling(max_new_tokens=NEW_TOKENS)
    uniforms = torch.rand(len(prompts), NEW_TOKENS, generator=torch.Generator().manual_seed(1))
    # Rows end at different tokens: those that have ended leave the cache.
    limits = [NEW_TOKENS, NEW_TOKENS, NEW_TOKENS // 2, NEW_TOKENS]
    arguments = (prompts, uniforms, limits, sampling, lambda: False)
    try:
        module = narrow_module(narrow, attention)
        results = decode(module, *arguments) if form is Form.PADDED else generate(module, form, *arguments)
        rows = [(*prompt, *result.tokens) for prompt, result in zip(prompts, results, strict=True)]
        expected = [
            row[len(prompt) - 1 :]
            for prompt, row in zip(prompts, row_logprobs(narrow_module(narrow, "eager"), rows), strict=True)
        ]
        return _difference(expected, [torch.tensor(result.logprobs) for result in results])
    except Exception as error:  # of any kind: it is the code of any family
        return one_line(error, 120)


def _difference(expected: Sequence[Tensor], computed: Sequence[Tensor]) -> str:
    error = float((torch.cat(list(expected)) - torch.cat(list(computed))).abs().max())
    return "" if error <= TOLERANCE else f"log-probs differ by {error:.2g}"
