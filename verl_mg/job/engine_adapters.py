"""Adapters that engines of a job receive without the weights: which, and under which configurations."""

from __future__ import annotations

import torch

from verl_mg.checkpoint.peft import adapted_tensors, module_name
from verl_mg.config import Config, LoraConfig
from verl_mg.engines.engine_adapters import FUSED, AdapterSettings, fused_targets
from verl_mg.engines.vllm.arguments import served_rank
from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout
from verl_mg.sharding.model_table import ModelTable


def adapter_settings(config: Config, table: ModelTable) -> AdapterSettings | None:
    """Returns the adapters for which engines are started; None where adapters are merged."""
    if not config.rollout.adapters or config.actor.lora is None:
        return None
    lora = config.actor.lora
    return AdapterSettings(lora.rank, fused_targets(_targets(table, lora)))


def check_adapters(config: Config, table: ModelTable, ranks_per_node: int) -> None:
    """Checks that the engines can compute with adapters; UserError with the key that is in the way."""
    rollout, lora = config.rollout, config.actor.lora
    if lora is None:
        raise _refused("the actor has none. Set actor.lora, or leave it out")
    if rollout.engine == "hf":
        raise _refused("the engine hf has merged weights. Write rollout.engine=sglang or vllm, or leave it out")
    if rollout.has_servers:
        raise _refused("servers outside the job receive merged weights. Leave it out, or leave out rollout.urls")
    if rollout.wire != "cast" or rollout.delta:
        other = "delta" if rollout.delta else f"wire={rollout.wire}"
        raise _refused(f"rollout.{other} is for weights that are sent again and again. Leave one of them out")
    if rollout.mode == "async":
        # SGLang unloads an adapter only when no request uses it, so `max_staleness` could not hold.
        raise _refused(
            "requests in flight keep the adapters with which they began. Write rollout.mode=one_step_off or sync"
        )
    if rollout.sleep and not rollout.num_ranks and torch.cuda.is_available():
        raise _refused(
            "engines that sleep lose the weights under the adapters. Write rollout.sleep=false or rollout.num_ranks"
        )
    if lora.experts:
        raise _refused("engines receive no adapters of experts. Leave it out, or leave out actor.lora.experts")
    if table.config.latent:
        raise _refused("engines compute latent attention with weights only. Leave it out")
    _check_targets(table, lora)
    layout = EngineLayout.parse(rollout.layout)
    if layout.adp > 1:
        raise _refused(f"SGLang pins adapters with rollout.layout={layout}. Leave it out, or remove adp")
    if layout.ranks > ranks_per_node:
        raise _refused(
            f"adapters are in the memory of one node, and engines of rollout.layout={layout} have several. Leave it out"
        )
    if rollout.engine == "vllm":
        served_rank(lora.rank)
        if table.config.experts and not torch.cuda.is_available():
            raise _refused(
                "vLLM then computes experts with kernels for GPUs only. Leave it out, or write rollout.engine=sglang"
            )


def _check_targets(table: ModelTable, lora: LoraConfig) -> None:
    # Engines know targets by the last part of the name, which layers of experts and dense layers have in common.
    feed_forward = {*FUSED[1], "down_proj"} & set(_targets(table, lora))
    if table.config.experts and feed_forward:
        names = ", ".join(sorted(feed_forward))
        raise _refused(
            f"in a model with experts engines take adapters of {names} for adapters of experts. Name layers of "
            "attention in actor.lora.targets, or leave it out"
        )


def _targets(table: ModelTable, lora: LoraConfig) -> list[str]:
    return list(dict.fromkeys(map(module_name, adapted_tensors(table, lora.targets, lora.experts))))


def _refused(reason: str) -> UserError:
    return UserError(f"rollout.adapters=true: {reason}.")
