"""The decoding loop over a `transformers` module: one batch of prompts, from prefill to the last token.

    _prefill (each distinct prompt once) --> logits --> draw_tokens --> rows end: stop token, limit, stop string
                                               ^                          |  a quarter of the batch has ended: these
                                               +------- _forward <--------+  rows leave the batch and the cache

The key-value cache grows in place (`PreallocatedLayer`). The loop ends with the last row, or by an abort after a token.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from verl_mg.data.image_processor import ImageProcessor
from verl_mg.engines.engine import Sampling
from verl_mg.engines.sampled_support import SampledSupport, likeliest
from verl_mg.engines.stop_strings import Decode, num_tokens_to_stop
from verl_mg.images import RowImages

# Rows leave the batch once this share of it is done: removing a row copies the cache of all others.
SHARE_DONE_BEFORE_COMPACTION = 0.25


class Draws(NamedTuple):
    """Tokens that were drawn for n rows, one each, and what is reported of them."""

    tokens: Tensor  # (n,) int64
    logprobs: Tensor  # (n,) float32
    candidates: Tensor | None = None  # (n, vocabulary) bool; None where they are not reported
    top: Tensor | None = None  # likeliest tokens, (n, 2, k) float32; None where they are not reported


class Completion(NamedTuple):
    """New tokens of a row, with the fields of a `Sample`."""

    tokens: list[int]
    logprobs: list[float]
    support: SampledSupport | None = None
    top: Tensor | None = None


class Reports:
    """Candidates and likeliest tokens of the draws of n rows, which are in the batch for different numbers of steps."""

    def __init__(self, rows: int) -> None:
        self._ids: list[list[Tensor]] = [[] for _ in range(rows)]
        self._tops: list[list[Tensor]] = [[] for _ in range(rows)]

    def add(self, index: Tensor, draws: Draws) -> None:
        """Adds one draw for each of the r rows `index`."""
        if draws.candidates is not None:
            ids = draws.candidates.nonzero()[:, 1].to("cpu", torch.int32)
            for row, of_row in zip(index.tolist(), ids.split(draws.candidates.sum(1).tolist()), strict=True):
                self._ids[row].append(of_row)
        if draws.top is not None:
            for row, top in zip(index.tolist(), draws.top.cpu(), strict=True):
                self._tops[row].append(top)

    def completion(self, row: int, tokens: list[int], logprobs: list[float]) -> Completion:
        """Returns the tokens of a row up to its end with what is reported of them."""
        ids, tops, support = self._ids[row][: len(tokens)], self._tops[row][: len(tokens)], None
        if ids:
            support = SampledSupport(
                torch.tensor([len(of_token) for of_token in ids], dtype=torch.int32), torch.cat(ids)
            )
        return Completion(tokens, logprobs, support, torch.stack(tops) if tops else None)


class TextEnd:
    """Watches the text of rows for stop strings, which may begin in `turns`, tokens of each row's partial sample."""

    def __init__(self, stop: Sequence[str], decode: Decode, turns: Sequence[tuple[int, ...]]) -> None:
        self._stop, self._decode, self._tokens = stop, decode, [list(turn) for turn in turns]
        self.ended: set[int] = set()  # numbers of the rows that have ended with a stop string
        # A token has a byte at least, and the first of those that are decoded may be part of a character.
        self._window = max(len(string.encode()) for string in stop) + 4

    def reached(self, index: torch.Tensor, tokens: torch.Tensor, running: torch.Tensor) -> torch.Tensor:
        """Adds a token to each of the r rows `index`, and returns which have a stop string now, (r,) bool."""
        drawn = zip(index.tolist(), tokens.tolist(), running.tolist(), strict=True)
        self.ended |= {row for row, token, active in drawn if active and self._ends(row, token)}
        return torch.tensor([row in self.ended for row in index.tolist()], device=tokens.device)

    def _ends(self, row: int, token: int) -> bool:
        written = self._tokens[row]
        written.append(token)
        # The window is a cheap test for each token; the whole text decides, as everywhere.
        text = self._decode(written[-self._window :])
        return any(string in text for string in self._stop) and bool(
            num_tokens_to_stop(written, self._stop, self._decode)
        )


@dataclass
class _Rows:
    """State of the r rows that are still in the batch."""

    index: torch.Tensor  # (r,) number of the prompt
    position: torch.Tensor  # (r,) position of the next token
    attend: torch.Tensor  # (r, prompt width + T) bool, false on left padding
    running: torch.Tensor  # (r,) bool, false once a stop token was drawn or the row has as many tokens as it may have
    limit: torch.Tensor  # (r,) largest number of tokens

    def select(self, keep: torch.Tensor) -> None:
        self.index, self.position = self.index[keep], self.position[keep]
        self.attend, self.running, self.limit = self.attend[keep], self.running[keep], self.limit[keep]


def decode(
    module: PreTrainedModel,
    prompts: Sequence[tuple[int, ...]],
    uniforms: torch.Tensor,
    limits: Sequence[int],
    sampling: Sampling,
    aborted: Callable[[], bool],
    images: Sequence[RowImages] = (),
    vision: VisionPrefill | None = None,
    text_end: TextEnd | None = None,
) -> list[Completion]:
    """Continues n prompts, each by up to its limit of tokens, of which T is the largest.

    `uniforms` (n, T) are in [0, 1): entry t of a row draws its t-th token. `aborted` is called after every token. The
    limit in `sampling` is not used. Without `images` no prompt has any; they need `vision`.
    """
    device = module.device
    steps = max(limits)
    stops = torch.tensor(sampling.stop_token_ids, dtype=torch.int64, device=device)
    uniforms = uniforms.to(device)
    drawn = torch.zeros(len(prompts), steps, dtype=torch.int64, device=device)
    scores = torch.zeros(len(prompts), steps, device=device)
    lengths = torch.zeros(len(prompts), dtype=torch.int64, device=device)
    reports = Reports(len(prompts))
    cache = DynamicCache(config=module.config)
    # Layers that keep a window or a state instead of all columns are unchanged.
    cache.layers = [PreallocatedLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    logits, rows = _prefill(module, cache, prompts, limits, images or [()] * len(prompts), vision)
    width = rows.attend.shape[1] - steps

    for step in range(steps):
        draws = draw_tokens(logits, uniforms[rows.index, step], sampling)
        tokens = draws.tokens
        drawn[rows.index, step], scores[rows.index, step] = tokens, draws.logprobs
        reports.add(rows.index, draws)
        lengths[rows.index] += rows.running
        rows.running &= ~torch.isin(tokens, stops) & (rows.limit > step + 1)
        if text_end:
            rows.running &= ~text_end.reached(rows.index, tokens, rows.running)

        running = int(rows.running.sum())  # waits for the device, once for each token
        if running == 0 or step + 1 == steps or aborted():
            break
        # Rows that have ended stay in the batch until then; what they draw is after their length.
        if running <= (1 - SHARE_DONE_BEFORE_COMPACTION) * len(tokens):
            keep = rows.running.nonzero().squeeze(1)
            rows.select(keep)
            select_rows(cache, keep)
            tokens = tokens[keep]

        attend = rows.attend[:, : width + step + 1]
        logits = _forward(module, cache, tokens[:, None], attend, rows.position[:, None])
        rows.position += 1
    ends = zip(drawn.tolist(), scores.tolist(), lengths.tolist(), strict=True)
    return [
        reports.completion(row, tokens_of_row[:length], of_row[:length])
        for row, (tokens_of_row, of_row, length) in enumerate(ends)
    ]


def _prefill(
    module: PreTrainedModel,
    cache: DynamicCache,
    prompts: Sequence[tuple[int, ...]],
    limits: Sequence[int],
    images: Sequence[RowImages],
    vision: VisionPrefill | None,
) -> tuple[torch.Tensor, _Rows]:
    """Runs every distinct prompt once, left-padded, and copies its cache row to all rows with this prompt and images.

    Returns the logits of the next token, (n, V), and the n rows.
    """
    steps = max(limits)
    keys = list(zip(prompts, images, strict=True))
    # The samples of a group have the same prompt.
    row_of = {key: row for row, key in enumerate(dict.fromkeys(keys))}
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt, _ in row_of])
    lengths = torch.tensor([len(prompt) for prompt, _ in row_of])
    attend = torch.arange(width + steps) >= width - lengths[:, None]
    positions = (torch.arange(width) - (width - lengths[:, None])).clamp(min=0)

    device = module.device
    ids, lengths, attend, positions = (each.to(device) for each in (ids, lengths, attend, positions))
    inputs: dict[str, torch.Tensor] = {}
    if vision and any(images):
        of_prompts = [of_prompt for _, of_prompt in row_of]
        positions, lengths, inputs = vision.inputs(ids, attend[:, :width], positions, of_prompts)
    logits = _forward(module, cache, ids, attend[:, :width], positions, **inputs)
    if len(row_of) < len(prompts):
        shared = torch.tensor([row_of[key] for key in keys], device=device)
        select_rows(cache, shared)
        logits, lengths, attend = logits[shared], lengths[shared], attend[shared]
    return logits, _Rows(
        index=torch.arange(len(prompts), device=device),
        position=lengths,
        attend=attend,
        running=torch.ones(len(prompts), dtype=torch.bool, device=device),
        limit=torch.tensor(limits, device=device),
    )


def _forward(
    module: PreTrainedModel,
    cache: DynamicCache,
    ids: torch.Tensor,
    attend: torch.Tensor,
    positions: torch.Tensor,
    **inputs: Any,
) -> torch.Tensor:
    """Returns the logits (r, V) after the last of ids (r, t) at positions (r, t); attend: (r, cached + t) bool."""
    output = module(
        input_ids=ids,
        attention_mask=attend,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
        **inputs,
    )
    return output.logits[:, -1]


def uniforms(seed: int, n: int) -> torch.Tensor:
    """Returns n random numbers in [0, 1) that depend only on `seed`, on the CPU; entry t draws the t-th token."""
    return torch.rand(n, generator=torch.Generator().manual_seed(seed))


def draw_tokens(logits: torch.Tensor, uniforms: torch.Tensor, sampling: Sampling) -> Draws:
    """Draws one token per row by inverting its cumulative distribution at the row's uniform number.

    `logits` are (n, V), `uniforms` (n,). Log-probs in nats are under the full temperature-scaled distribution, which
    top-k, top-p, min-p and exclusion do not renormalise, or under that of the candidates where these are reported.
    """
    # With given uniforms a sample depends only on its seed, and not on the other rows or on the device's generator.
    scores = logits.float()
    if sampling.temperature > 0:
        scores = scores / sampling.temperature
    best_score, best = scores.max(dim=-1, keepdim=True)
    weights = torch.exp(scores - best_score)
    total = weights.sum(dim=-1, keepdim=True)
    if sampling.excluded_token_ids:
        excluded = torch.tensor(sampling.excluded_token_ids, device=scores.device)
        # After `total`: training computes log-probs under the full distribution, and so they are here.
        weights = weights.index_fill(-1, excluded, 0.0)
        best = scores.index_fill(-1, excluded, -torch.inf).argmax(dim=-1, keepdim=True)
    tokens, candidates = best, None
    if sampling.temperature > 0:
        kept, ids = _kept(weights, total, sampling)
        first = best if ids is None else torch.zeros_like(best)
        columns = _invert(kept, first, uniforms[:, None])
        tokens = columns if ids is None else ids.gather(-1, columns)
        if sampling.reports_support:
            total = kept.sum(dim=-1, keepdim=True)
            candidates = (
                kept > 0 if ids is None else torch.zeros_like(weights, dtype=torch.bool).scatter(-1, ids, kept > 0)
            )
    logprobs = scores.gather(-1, tokens) - best_score - total.log()
    top = None
    if sampling.top_logprobs:
        under = scores - best_score - total.log()
        top = likeliest(under if candidates is None else under.where(candidates, -torch.inf), sampling.top_logprobs)
    return Draws(tokens.squeeze(-1), logprobs.squeeze(-1), candidates, top)


def _kept(weights: torch.Tensor, total: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns unnormalised weights (n, V) that are 0 but for candidates; with the ids of the columns where sorted."""
    if sampling.min_p > 0:
        weights = weights * (weights >= sampling.min_p * weights.amax(dim=-1, keepdim=True))
    if sampling.top_k == 0 and sampling.top_p == 1:
        return weights, None
    return _most_probable(weights, total, sampling)


def _most_probable(weights: torch.Tensor, total: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorts weights in descending order, cut to top-k and 0 outside top-p; returns them and token ids, both (n, k)."""
    kept, ids = weights.sort(dim=-1, descending=True, stable=True)
    if sampling.top_k > 0:
        kept, ids = kept[:, : sampling.top_k], ids[:, : sampling.top_k]
    mass_before = (kept.cumsum(dim=-1) - kept) / total
    inside = mass_before < sampling.top_p
    inside[:, 0] = True  # the subtraction above may leave a rounding error where there is no mass
    return kept * inside, ids


def _invert(weights: torch.Tensor, best: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Finds the first column whose cumulative weight exceeds the uniform share of the total, (n, 1)."""
    cumulative = weights.cumsum(dim=-1)
    columns = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
    columns = columns.clamp(max=weights.shape[-1] - 1)  # the product can round up to the total itself
    # A parallel cumsum need not be exactly monotonic: a column without weight must never be drawn.
    return torch.where(weights.gather(-1, columns) > 0, columns, best)


class PreallocatedLayer(DynamicLayer):
    """A cache layer with spare columns; `keys` and `values` (rows, heads, length, dim) are views of its buffers.

    `DynamicLayer` copies the whole cache at every token.
    """

    key_buffer: torch.Tensor
    value_buffer: torch.Tensor

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Starts without columns, in the dtype and on the device of the states (rows, heads, new, dim)."""
        super().lazy_initialization(key_states, value_states)
        self._keep(key_states[:, :, :0], value_states[:, :, :0], length=0)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends states, and returns all keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if end > self.key_buffer.shape[-2]:  # by half of what is needed, so few tokens copy the cache
            self.key_buffer = _grown(self.key_buffer[:, :, :start], end)
            self.value_buffer = _grown(self.value_buffer[:, :, :start], end)
        self.key_buffer[:, :, start:end] = key_states
        self.value_buffer[:, :, start:end] = value_states
        return self._keep(self.key_buffer, self.value_buffer, length=end)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Keeps the given rows, without the spare columns."""
        length = self.get_seq_length()
        keys = self.key_buffer[:, :, :length].index_select(0, beam_idx)
        values = self.value_buffer[:, :, :length].index_select(0, beam_idx)
        self._keep(keys, values, length)

    def _keep(self, keys: torch.Tensor, values: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.key_buffer, self.value_buffer = keys, values
        self.keys, self.values = keys[:, :, :length], values[:, :, :length]
        return self.keys, self.values


def select_rows(cache: DynamicCache, rows: torch.Tensor) -> None:
    """Replaces the rows of a cache by a selection of them, (r,) int64 indices that may repeat."""
    cache.reorder_cache(rows)  # type: ignore[arg-type]  # annotated LongTensor, which no tensor function returns


def _grown(states: torch.Tensor, columns: int) -> torch.Tensor:
    """Copies (rows, heads, length, dim) into a buffer for `columns` columns, half as many again, and 32."""
    rows, heads, length, dim = states.shape
    buffer = states.new_empty(rows, heads, columns + columns // 2 + 32, dim)
    buffer[:, :, :length] = states
    return buffer


class VisionPrefill:
    """Makes the inputs of prefills with images for one model."""

    def __init__(self, module: PreTrainedModel, processor: ImageProcessor) -> None:
        self._processor = processor
        self._arguments = set(inspect.signature(module.forward).parameters)
        self._positions = getattr(module.base_model, "get_rope_index", None)

    def inputs(
        self, ids: Tensor, attend: Tensor, positions: Tensor, images: Sequence[RowImages]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Returns positions of the tokens and of the first new ones, (r,), and further arguments of the model.

        `ids` (r, t) are padded on the left, `attend` (r, t) is false on padding, `positions` (r, t) are in the text. A
        model may have a position for each of time, height and width: (3, r, t).
        """
        kinds = self._processor.image_mask(ids).int()
        of_images = {name: values.to(ids.device) for name, values in self._processor.model_inputs(images).items()}
        # Models name the mask of images differently, and take only some of the processor's tensors.
        given = {"mm_token_type_ids": kinds, "token_type_ids": kinds} | of_images
        inputs = {name: values for name, values in given.items() if name in self._arguments}
        lengths = attend.sum(1)
        if self._positions is None:
            return positions, lengths, inputs
        positions, offsets = self._positions(ids, attention_mask=attend.long(), **inputs)
        # An image can take fewer positions than tokens, so the next position is not the number of tokens.
        return positions, lengths + offsets.flatten(), inputs
