"""Rows of a batch from generated samples."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verl_mg.batch import Batch
from verl_mg.data.prompts import Prompt
from verl_mg.rollout.engine import Sample
from verl_mg.rollout.trajectory import NOT_GENERATED


def samples_to_batch(prompts: Sequence[Prompt], samples: Sequence[Sample], policy_version: int) -> Batch:
    """Returns rows of prompt and response, without the columns `group` and `generated_by`.

    Args:
        prompts: the prompt of each row.
        samples: the sample of each row.
        policy_version: `policy_version` of a response without tokens.
    """
    batch = Batch.from_rows((*p.tokens, *s.tokens) for p, s in zip(prompts, samples, strict=True))
    batch["prompt_length"] = torch.tensor([len(prompt.tokens) for prompt in prompts], dtype=torch.int64)
    batch["prompt_id"] = torch.tensor([prompt.id for prompt in prompts], dtype=torch.int64)
    batch["sample_id"] = torch.tensor([sample.id for sample in samples], dtype=torch.int64)
    oldest = [min((v for v in s.policy_versions if v != NOT_GENERATED), default=policy_version) for s in samples]
    batch["policy_version"] = torch.tensor(oldest, dtype=torch.int64)
    batch["truncated"] = torch.tensor([sample.finish != "stop" for sample in samples], dtype=torch.bool)
    response = batch.positions >= batch.expand_to_tokens(batch["prompt_length"])
    versions = torch.full((batch.total_tokens,), NOT_GENERATED, dtype=torch.int64)
    versions[response] = torch.tensor([v for sample in samples for v in sample.policy_versions], dtype=torch.int64)
    batch["policy_versions"], batch["loss_mask"] = versions, versions != NOT_GENERATED
    logprobs = torch.zeros(batch.total_tokens)
    logprobs[response] = torch.tensor([value for sample in samples for value in sample.logprobs])
    batch["rollout_logprobs"] = logprobs
    if samples and samples[0].routed_experts is not None:
        lengths = batch.lengths.tolist()
        batch["routed_experts"] = torch.cat([_routed(s, n) for s, n in zip(samples, lengths, strict=True)])
    return batch


def _routed(sample: Sample, length: int) -> Tensor:
    """Returns (length, layers, top_k) int16; -1 for tokens that were never fed to the model, such as the last one."""
    routed = sample.routed_experts
    assert routed is not None
    return torch.cat([routed, routed.new_full((length - len(routed), *routed.shape[1:]), -1)])
