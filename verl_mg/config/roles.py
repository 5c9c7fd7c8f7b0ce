"""The roles: models that learn, models that judge, engines that generate."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from verl_mg.config.section import ConfigSection
from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout, Layout, parse_ranks


class OptimizerConfig(ConfigSection):
    """Adam with decoupled weight decay; the schedule counts optimizer steps.

    `cpu_offload`: its moments stay on the host, which computes the step: slower, and 8 bytes a weight less on the
    device.
    """

    lr: float = Field(1e-6, gt=0)
    min_lr: float = Field(0.0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    decay_steps: PositiveInt | None = None
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    clip_grad: float = Field(1.0, ge=0)
    cpu_offload: bool = False

    @field_validator("decay_steps")
    @classmethod
    def _longer_than_warmup(cls, steps: int | None, info: Any) -> int | None:
        if steps is not None and steps <= info.data.get("warmup_steps", 0):
            raise ValueError("must be larger than warmup_steps")
        return steps


class GuardConfig(ConfigSection):
    """What keeps a bad update away from the weights.

    A step whose loss or gradient is not finite is left out; after `bad_steps` of them in a row the run stops. Where the
    policy has moved further than `max_kl` nats a token from that of the iteration's start, the step is left out (skip),
    or the weights go back to those before the last step, and the learning rate to its beginning (rollback).
    """

    bad_steps: PositiveInt = 10
    max_kl: float | None = Field(None, gt=0)
    action: Literal["skip", "rollback"] = "skip"


class LoraConfig(ConfigSection):
    """Low-rank adapters (arXiv:2106.09685), trained in place of the weights: W + alpha / rank * B A for each linear W.

    `targets`: names of linear layers, such as [q_proj, v_proj]; without it all of attention and of feed-forward layers,
    but for experts, which have no adapters yet, so that of a mixture of experts often attention alone is adapted.
    A critic's head is trained whole beside them. `path`: a folder in PEFT's format with the adapters to go on from, of
    the same rank, alpha and targets; without it they are drawn from `seed`, and change nothing at first.
    """

    rank: PositiveInt = 16
    alpha: float = Field(32.0, gt=0, allow_inf_nan=False)
    targets: list[str] | None = Field(None, min_length=1)
    path: Path | None = None
    seed: int = Field(0, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        # The section may be absent, so the list of all keys that `_nearest` looks in has none of its own.
        unknown = [key for key in value if key not in cls.model_fields] if isinstance(value, dict) else []
        if unknown:
            raise ValueError(f"unknown key {unknown[0]!r}; lora has {', '.join(cls.model_fields)}")
        return value


def _parsed(kind: type[Layout] | type[EngineLayout], text: str) -> str:
    try:
        kind.parse(text)
    except UserError as error:
        raise ValueError(str(error)) from None
    return text


class RoleSection(ConfigSection):
    """A role with a network, under a parallel `layout` such as tp2-pp2.

    `ranks`: those of the job that it stands on, such as 0-7 or 0-3,8-11; without it all that `rollout.num_ranks`
    leaves.
    Roles on different ranks compute at the same time. `offload`: what it keeps waits on the host while other roles
    compute and while samples are drawn. `dynamic_context`: with cp4, rows that fit a quarter of a micro-batch stay
    whole on one rank, those that fit half of it are cut in two, and only longer ones in four.
    """

    layout: str = "tp1"
    ranks: str | None = None
    offload: bool = False
    dynamic_context: bool = False

    @field_validator("layout")
    @classmethod
    def _can_be_parsed(cls, text: str) -> str:
        return _parsed(Layout, text)

    @field_validator("ranks", mode="before")
    @classmethod
    def _rise(cls, value: Any) -> Any:
        text = str(value) if isinstance(value, int) else value  # YAML reads a single rank as a number
        if isinstance(text, str):
            try:
                parse_ranks(text)
            except UserError as error:
                raise ValueError(str(error)) from None
        return text


class TrainableConfig(RoleSection):
    """A model that learns. A micro-batch is filled up to `tokens_per_micro_batch` tokens. `lora`: train adapters."""

    tokens_per_micro_batch: PositiveInt = 8192
    recompute: bool = False
    optimizer: OptimizerConfig = OptimizerConfig()
    guard: GuardConfig = GuardConfig()
    lora: LoraConfig | None = None


class CriticConfig(TrainableConfig):
    """A model that learns to judge, built only where a recipe asks for it. `path`: of its own, not `model.path`."""

    path: Path | None = None


class ReferenceConfig(RoleSection):
    """A frozen policy, built only where a recipe asks for it: the initial one, or a teacher at `path`."""

    path: Path | None = None
    tokens_per_micro_batch: PositiveInt = 16384


class RolloutConfig(ConfigSection):
    """Generation. `temperature` 0 is greedy; `top_k` 0 is off; `max_running_requests`: samples that an engine works on
    at once.

    Of the engine `sglang` alone: `layout`, that of one engine, such as tp8-ep8; `memory_fraction` of a GPU for weights
    and key-value cache; `sleep`: release both while training; `replay_routing`: train with the experts that SGLang
    chose; `request_timeout` in seconds; `ranks`: so many of the job's last ranks hold engines and no actor (0: engines
    and actor share all), and `sleep` does not count; `sglang`: further server arguments by SGLang's own names.
    `urls`: SGLang servers that somebody else has started, such as http://node7:30000, take the place of engines of this
    job; what concerns those alone does not count then. Weights come to them through a process group of
    `weight_transfer` process_group,
    or, with disk, through `shared_folder`, a folder of this job alone that the servers see under the same path.
    `partial_rollout`: samples that were cut go on in the next iteration. `tools`: functions as `package.module:name` or
    `file.py:name`, called for at most `max_turns` turns in the format of SGLang's tool-call parser `tool_call_parser`.
    """

    engine: Literal["hf", "sglang"] = "hf"
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    max_new_tokens: PositiveInt = 256
    max_running_requests: PositiveInt = 256
    partial_rollout: bool = False
    layout: str = "tp1"
    num_ranks: int = Field(0, ge=0)
    memory_fraction: float = Field(0.6, gt=0, lt=1)
    sleep: bool = True
    replay_routing: bool = False
    request_timeout: float = Field(3600.0, gt=0)
    sglang: dict[str, Any] = {}
    urls: list[str] = []
    weight_transfer: Literal["disk", "process_group"] = "process_group"
    shared_folder: Path | None = None
    tools: list[str] = []
    max_turns: PositiveInt = 1
    tool_timeout: float = Field(30.0, gt=0)
    tool_call_parser: str = "qwen25"

    @field_validator("layout")
    @classmethod
    def _can_be_parsed(cls, text: str) -> str:
        return _parsed(EngineLayout, text)
