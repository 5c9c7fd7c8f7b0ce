"""Continuous decoding over a `transformers` module: rows that have ended are replaced by others.

Rows of similar length form a deck with a cache, in which they are aligned at the right. In a deck all rows get a token
in each step; the decks take turns, the one with most rows first:

    new rows ──prefill (each distinct prompt once)──▶ deck of up to 64 columns ─▶ of up to 256 ─▶ 1,024 ─▶ ...
                                                        each step: the module for one token of each row, draw_tokens
                                                        rows end: stop token, limit, stop string
    a quarter of a deck has ended, or is longer than its columns: `run` returns what has ended; with the next call rows
    that continue are copied into the cache of their deck, together with new ones

So attention costs what rows are long, not what the longest one is. A cache with more than keys, values and states of
linear attention is not divided: its rows run to their end before others begin. `run` ends early by an abort.
"""

from __future__ import annotations

import inspect
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from verl_mg.data.image_processor import ImageProcessor
from verl_mg.engines.engine import Sampling
from verl_mg.engines.hf.drawing import Row, add_draws, draw_tokens
from verl_mg.engines.hf.token_step import ColumnLayer, TokenStep, forward
from verl_mg.images import RowImages

# Rows leave a deck once this share of it has ended: leaving it copies the cache of all others, joining it is a prefill.
# With responses of 26 tokens an eighth and a half take more steps and prefills together, with 200 an eighth 5 % fewer.
SHARE_LEAVING = 0.25
COLUMNS, GROWTH = 64, 4  # columns of the first deck; each further one has as many times more


@dataclass(frozen=True)
class _Part:
    """Rows that go from a deck into another one."""

    source: _Deck
    index: list[int]  # their numbers in the source, which may repeat
    rows: list[Row]

    @property
    def lengths(self) -> list[int]:
        """Returns how many columns each row needs."""
        return [self.source.length - self.source.starts[i] for i in self.index]


@dataclass
class _Deck:
    """Rows that are continued together; row i is in the columns from `starts[i]` on. Its last token has none yet."""

    rows: list[Row]
    layers: list[Any]  # of the cache
    tokens: Tensor  # (r, 1) last tokens
    positions: Tensor  # (r, 1) their positions
    starts: list[int]
    columns: int  # that were in use when the deck was formed
    uniforms: Tensor  # (r, steps) draw the next tokens
    attend: Tensor  # (r, columns + steps) bool, false before a row
    step: int = 0  # steps since the deck was formed
    num_ended: int = 0

    def __post_init__(self) -> None:
        self.sorted_starts = sorted(self.starts)

    @property
    def length(self) -> int:
        """Returns the number of columns that are in use."""
        return self.columns + self.step

    @property
    def is_full(self) -> bool:
        """Returns whether there are no more spare columns."""
        return self.step == self.uniforms.shape[1]

    def is_left_by_many(self, bound: float) -> bool:
        """Returns whether so many rows have ended, or are longer than a bound, that the others are copied."""
        # Some may be both.
        leaving = self.num_ended + bisect_left(self.sorted_starts, self.length - bound)
        return leaving >= SHARE_LEAVING * len(self.rows)


class Decoder:
    """Continues rows of one module, of which some may begin while others continue."""

    def __init__(self, step: TokenStep, vision: VisionPrefill | None = None) -> None:
        self._module, self._step, self._vision = step.module, step, vision
        self._decks: dict[int, _Deck] = {}  # by level, the shortest rows first
        # The last prompt of a prefill, of which further samples may begin: its key, logits and cache.
        self._last: tuple[object, Tensor, _Deck] | None = None

    @property
    def takes_rows(self) -> bool:
        """Returns whether new rows can begin."""
        return all(_is_divisible(deck.layers) for deck in self._decks.values())

    def clear(self) -> None:
        """Forgets all rows, and the keys and values of prompts."""
        self._decks, self._last = {}, None

    def run(self, new: Sequence[Row], sampling: Sampling, aborted: Callable[[], bool]) -> None:
        """Begins rows, and continues all until some have ended; `aborted` is called after every token.

        All tokens are drawn by `sampling`, whose limit is not used.
        """
        self._step.renew()
        stops = frozenset(sampling.stop_token_ids)
        self._regroup(self._prefill(new, sampling, stops) if new else [])
        # Consumes numbers of the rows; ends when many of a deck have ended, or by an abort.
        while self._decks and not aborted():
            level, deck = max(self._decks.items(), key=lambda item: (len(item[1].rows), -item[0]))
            is_divided = len(self._decks) > 1
            bound = COLUMNS * GROWTH**level if is_divided else math.inf
            while not (deck.is_full or deck.is_left_by_many(bound)):
                self._advance(deck, sampling, stops)
                if aborted():
                    return
            if deck.num_ended:
                return
            self._regroup([])

    def _advance(self, deck: _Deck, sampling: Sampling, stops: frozenset[int]) -> None:
        """Gives each row of a deck its next token."""
        attend = deck.attend[:, : deck.length + 1]
        logits = self._step(deck.layers, deck.tokens, deck.positions, attend, deck.length)
        draws = draw_tokens(logits, deck.uniforms[:, deck.step], sampling)
        deck.tokens, deck.positions, deck.step = (draws.tokens[:, None], deck.positions + 1, deck.step + 1)
        deck.num_ended += add_draws(deck.rows, draws, stops)

    def _prefill(self, new: Sequence[Row], sampling: Sampling, stops: frozenset[int]) -> list[_Part]:
        """Runs every distinct prompt once, left-padded, and draws the first token of each row."""
        # The samples of a group have the same prompt, of which some may have begun before.
        known, groups = [], defaultdict(list)
        for row in new:
            key = (row.context, row.images)
            if self._last and key == self._last[0]:
                known.append(row)
            else:
                groups[key].append(row)
        parts, logits = [], []
        if known and self._last:
            parts.append(_Part(self._last[2], [0] * len(known), known))
            logits.append(self._last[1].expand(len(known), -1))
        if groups:
            of_prompts, deck = self._prompts([rows[0] for rows in groups.values()])
            index = [number for number, rows in enumerate(groups.values()) for _ in rows]
            parts.append(_Part(deck, index, [row for rows in groups.values() for row in rows]))
            logits.append(of_prompts[index])
            last = len(groups) - 1
            self._last = None
            if _is_divisible(deck.layers):
                self._last = ([*groups][-1], of_prompts[last:], _formed([_Part(deck, [last], [])]))
        rows = [row for part in parts for row in part.rows]
        uniforms = torch.stack([row.uniforms[0] for row in rows]).to(self._module.device)
        add_draws(rows, draw_tokens(torch.cat(logits), uniforms, sampling), stops)
        return parts

    def _prompts(self, rows: Sequence[Row]) -> tuple[Tensor, _Deck]:
        """Returns the logits after the contexts of rows, (r, V), and a deck with their cache."""
        contexts, device = [row.context for row in rows], self._module.device
        width = max(map(len, contexts))
        starts = [width - len(context) for context in contexts]
        ids = torch.tensor([[0] * start + list(context) for start, context in zip(starts, contexts, strict=True)])
        columns = torch.arange(width) - torch.tensor(starts)[:, None]
        ids, attend, positions = ids.to(device), (columns >= 0).to(device), columns.clamp(min=0).to(device)
        next_positions = torch.tensor([[len(context)] for context in contexts], device=device)
        inputs: dict[str, Tensor] = {}
        if self._vision and any(row.images for row in rows):
            images = [row.images for row in rows]
            positions, following, inputs = self._vision.inputs(ids, attend, positions, images)
            next_positions = following[:, None]
        cache = DynamicCache(config=self._module.config)
        if _is_divisible(cache.layers):
            cache.layers = [_with_columns(layer) for layer in cache.layers]
        logits = forward(self._module, cache, ids, attend, positions, **inputs)
        return logits, _Deck([], cache.layers, ids[:, -1:], next_positions, starts, width, ids[:, :0], attend)

    def _regroup(self, parts: list[_Part]) -> None:
        """Forms the decks of all rows that have not ended, `parts` of them new ones."""
        parts = [_Part(deck, [*range(len(deck.rows))], deck.rows) for deck in self._decks.values()] + parts
        parts = [part for part in map(_going_on, parts) if part.rows]
        # Without others that would wait for its longest row, a deck is not divided.
        is_divided = len(parts) > 1
        levels: dict[int, list[_Part]] = defaultdict(list)
        for part in parts:
            by_level: dict[int, _Part] = defaultdict(lambda source=part.source: _Part(source, [], []))  # type: ignore[misc]
            for row, number, length in zip(part.rows, part.index, part.lengths, strict=True):
                chosen = by_level[_level(length) if is_divided else 0]
                chosen.index.append(number)
                chosen.rows.append(row)
            for level, chosen in by_level.items():
                levels[level].append(chosen)
        self._decks = {level: _formed(of_level) for level, of_level in sorted(levels.items())}


def decode(
    module: PreTrainedModel, rows: Sequence[Row], sampling: Sampling, aborted: Callable[[], bool] = lambda: False
) -> None:
    """Continues rows to their end, or until `aborted`, which is called after every token."""
    decoder = Decoder(TokenStep(module))
    decoder.run(rows, sampling, aborted)
    while not (aborted() or all(row.finish for row in rows)):
        decoder.run([], sampling, aborted)


def _level(length: int) -> int:
    """Returns the number of the deck for rows of a length."""
    return next(level for level in count() if length <= COLUMNS * GROWTH**level)


def _going_on(part: _Part) -> _Part:
    """Returns a part without the rows that have ended."""
    going = [(i, row) for i, row in zip(part.index, part.rows, strict=True) if not row.finish]
    return _Part(part.source, [i for i, _ in going], [row for _, row in going])


# -- forming decks


def _formed(parts: Sequence[_Part]) -> _Deck:
    """Returns a deck of the rows of parts, without columns that no row needs, but with spare ones."""
    first, rows, lengths = (
        parts[0].source,
        [r for part in parts for r in part.rows],
        [n for p in parts for n in p.lengths],
    )
    if rows and len(parts) == 1 and rows == first.rows and not first.is_full:
        return first
    is_divisible = _is_divisible(first.layers)
    columns = max(lengths) if is_divisible else first.length
    # By half of what is needed, so few tokens copy the cache.
    steps = max(1, min(max((row.num_left for row in rows), default=0), columns // 2 + 32))
    device = first.tokens.device
    index = [torch.tensor(part.index, device=device) for part in parts]
    layers = []
    for number in range(len(first.layers)):
        of_parts = [part.source.layers[number] for part in parts]
        if not is_divisible:
            of_parts[0].reorder_cache(index[0])
            layers.append(of_parts[0])
        elif isinstance(of_parts[0], ColumnLayer):
            states = [
                _joined([getattr(layer, name) for layer in of_parts], parts, index, columns, steps)
                for name in ("keys", "values")
            ]
            layers.append(ColumnLayer(of_parts[0].window, *states))
        else:
            layers.append(_joined_states(of_parts, index))
    starts = [columns - length for length in lengths]
    numbers = [row.uniforms[len(row.tokens) :][:steps] for row in rows] or [torch.zeros(steps)]
    uniforms = pad_sequence([*numbers, torch.zeros(steps)], batch_first=True)[:-1]
    attend = torch.arange(columns + steps) >= torch.tensor(starts)[:, None]
    tokens = torch.tensor([row.tokens[-1:] for row in rows], device=device)
    positions = torch.cat([part.source.positions[chosen] for part, chosen in zip(parts, index, strict=True)])
    return _Deck(rows, layers, tokens, positions, starts, columns, uniforms.to(device), attend.to(device))


def _joined(
    states: Sequence[Tensor], parts: Sequence[_Part], index: Sequence[Tensor], columns: int, spare: int
) -> Tensor:
    """Returns the last columns of chosen rows of (rows, heads, columns, dim), aligned, followed by spare ones."""
    _, heads, _, dim = states[0].shape
    buffer = states[0].new_empty(sum(map(len, index)), heads, columns + spare, dim)
    blocks = buffer.split([*map(len, index)])
    for block, of_part, part, chosen in zip(blocks, states, parts, index, strict=True):
        width = min(columns, part.source.length)
        end = part.source.length
        block[:, :, : columns - width] = 0  # not attended to, but a weight of 0 is multiplied with it
        block[:, :, columns - width : columns] = of_part[:, :, end - width : end].index_select(0, chosen)
    return buffer


def _joined_states(layers: Sequence[LinearAttentionLayer], index: Sequence[Tensor]) -> LinearAttentionLayer:
    """Returns a layer with the states of chosen rows."""
    joined = copy(layers[0])
    for name in ("conv_states", "recurrent_states"):
        parts = [getattr(layer, name) for layer in layers]
        chosen = {
            key: None if parts[0][key] is None else torch.cat([p[key][i] for p, i in zip(parts, index, strict=True)])
            for key in parts[0]
        }
        setattr(joined, name, chosen)
    return joined


def _is_divisible(layers: Sequence[Any]) -> bool:
    """Returns whether rows of a cache can be joined with others and lose columns in front."""
    known = (DynamicLayer, DynamicSlidingWindowLayer, ColumnLayer, LinearAttentionLayer)
    return all(type(layer) in known for layer in layers)


def _with_columns(layer: Any) -> Any:
    """Returns a layer with columns in place of one that grows by copies."""
    if type(layer) is LinearAttentionLayer:
        return layer
    return ColumnLayer(layer.sliding_window if type(layer) is DynamicSlidingWindowLayer else None)


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
