"""Forms of decoding a family of `transformers`; a narrow copy of the family proves which is the fastest right one.

    PADDED    prompts of any length together, padded on the left, with a cache; rows join and leave (`decoding`)
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
from torch.nn.utils.rnn import pad_sequence
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
from verl_mg.engines.hf.decoding import decode
from verl_mg.engines.hf.drawing import Row, add_draws, draw_tokens
from verl_mg.engines.hf.token_step import implementation
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
        attentions, reason = ([], f"its eager attention does not run over whole rows ({one_line(error)})")
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
    rows: Sequence[Row],
    sampling: Sampling,
    aborted: Callable[[], bool] = lambda: False,
) -> None:
    """Does the same as `decoding.decode` in the other forms; EQUAL by `generate` of the module."""
    groups: dict[object, list[Row]] = defaultdict(list)
    for number, row in enumerate(rows):
        groups[len(row.context) if form is Form.EQUAL else number].append(row)
    for of_group in groups.values():
        ids = torch.tensor([row.context for row in of_group], device=module.device)
        draw = _Draw(of_group, sampling, aborted)
        if form is Form.WHOLE:
            while draw.is_running and not (draw.num_drawn and aborted()):
                drawn = draw(ids, row_logits(module, ids)[:, -1]).argmax(-1, keepdim=True)
                ids = torch.cat([ids, drawn], 1)
            continue
        options = GenerationConfig(
            max_new_tokens=max(row.num_left for row in of_group), do_sample=False, pad_token_id=0
        )
        module.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=options,
            logits_processor=LogitsProcessorList([draw]),
            stopping_criteria=StoppingCriteriaList([_End(draw)]),
        )


class _Draw(LogitsProcessor):
    """Draws tokens of n rows by the engine's rules, and leaves `generate` no other choice."""

    def __init__(self, rows: Sequence[Row], sampling: Sampling, aborted: Callable[[], bool]) -> None:
        self.rows, self.aborted, self.num_drawn = rows, aborted, 0
        self._uniforms = pad_sequence([row.uniforms for row in rows], batch_first=True)
        self._sampling, self._stops = sampling, frozenset(sampling.stop_token_ids)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]  # annotated LongTensor
        """Returns logits with which only the drawn tokens are possible."""
        draws = draw_tokens(scores, self._uniforms[:, self.num_drawn].to(scores.device), self._sampling)
        self.num_drawn += 1
        add_draws(self.rows, draws, self._stops)
        return torch.full_like(scores, -torch.inf).scatter(1, draws.tokens[:, None], 0.0)

    @property
    def is_running(self) -> bool:
        """Returns whether any row gets further tokens."""
        return not all(row.finish for row in self.rows)


class _End(StoppingCriteria):
    """Ends rows that have their last token, and all of them where the engine is aborted."""

    def __init__(self, draw: _Draw) -> None:
        self._draw = draw

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:  # type: ignore[override]
        """Returns which rows have ended, (n,) bool."""
        ended = torch.tensor([row.finish is not None for row in self._draw.rows], device=input_ids.device)
        return ended | self._draw.aborted()


# -- the proof


def _attentions(narrow: PreTrainedConfig, prompts: Sequence[tuple[int, ...]]) -> list[str]:
    """Returns the attentions that compute whole rows as the eager one does, the faster first."""
    expected = row_logprobs(narrow_module(narrow, "eager"), prompts)
    try:
        fails = _difference(expected, row_logprobs(narrow_module(narrow, implementation("sdpa")), prompts))
    except Exception as error:  # of any kind: some families have no such attention
        fails = one_line(error)
    return ["eager"] if fails else ["sdpa", "eager"]


def _failure(narrow: PreTrainedConfig, attention: str, form: Form, prompts: Sequence[tuple[int, ...]]) -> str:
    """Returns what is wrong with a form, "" where it is right."""
    sampling = Sampling(max_new_tokens=NEW_TOKENS)
    uniforms = torch.rand(len(prompts), NEW_TOKENS, generator=torch.Generator().manual_seed(1))
    # Rows end at different tokens: those that have ended leave the cache.
    limits = [NEW_TOKENS, NEW_TOKENS, NEW_TOKENS // 2, NEW_TOKENS]
    continued = [Row(prompt, of_row[:n]) for prompt, of_row, n in zip(prompts, uniforms, limits, strict=True)]
    try:
        module = narrow_module(narrow, implementation(attention))
        if form is Form.PADDED:
            decode(module, continued, sampling)
        else:
            generate(module, form, continued, sampling)
        whole = row_logprobs(narrow_module(narrow, "eager"), [(*row.context, *row.tokens) for row in continued])
        expected = [of_row[len(prompt) - 1 :] for prompt, of_row in zip(prompts, whole, strict=True)]
        return _difference(expected, [torch.tensor(row.logprobs) for row in continued])
    except Exception as error:  # of any kind: it is the code of any family
        return one_line(error, 120)


def _difference(expected: Sequence[Tensor], computed: Sequence[Tensor]) -> str:
    error = float((torch.cat(list(expected)) - torch.cat(list(computed))).abs().max())
    return "" if error <= TOLERANCE else f"log-probs differ by {error:.2g}"
