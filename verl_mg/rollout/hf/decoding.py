"""The decoding loop over a `transformers` module: one batch of prompts, from prefill to last token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel

from verl_mg.rollout.engine import Sampling
from verl_mg.rollout.hf.kv_cache import roomy_cache, take_rows
from verl_mg.rollout.hf.sampling import choose

# Rows leave the batch once this share of it is done: dropping a row copies the cache of all the others.
SHARE_DONE_BEFORE_COMPACTION = 0.25


@dataclass(frozen=True)
class Completions:
    """What n prompts were continued with: tokens (n, T) int64, logprobs (n, T) float32, lengths (n,) int64.

    Entries of a row past its length mean nothing.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor
    lengths: torch.Tensor


@dataclass
class _Rows:
    """The rows still in the batch: everything that has to follow when some of them leave.

    index: (r,) row of the completions; position: (r,) of the next token; attend: (r, prompt width + T) bool,
    false on left padding; running: (r,) bool, false once a stop token was drawn.
    """

    index: torch.Tensor
    position: torch.Tensor
    attend: torch.Tensor
    running: torch.Tensor

    def select(self, keep: torch.Tensor) -> None:
        self.index, self.position = self.index[keep], self.position[keep]
        self.attend, self.running = self.attend[keep], self.running[keep]


def decode(
    module: PreTrainedModel,
    prompts: Sequence[tuple[int, ...]],
    uniforms: torch.Tensor,
    sampling: Sampling,
    aborted: Callable[[], bool],
) -> Completions:
    """Continue n prompts by up to T = max_new_tokens tokens each.

    uniforms: (n, T), entry t of a row draws its t-th token. `aborted` is asked after every token.
    """
    device = module.device
    steps = sampling.max_new_tokens
    stops = torch.tensor(sampling.stop_token_ids, dtype=torch.int64, device=device)
    uniforms = uniforms.to(device)
    out = Completions(
        tokens=torch.zeros(len(prompts), steps, dtype=torch.int64, device=device),
        logprobs=torch.zeros(len(prompts), steps, device=device),
        lengths=torch.zeros(len(prompts), dtype=torch.int64, device=device),
    )
    cache = roomy_cache(module.config)
    logits, rows = _prefill(module, cache, prompts, steps)
    width = rows.attend.shape[1] - steps

    for step in range(steps):
        tokens, logprobs = choose(logits, uniforms[rows.index, step], sampling)
        out.tokens[rows.index, step] = tokens
        out.logprobs[rows.index, step] = logprobs
        out.lengths[rows.index] += rows.running
        rows.running &= ~torch.isin(tokens, stops)

        running = int(rows.running.sum())
        if running == 0 or step + 1 == steps or aborted():
            break
        if running <= (1 - SHARE_DONE_BEFORE_COMPACTION) * len(tokens):
            keep = rows.running.nonzero().squeeze(1)
            rows.select(keep)
            take_rows(cache, keep)
            tokens = tokens[keep]

        attend = rows.attend[:, : width + step + 1]
        logits = _forward(module, cache, tokens[:, None], attend, rows.position[:, None])
        rows.position += 1
    return out


def _prefill(
    module: PreTrainedModel, cache: DynamicCache, prompts: Sequence[tuple[int, ...]], steps: int
) -> tuple[torch.Tensor, _Rows]:
    """Run every distinct prompt once, left-padded, and give its cache row to all who share it.

    Returns the logits of the next token (n, V) and the n rows.
    """
    place = {prompt: row for row, prompt in enumerate(dict.fromkeys(prompts))}
    width = max(map(len, place))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in place])
    lengths = torch.tensor([len(prompt) for prompt in place])
    attend = torch.arange(width + steps) >= width - lengths[:, None]
    positions = (torch.arange(width) - (width - lengths[:, None])).clamp(min=0)

    device = module.device
    ids, lengths, attend, positions = (each.to(device) for each in (ids, lengths, attend, positions))
    logits = _forward(module, cache, ids, attend[:, :width], positions)
    if len(place) < len(prompts):
        shared = torch.tensor([place[prompt] for prompt in prompts], device=device)
        take_rows(cache, shared)
        logits, lengths, attend = logits[shared], lengths[shared], attend[shared]
    return logits, _Rows(
        index=torch.arange(len(prompts), device=device),
        position=lengths,
        attend=attend,
        running=torch.ones(len(prompts), dtype=torch.bool, device=device),
    )


def _forward(
    module: PreTrainedModel,
    cache: DynamicCache,
    ids: torch.Tensor,
    attend: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Logits (r, V) after the last of ids (r, t) at positions (r, t); attend: (r, cached + t) bool."""
    output = module(
        input_ids=ids,
        attention_mask=attend,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return output.logits[:, -1]
