"""Teachers' distributions over a sharded vocabulary, for divergences from them and for their likeliest tokens.

A teacher's last hidden state of a token has a few thousand numbers, its logits a hundred times as many. So hidden
states travel, and the ranks that train the student have the teacher's output layer, with the vocabulary sharded as
their own: logits of both exist for a chunk of tokens at a time, on the rank that has their rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from verl_mg.algorithms.divergence import Divergence
from verl_mg.training.output_layer import OutputLayer, log_normalizer, scaled


@dataclass(frozen=True)
class TeacherTokens:
    """Distributions of the tokens that a rank scores, by their teachers' last hidden states."""

    divergence: Divergence
    layers: Sequence[OutputLayer]  # output layer of each teacher, with the rows of the student's shard
    hidden: Tensor  # (m, h) last hidden states of the teachers; a narrower teacher has the first numbers
    teachers: Tensor  # (m,) int64 number of each token's teacher

    def logits(self, chunk: slice, temperature: float) -> Tensor:
        """Computes the teachers' float32 logits (tokens, real_rows) of a chunk, divided by the temperature."""
        if len(self.layers) == 1:
            return scaled(_logits(self.layers[0], self.hidden[chunk]), temperature)
        logits = self.hidden.new_empty(chunk.stop - chunk.start, self.layers[0].real_rows, dtype=torch.float32)
        for number, layer in enumerate(self.layers):
            rows = (self.teachers[chunk] == number).nonzero().flatten()
            logits[rows] = _logits(layer, self.hidden[chunk][rows])
        return scaled(logits, temperature)


def _logits(layer: OutputLayer, hidden: Tensor) -> Tensor:
    width = layer.weight.shape[1]
    return layer.logits(hidden[:, :width].to(layer.weight.dtype))


def vocab_parallel_top(hidden: Tensor, layer: OutputLayer, temperature: float, k: int) -> tuple[Tensor, Tensor]:
    """Computes the k likeliest tokens of softmax(logits / temperature), first of each shard, then of all.

    Returns their log-probs, (n, k) float32 and falling, and their ids, (n, k). `hidden` (n, h) is the same on every
    rank of the group.
    """
    logprobs = hidden.new_empty(len(hidden), k, dtype=torch.float32)
    tokens = torch.empty_like(logprobs, dtype=torch.int64)
    for chunk in layer.chunks(len(hidden)):
        logits = scaled(layer.logits(hidden[chunk]), temperature)
        normalizer = log_normalizer(logits, layer.group)
        values, rows = logits.topk(min(k, layer.real_rows))
        # A shard may have fewer than k real rows: padding of -inf is never among the best.
        missing = (0, k - values.shape[1])
        values = torch.nn.functional.pad(values, missing, value=-torch.inf)
        ids = torch.nn.functional.pad(rows + layer.first_token, missing)
        values, ids = _gathered(values, layer.group), _gathered(ids, layer.group)
        best, places = values.topk(k)
        logprobs[chunk] = best - normalizer[:, None]
        tokens[chunk] = ids.gather(1, places)
    return logprobs, tokens


def _gathered(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Returns the columns of all ranks, (n, ranks * k)."""
    if group is None or group.size() == 1:
        return values
    parts = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(parts, values.contiguous(), group=group)
    return torch.cat(parts, 1)
