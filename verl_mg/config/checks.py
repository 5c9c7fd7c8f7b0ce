"""Checks of the configuration that need no model: a table whose first row that holds is the error of the job.

    Refusal(lambda c: c.rollout.mode == "async" and ..., "rollout.mode=async: servers read a folder. Write ...")
    under("rollout.delta=true", lambda c: c.rollout.delta, (lambda c: c.loses_weights, "engines sleep. Write ..."), ...)

Conditions and texts look at a case `c`, here a `JobCase`. Rows that need the model are in `verl_mg.job.engine_checks`,
rows of an engine in its package.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from verl_mg.config.roles import RolloutConfig
from verl_mg.config.tree import Config
from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout

C = TypeVar("C")


@dataclass(frozen=True)
class Refusal(Generic[C]):
    """Row of a table of checks: when something is refused, and the error.

    In the error `c` is the case, and `value` the value of the condition.
    """

    when: Callable[[C], object]
    message: str


Row = tuple[Callable[[C], object], str]  # when it is refused, and the error without its key


def under(key: str, when: Callable[[C], object], *rows: Row[C]) -> Iterable[Refusal[C]]:
    """Returns rows whose errors begin with a key, and which hold only under a condition that they have in common."""

    def both(condition: Callable[[C], object]) -> Callable[[C], object]:
        return lambda c: when(c) and condition(c)

    return [Refusal(both(condition), f"{key}: {text}") for condition, text in rows]


def refuse(rows: Iterable[Refusal[C]], case: C) -> None:
    """Checks a case; UserError for the first row that holds."""
    for row in rows:
        if value := row.when(case):
            raise UserError(row.message.format(c=case, value=value))


@dataclass(frozen=True, kw_only=True)
class EngineAbilities:
    """Abilities of an engine that the configuration can require."""

    in_rank: bool = False  # whether it computes in the rank's process, with the actor's memory
    delta: bool = False  # whether it receives changes instead of all weights
    quantized: bool = False  # whether it receives quantized weights
    servers: bool = False  # whether servers of it generate outside the job
    selections: bool = False  # whether it reports the keys that sparse attention selects
    largest_adapter_rank: float = math.inf  # 0: it has merged weights
    expert_models_with_adapters: bool = True  # whether it computes them on the CPU
    has_draft: Callable[[Mapping[str, Any]], bool] = lambda arguments: False
    """Whether it decodes with the model's layer of multi-token prediction, by its further arguments."""


@dataclass(frozen=True)
class JobCase:
    """A job whose configuration is checked."""

    config: Config
    engine: EngineAbilities
    ranks: int
    ranks_per_node: int
    on_gpus: bool

    @property
    def rollout(self) -> RolloutConfig:
        """Section `rollout` of the configuration."""
        return self.config.rollout

    @property
    def layout(self) -> EngineLayout:
        """Parallel sizes of an engine."""
        return EngineLayout.parse(self.rollout.layout)

    @property
    def separate_ranks(self) -> int:
        """Ranks that are only for engines."""
        return 0 if self.rollout.has_servers else self.rollout.num_ranks

    @property
    def engine_ranks(self) -> int:
        """Ranks of the job that compute engines in separate processes; 0 without such engines."""
        return 0 if self.rollout.has_servers or self.engine.in_rank else self.rollout.num_ranks or self.ranks

    @property
    def extra(self) -> Mapping[str, Any]:
        """Further arguments by the engine's names."""
        return self.rollout.engine_arguments

    @property
    def actor_dtype(self) -> str:
        """Dtype of the actor, in which engines compute."""
        return self.config.dtype_of("actor")

    @property
    def loses_weights(self) -> bool:
        """Whether engines release their weights when they sleep; on the CPU nothing is released."""
        return self.on_gpus and self.rollout.sleep and not self.rollout.num_ranks and not self.rollout.has_servers

    @property
    def fsdp_role(self) -> str:
        """Section of a role with the backend fsdp that is given the columns of the rollout; "" without one."""
        names = ("actor", "reference", "critic")
        return next((name for name in names if self.config.section(name).backend == "fsdp"), "")

    @property
    def support(self) -> str:
        """Tokens that distributions are over, where draws are limited; evaluations have no such key."""
        return getattr(self.config.algorithm, "support", "full")

    @property
    def teacher_of_all_tokens(self) -> str:
        """Key by which a teacher has another vocabulary, or a server that knows no candidates; "" without one."""
        keys = {f"teachers.{name}": teacher for name, teacher in self.config.teachers.items()}
        return next((f"{key}.{'url' if t.url else 'tokenizer'}" for key, t in keys.items() if t.url or t.tokenizer), "")

    @property
    def drafts(self) -> str:
        """Key by which engines decode speculatively; "" where they do not."""
        names = (name for name in ("speculative_algorithm", "speculative_config") if self.extra.get(name))
        return next((f"rollout.{self.rollout.engine}.{name}" for name in names), "")

    @property
    def has_draft(self) -> bool:
        """Whether an engine of the job has a draft model that is a layer of the actor."""
        return self.engine_ranks > 0 and self.engine.has_draft(self.extra)


OTHER_SELECTIONS = ("enable_hisparse", "attn_cp_size", "enable_prefill_cp")
"""Arguments of SGLang with which positions of keys are not those in the sequence, or ranks have parts of a prompt."""
SIZE = "an engine needs {c.layout.ranks} ranks, but the rollout has {c.engine_ranks} of the job's {c.ranks}."

REFUSALS: tuple[Refusal[JobCase], ...] = (
    *under(
        "rollout.num_ranks={c.separate_ranks}", lambda c: c.separate_ranks,
        (lambda c: c.separate_ranks >= c.ranks and c.separate_ranks + 1,
         "none of the job's {c.ranks} ranks is left to train. Start at least {value}."),
        (lambda c: c.engine.in_rank,
         "the engine {c.rollout.engine} works on the ranks of the actor. Leave it out, or write rollout.engine=sglang "
         "or vllm."),
    ),
    Refusal(lambda c: c.config.actor.offload and c.engine.in_rank,
            "actor.offload=true: the engine {c.rollout.engine} works on the actor's own memory. Leave it out."),
    Refusal(lambda c: c.rollout.mode != "sync" and not (c.rollout.has_servers or c.rollout.num_ranks),
            "rollout.mode={c.rollout.mode}: only engines on separate ranks generate while training computes. Write "
            "rollout.engine=sglang and rollout.num_ranks, or rollout.urls, or rollout.mode=sync."),
    Refusal(lambda c: c.rollout.fixed_requests is None and c.engine.in_rank,
            "rollout.max_running_requests=auto: the engine {c.rollout.engine} has no cache of a fixed size, so there "
            "is nothing to follow. Write a number, or rollout.engine=sglang or vllm."),
    *under(
        "rollout.mode=async", lambda c: c.rollout.mode == "async",
        (lambda c: c.rollout.has_servers and c.rollout.weight_transfer == "disk",
         "servers read a folder only between requests. Write rollout.weight_transfer=process_group, or "
         "rollout.mode=one_step_off."),
        (lambda c: c.rollout.extra_prompts or c.rollout.partial_rollout,
         "engines never wait for the last samples of a call, so rollout.extra_prompts and rollout.partial_rollout have "
         "no use. Leave them out."),
    ),
    *under(
        "job.deterministic=true", lambda c: c.config.job.deterministic,
        (lambda c: c.rollout.mode == "async",
         "which samples of rollout.mode=async are complete first depends on time. Write rollout.mode=one_step_off or "
         "sync."),
        (lambda c: c.rollout.extra_prompts,
         "which prompts are complete first depends on time. Write rollout.extra_prompts=0, so that all are kept."),
        (lambda c: c.rollout.urls_file,
         "servers that come and go make samples depend on time. Write rollout.urls instead of rollout.urls_file."),
    ),
    # The weights arrive in this dtype, and log-probs are compared with the actor's.
    Refusal(lambda c: c.extra.get("dtype") not in (None, c.actor_dtype),
            "rollout.{c.rollout.engine}.dtype={c.extra[dtype]}: engines compute in the dtype of the actor, "
            "{c.actor_dtype}. Leave it out, or set actor.dtype."),
    Refusal(lambda c: c.rollout.sharding_table and (c.rollout.has_servers or c.engine.in_rank),
            "rollout.sharding_table: only engines inside the job that are separate processes use a table. Leave it "
            "out, or write rollout.engine=sglang or vllm without rollout.urls."),
    *under(
        "rollout.wire={c.rollout.wire}", lambda c: c.rollout.wire != "cast",
        (lambda c: not c.engine.quantized, "only SGLang has such weights. Write rollout.wire=cast."),
        (lambda c: c.rollout.has_servers and c.rollout.weight_transfer != "shards",
         "servers receive quantized weights only as shards, and rollout.weight_transfer is "
         "{c.rollout.weight_transfer}. Write rollout.weight_transfer=shards, or rollout.wire=cast."),
        (lambda c: not c.on_gpus, "SGLang computes with quantized weights on GPUs only. Write rollout.wire=cast."),
        (lambda c: c.rollout.wire == "int4" and (c.rollout.has_servers or c.rollout.delta),
         "SGLang stores INT4 weights in another order than they are sent in, so they are not written to servers "
         "outside the job, nor changed in parts. Leave rollout.urls and rollout.delta out."),
        (lambda c: not c.rollout.has_servers and c.config.dtype_of("actor") == "float32",
         "SGLang multiplies quantized weights with inputs of 16 bits, and the actor is in float32. Set "
         "actor.dtype=bfloat16, or rollout.wire=cast."),
    ),
    *under(
        "rollout.delta=true", lambda c: c.rollout.delta,
        (lambda c: not c.engine.delta, "only SGLang can receive changes instead of all weights. Leave it out."),
        (lambda c: c.rollout.has_servers and c.rollout.weight_transfer not in ("shards", "disk"),
         "servers receive only shards or files so, and rollout.weight_transfer is {c.rollout.weight_transfer}. Write "
         "rollout.weight_transfer=shards or disk, or leave rollout.delta out."),
        (lambda c: c.loses_weights,
         "engines that sleep lose the weights that changes refer to. Write rollout.sleep=false or rollout.num_ranks."),
    ),
    Refusal(lambda c: c.rollout.adapters and c.config.actor.lora is None,
            "rollout.adapters=true: the actor has none. Set actor.lora, or leave it out."),
    *under(
        "algorithm.support={c.support}", lambda c: c.rollout.limits_draws,
        (lambda c: c.support == "sampled" and c.teacher_of_all_tokens,
         "{value} scores tokens of the whole vocabulary. Write algorithm.support=policy or full."),
        (lambda c: c.support == "policy" and hasattr(c.config.algorithm, "divergence"),
         "algorithm.divergence compares distributions over the same tokens. Write algorithm.support=sampled or full."),
        (lambda c: c.support != "full" and c.drafts,
         "with {value} engines do not report the candidates of drafted tokens. Leave that out, or write "
         "algorithm.support=full."),
        (lambda c: c.support != "full" and c.rollout.top_k == 1,
         "with rollout.top_k=1 a token is its only candidate, and its log-prob 0 has no gradient. Write a larger "
         "rollout.top_k, or algorithm.support=full."),
    ),
    *under(
        "rollout.replay_selections=true", lambda c: c.rollout.replay_selections,
        (lambda c: not c.engine.selections,
         "the engine {c.rollout.engine} does not report the keys that it selects. Write rollout.engine=sglang, or "
         "leave it out."),
        (lambda c: c.rollout.has_servers,
         "what the numbers mean that a server reports depends on its environment. Leave it out, or leave out "
         "rollout.urls."),
        (lambda c: c.fsdp_role,
         "fsdp does not replay selections. Write {value}.backend=megatron, or leave it out."),
        (lambda c: c.layout.pp > 1, "SGLang reports layers of one stage only. Remove pp from rollout.layout."),
        (lambda c: c.layout.adp < c.layout.tp,
         "SGLang reports selections only where each rank attends to whole requests. Write adp{c.layout.tp} "
         "in rollout.layout, or leave it out."),
        # Draft models, caches of sparse attention on the host, and ranks that share a prompt.
        (lambda c: c.drafts or next((f"rollout.sglang.{n}" for n in OTHER_SELECTIONS if c.extra.get(n)), ""),
         "with {value} SGLang does not report the selections of the model. Leave one of them out."),
        (lambda c: c.extra.get("chunked_prefill_size", 1) < 1,
         "SGLang records as many tokens at a time as rollout.sglang.chunked_prefill_size. Leave that out."),
    ),
    *under(
        "rollout.adapters=true", lambda c: c.rollout.adapters,
        (lambda c: not c.engine.largest_adapter_rank,
         "the engine {c.rollout.engine} has merged weights. Write rollout.engine=sglang or vllm, or leave it out."),
        (lambda c: c.rollout.has_servers,
         "servers outside the job receive merged weights. Leave it out, or leave out rollout.urls."),
        (lambda c: c.rollout.delta,
         "rollout.delta is for weights that are sent again and again. Leave one of them out."),
        (lambda c: c.rollout.wire != "cast",
         "rollout.wire={c.rollout.wire} is for weights that are sent again and again. Leave one of them out."),
        # SGLang unloads an adapter only when no request uses it, so `max_staleness` could not hold.
        (lambda c: c.rollout.mode == "async",
         "requests in flight keep the adapters with which they began. Write rollout.mode=one_step_off or sync."),
        (lambda c: c.loses_weights,
         "engines that sleep lose the weights under the adapters. Write rollout.sleep=false or rollout.num_ranks."),
        (lambda c: c.config.actor.lora.experts,
         "engines receive no adapters of experts. Leave it out, or leave out actor.lora.experts."),
        (lambda c: c.layout.adp > 1,
         "SGLang pins adapters with rollout.layout={c.layout}. Leave it out, or remove adp."),
        (lambda c: c.layout.ranks > c.ranks_per_node,
         "adapters are in the memory of one node, and engines of rollout.layout={c.layout} have several. Leave it "
         "out."),
    ),
    *under(
        "actor.lora.rank={c.config.actor.lora.rank}", lambda c: c.rollout.adapters,
        (lambda c: c.config.actor.lora.rank > c.engine.largest_adapter_rank,
         "vLLM's adapters have ranks of {c.engine.largest_adapter_rank} at most. Lower it."),
    ),
    Refusal(lambda c: c.rollout.has_servers and not c.engine.servers,
            "rollout.urls: these are SGLang servers, but rollout.engine is {c.rollout.engine}. Write sglang."),
    Refusal(lambda c: c.rollout.has_servers and c.rollout.weight_transfer == "disk" and not c.rollout.shared_folder,
            "rollout.shared_folder: it is missing, for rollout.weight_transfer=disk. Name a folder that job and "
            "servers see under the same path."),
    *under(
        "rollout.layout={c.layout}", lambda c: c.engine_ranks % c.layout.ranks,
        (lambda c: c.rollout.num_ranks, f"{SIZE} Write rollout.num_ranks as a multiple of {{c.layout.ranks}}."),
        (lambda c: True, f"{SIZE} Start a multiple of {{c.layout.ranks}}."),
    ),
    *under(
        "rollout.{c.rollout.engine}.speculative_algorithm", lambda c: c.has_draft,
        (lambda c: c.rollout.sharding_table,
         "a file with a table has no draft model. Leave rollout.sharding_table out."),
        (lambda c: c.rollout.delta,
         "a draft model does not receive changes, only all weights. Leave rollout.delta out."),
        (lambda c: c.rollout.wire != "cast",
         "SGLang has no quantized projection of a draft model. Write rollout.wire=cast."),
    ),
    *under(
        "algorithm.off_policy.score_centering", lambda c: c.config.sampler_top,
        (lambda c: c.rollout.temperature == 0,
         "a greedy rollout draws from no distribution. Set rollout.temperature above 0, or leave it out."),
        # The engine's log-probs are then over all tokens, and not over those that it drew from.
        (lambda c: c.rollout.limits_draws and c.support == "full",
         "the distribution that samples are drawn from is not known with algorithm.support=full. Write sampled."),
    ),
    Refusal(lambda c: c.rollout.has_agents and c.rollout.tools,
            "rollout.tools: agents call tools themselves. Leave it out, or leave rollout.agent out."),
    # An agent has effects outside the job, which cannot be continued: an aborted one begins again.
    Refusal(lambda c: c.rollout.has_agents and c.rollout.partial_rollout,
            "rollout.partial_rollout=true: an agent that was stopped cannot continue. Leave it out."),
    Refusal(lambda c: len(set(c.rollout.agent_names)) < len(c.rollout.agent_names),
            "rollout.agent_names: it has a name twice. Leave one out."),
    # They are names of models in requests, and parts of the names of metrics.
    Refusal(lambda c: not all(re.fullmatch(r"[\w.:-]+", name) for name in c.rollout.agent_names),
            "rollout.agent_names: {c.rollout.agent_names} has a name with other characters than letters, digits and "
            "'_.:-'. Rename it."),
    Refusal(lambda c: c.rollout.agent_names and set(c.rollout.agent_trained) - set(c.rollout.agent_names),
            "rollout.agent_trained={c.rollout.agent_trained}: these are agents of rollout.agent_names, which has "
            "{c.rollout.agent_names}. Correct one of them."),
)  # fmt: skip
