"""`TokenOutputs`: what a language model computes for each token that it scores, the same on both backends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl_mg.algorithms.divergence import Divergence, top_divergence
from verl_mg.training.logprobs import vocab_parallel_divergence, vocab_parallel_logprobs
from verl_mg.training.microbatch import TEACHER, TEACHER_HIDDEN, TEACHER_TOP, MicroBatch
from verl_mg.training.output_layer import OutputLayer
from verl_mg.training.vocab_divergence import TeacherTokens, vocab_parallel_top


@dataclass(frozen=True)
class TeacherDivergence:
    """Divergence of a student from its teachers, over the whole vocabulary or over the teachers' likeliest tokens."""

    divergence: Divergence
    layers: Sequence[OutputLayer] | None = None
    """Output layers of the teachers on this rank, by their numbers in the column TEACHER; [] where the rank scores no
    tokens. None: only the tokens of the column TEACHER_TOP count."""

    def of_tokens(self, output: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        """Returns the divergence of each token, (n,) nats with gradients; `output` as of `TokenOutputs.compute`."""
        if self.layers is not None:
            return output[2]
        return top_divergence(self.divergence, columns[TEACHER_TOP][:, 0], output[2:].T)


@dataclass(frozen=True)
class TokenOutputs:
    """Request to a language model: log-probs, or in place of them what a student needs of its teacher."""

    entropy: bool = True  # compute entropies too
    # Compare with teachers, whose columns the micro-batches have; with entropies.
    teacher: TeacherDivergence | None = None
    top: int = 0  # number of likeliest tokens, whose log-probs and ids are the output; 0: they are not
    hidden: int = 0  # size of the last hidden states, which are the output; 0: they are not
    dtype: torch.dtype = torch.float32  # data type of the column of the outputs

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions of a token's entry in the column of the outputs: () where it is a log-prob."""
        if self.hidden:
            return (self.hidden,)
        return (2, self.top) if self.top else ()

    def compute(self, states: Tensor, micro: MicroBatch[Any], layer: OutputLayer, temperature: float) -> Tensor:
        """Computes the outputs (lines, m) in float32 from the last hidden states (m, h) of a rank's tokens.

        Lines are log-probs; entropies if requested; then divergences in one line, or log-probs of the k tokens of
        TEACHER_TOP in k lines. With `top` 2 k lines, log-probs and ids; with `hidden` h lines.
        """
        if self.hidden:
            return states.T.float()
        if self.top:
            return torch.cat([part.T.float() for part in vocab_parallel_top(states, layer, temperature, self.top)])
        if self.teacher is None:
            logprobs, entropy = vocab_parallel_logprobs(states, micro.targets, layer, temperature, self.entropy)
            return logprobs[None] if entropy is None else torch.stack([logprobs, entropy])
        if self.teacher.layers is None:
            likeliest = micro.local_column(TEACHER_TOP)[:, 1].long()
            # The candidates are further targets of the same product: one pass over the logits scores all of them.
            targets = torch.cat([micro.targets[:, None], likeliest], 1)
            logprobs, entropy = vocab_parallel_logprobs(states, targets, layer, temperature)
            assert entropy is not None
            return torch.cat([logprobs[:, :1].T, entropy[None], logprobs[:, 1:].T])
        hidden, teachers = micro.local_column(TEACHER_HIDDEN), micro.local_column(TEACHER)
        theirs = TeacherTokens(self.teacher.divergence, self.teacher.layers, hidden, teachers)
        return torch.stack(vocab_parallel_divergence(states, micro.targets, layer, temperature, theirs))


LOGPROBS = TokenOutputs(entropy=False)  # only log-probs
EVERYTHING = TokenOutputs()  # log-probs and entropies, which every update reports
