"""Rows of a `Batch` as the input of one forward pass, and what a loss sees of its output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_mg.algorithms.losses import Metrics
from verl_mg.batch import Batch, ColumnKind
from verl_mg.megatron.attention import PackedSequences, describe
from verl_mg.megatron.process_groups import Cut
from verl_mg.megatron.routing import routed_experts


@dataclass(frozen=True)
class MicroBatch:
    """Packed rows on the device. Only the n tokens under the loss mask (never a row's first) are judged.

    entries (n,) on the CPU: their places in the token columns of `rows`; sequence_ids (n,): their row.
    T is the rows' tokens and fewer than tp * cp more, which make it a multiple of that. A context-parallel rank
    computes a run of T / cp tokens, and judges the m tokens that are judged by what is in it, their predecessors or
    themselves: input_ids (1, T / cp): the run; where (m,): the places of these in it; targets (m,): the judged tokens;
    own (m,): which of the n they are.
    """

    rows: Batch
    input_ids: Tensor
    packed: PackedSequences
    where: Tensor
    targets: Tensor
    own: Tensor
    entries: Tensor
    sequence_ids: Tensor


def make_micro_batch(
    rows: Batch,
    inverse_frequencies: Tensor,
    attention_scaling: float,
    dtype: torch.dtype,
    cut: Cut,
    behind: int = 1,
) -> MicroBatch:
    """Put rows side by side, for the rank that has its part of the cut.

    A token is judged by the hidden state `behind` places before it: 1, that it was drawn from, or 0, its own.
    """
    device = inverse_frequencies.device
    total, parts = rows.total_tokens, cut.tp * cut.context
    filler = -total % parts if total else parts
    lengths = torch.cat([rows.lengths, torch.tensor([filler] if filler else [], dtype=torch.int64)])
    tokens = torch.cat([rows["tokens"], torch.zeros(filler, dtype=torch.int64)])
    entries = (rows["loss_mask"] & (rows.positions > 0)).nonzero().flatten()
    run = len(tokens) // cut.context
    start = cut.context_index * run
    own = ((entries - behind) // run == cut.context_index).nonzero().flatten()
    packed = describe(lengths, inverse_frequencies, attention_scaling, dtype)
    experts = routed_experts(rows, filler, cut)
    packed.experts = None if experts is None else experts.to(device)
    packed.context = cut.group
    return MicroBatch(
        rows=rows,
        input_ids=tokens[start : start + run][None].to(device),
        packed=packed,
        where=(entries[own] - behind - start).to(device),
        targets=tokens[entries[own]].to(device),
        own=own.to(device),
        entries=entries,
        sequence_ids=rows.sequence_ids[entries].to(device),
    )


LossOutput = tuple[Tensor, Metrics]
"""Result of a loss function: the loss of each scored token, (n,) with gradients, and metrics (n,) by name."""


@dataclass(frozen=True)
class LossInputs:
    """Scored tokens of a micro-batch as the input of a loss function; all tensors are flat, (n,).

    `inputs["name"]` is a column of the batch; a sequence column is expanded to its tokens.
    """

    output: Tensor
    """Output of the model with gradients: log-probs and entropy (2, n), or values (1, n)."""
    mask: Tensor
    """True for every token, (n,) bool."""
    sequence_ids: Tensor
    """Row of each token in the micro-batch, (n,) int64."""
    columns: Mapping[str, Tensor]
    """Columns of the batch at the scored tokens, (n, ...) by name."""

    @property
    def logprobs(self) -> Tensor:
        """Log-probs of the tokens at the sampling temperature, in nats, with gradients."""
        return self.output[0]

    @property
    def entropy(self) -> Tensor:
        """Entropy of the distribution that each token was sampled from, in nats, with gradients."""
        return self.output[1]

    @property
    def values(self) -> Tensor:
        """Outputs of the value head, with gradients; the column of earlier values is `inputs["values"]`."""
        return self.output[0]

    @property
    def old_logprobs(self) -> Tensor:
        """Log-probs before the first update on the batch, in nats."""
        return self.columns["old_logprobs"]

    @property
    def ref_logprobs(self) -> Tensor:
        """Log-probs of the reference policy, in nats."""
        return self.columns["ref_logprobs"]

    @property
    def advantages(self) -> Tensor:
        """Advantages of the tokens."""
        return self.columns["advantages"]

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name]

    def __contains__(self, name: object) -> bool:
        return name in self.columns


def loss_tokens(micro: MicroBatch, output: Tensor) -> LossInputs:
    """Returns the input of a loss function.

    Args:
        micro: the micro-batch.
        output: output of the model for its scored tokens, (2, n), or (1, n) with a value head.
    """
    device = output.device
    columns = {}
    for name in micro.rows.names():
        column = micro.rows[name]
        if micro.rows.kind(name) is ColumnKind.SEQUENCE:
            column = micro.rows.expand_to_tokens(column)
        columns[name] = column[micro.entries].to(device)
    return LossInputs(
        output=output,
        mask=torch.ones_like(output[0], dtype=torch.bool),
        sequence_ids=micro.sequence_ids,
        columns=columns,
    )
