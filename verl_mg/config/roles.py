"""Configuration of roles: trained models, frozen models, rollout engines.

RoleSection ─┬─ TrainableConfig ─┬─ actor
             │                   └─ CriticConfig      critic, reward_model, process_reward
             └─ FrozenConfig ────┬─ ReferenceConfig   reference
                                 └─ TeacherConfig     teachers.NAME
RolloutConfig                                         rollout
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, PositiveInt, field_validator

from verl_mg.config.optimizer import OptimizerConfig
from verl_mg.config.section import ConfigSection, StopStrings, refused_values
from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout, Layout, parse_ranks


class GuardConfig(ConfigSection):
    """Protection of the weights against bad updates. A step with a loss or gradient that is not finite is skipped."""

    bad_steps: PositiveInt = 10
    """Steps in a row with a loss or gradient that is not finite, after which the run stops."""
    max_kl: float | None = Field(None, gt=0)
    """Largest divergence from the policy at the start of the iteration, in nats per token. null: no limit."""
    action: Literal["skip", "rollback"] = "skip"
    """Reaction to a divergence above `max_kl`. skip: the step is left out. rollback: the weights return to those before
    the last step, and the learning-rate schedule restarts."""


class LoraConfig(ConfigSection):
    """Low-rank adapters (arXiv:2106.09685), trained in place of the weights: W + alpha / rank * B A per linear W.

    A critic's head is trained in full.
    """

    rank: PositiveInt = 16
    """Rank of A and B."""
    alpha: float = Field(32.0, gt=0)
    """Scale of the adapter; it is divided by `rank`."""
    targets: list[str] | None = Field(None, min_length=1)
    """Names of linear layers, such as [q_proj, v_proj]. null: all of attention and of feed-forward layers."""
    experts: bool = False
    """Whether routed experts have adapters too, each its own. false: only attention, dense and shared layers."""
    path: Path | None = None
    """Folder in PEFT's format with adapters to start from, of the same rank, alpha and targets. null: new adapters,
    which do not change the model at first."""
    seed: int = Field(0, ge=0)
    """Random seed of new adapters."""


def _check(parse: Callable[..., object], *arguments: Any) -> None:
    try:
        parse(*arguments)
    except UserError as error:  # pydantic adds the key only to a ValueError
        raise ValueError(str(error).removeprefix("pipeline_layers: ")) from None


Dtype = Literal["float32", "bfloat16"]
"""Type of the weights of a model."""


class RoleSection(ConfigSection):
    """Role with a model on some ranks."""

    dtype: Dtype | None = None
    """Type of this model's weights in training and inference, such as float32 for a critic or reward model of an
    actor in bfloat16. Engines and the exported policy have that of the actor. null: `model.dtype`."""
    backend: Literal["megatron", "fsdp"] = "megatron"
    """Training backend. megatron: megatron-core, for the families of `verl-mg models`. fsdp: the module of
    `transformers`, sharded over the data-parallel ranks, for any architecture that it has; in the layout tp and cp."""
    layout: str = "tp1"
    """Parallel sizes such as tp4-pp2-cp2-ep8: tensor (tp), pipeline (pp), virtual pipeline (vpp), context (cp), expert
    (ep) and expert tensor (etp) parallelism. The remaining factor of the ranks is data parallelism."""
    pipeline_layers: list[int] = []
    """Number of layers of each pipeline stage of `layout`, such as [15, 16, 16, 14] with pp4; of each chunk with vpp,
    in the order of the layers. 0 is possible for the first one, which then has only the embedding, and for the last
    one, which has the output layer. []: as even as possible, with fewer layers in the last and the first stage."""
    ranks: str | None = None
    """Ranks of the job that compute this role, such as 0-7 or 0-3,8-11. Roles on disjoint ranks can run at the same
    time. null: all ranks except the `rollout.num_ranks` last ones."""
    offload: bool = False
    """Move weights, gradients and optimizer state to host memory while other roles compute or samples are generated."""
    dynamic_context: bool = False
    """Dynamic context parallelism. With cp4, rows that fit a quarter of a micro-batch stay whole on one rank, rows that
    fit half of it are split in two, and only longer ones in four."""

    @field_validator("layout")
    @classmethod
    def _can_be_parsed(cls, text: str) -> str:
        _check(Layout.parse, text)
        return text

    @field_validator("pipeline_layers")
    @classmethod
    def _one_for_each_chunk(cls, layers: list[int], info: Any) -> list[int]:
        if "layout" in info.data:  # an invalid one is not there, and is reported first
            _check(Layout.parse, info.data["layout"], layers)
        return layers

    @field_validator("ranks", mode="before")
    @classmethod
    def _rise(cls, value: Any) -> Any:
        text = str(value) if isinstance(value, int) else value  # YAML reads a single rank as a number
        if isinstance(text, str):
            _check(parse_ranks, text)
        return text

    @property
    def parallel_sizes(self) -> Layout:
        """Layout of the model, with its `pipeline_layers`; dp as far as `layout` names it."""
        return Layout.parse(self.layout, self.pipeline_layers)


RecomputeModule = Literal["core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"]
"""Part of a layer whose activations megatron-core can recompute, by its name there."""
Recompute = bool | list[RecomputeModule]
"""Whether whole layers are recomputed, or the parts that are."""


class TrainableConfig(RoleSection):
    """Model that is trained by the job."""

    tokens_per_micro_batch: PositiveInt = 8192
    """Largest number of tokens of a micro-batch per rank (per context-parallel group with cp). Affects memory and
    speed, not the result."""
    recompute: Recompute = False
    """Recompute layers in the backward pass instead of storing their activations: slower, much less memory. A list
    names parts of a layer, by megatron-core's names: core_attn (attention without its projections), layernorm,
    mla_up_proj (of latent attention), mlp (of layers without experts), moe (of those with), moe_act (the activation of
    experts) and shared_experts."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer and learning-rate schedule."""
    guard: GuardConfig = GuardConfig()
    """Protection against bad updates."""
    lora: LoraConfig | None = None
    """Train low-rank adapters instead of the weights. null: train the weights."""

    # Muon orthogonalizes the updates of the model's matrices, and A and B are no such matrices.
    _refused = refused_values(
        lora=(
            lambda lora, others: lora is not None and "optimizer" in others and others["optimizer"].kind == "muon",
            "muon trains matrices of the model, not adapters. Write optimizer.kind=adamw",
        )
    )

    @field_validator("recompute", mode="before")
    @classmethod
    def _modules_exist(cls, value: Any) -> Any:
        # Decided here: pydantic's error for a union would list the complaints of both types.
        modules = get_args(RecomputeModule)
        unknown = [name for name in value if name not in modules] if isinstance(value, list) else []
        if unknown or not isinstance(value, bool | list):
            raise ValueError(f"neither true, false nor a list of {', '.join(modules)}")
        return value


class CriticConfig(TrainableConfig):
    """Further trained model, built only if the recipe requests it. Critic and reward model have a scalar head."""

    path: Path | None = None
    """Hugging Face directory or name of a model to start from. null: `model.path`."""


class FrozenConfig(RoleSection):
    """Policy without an optimizer."""

    path: Path | None = None
    """Hugging Face directory or name of a model, such as a teacher. null: `model.path`, the initial policy."""
    tokens_per_micro_batch: PositiveInt = 16384
    """Largest number of tokens of a micro-batch. Larger than the actor's, since no activations are stored."""


class ReferenceConfig(FrozenConfig):
    """Frozen policy, built only if the recipe requests it.

    The reference of an actor with `lora` and the same path, layout and ranks is the actor without its adapters.
    """

    refresh_every: PositiveInt | None = None
    """Iterations after which the reference takes the weights of the actor, again and again. With `actor.lora` it then
    has separate weights. null: it stays the model of `path`."""


def _of_servers(default: Any) -> tuple[Callable[[Any, Mapping[str, Any]], bool], str]:
    reason = "it is for a teacher on a server. Write url, or leave it out"
    return lambda value, others: value != default and not others.get("url"), reason


class TeacherConfig(FrozenConfig):
    """One of several teachers, for recipes that distill; without any, the reference is the teacher."""

    sources: list[str] = []
    """Sources of `data.train` whose samples this teacher scores. []: those that no other teacher names."""
    url: str | None = None
    """Address of a running server that has this teacher, such as http://node7:30000. It returns log-probs of
    given tokens and the likeliest ones, not distributions over the whole vocabulary. null: the model of `path`, on
    ranks of the job."""
    protocol: Literal["sglang", "openai"] = "sglang"
    """Protocol of `url`. sglang: `/generate` of an SGLang server. openai: `/v1/completions` with vLLM's field
    `prompt_logprobs`."""
    served_model: str = ""
    """Name of the model on the server, with `protocol: openai`."""
    api_key_env: str | None = None
    """Name of the environment variable with the key of the server."""
    parallel: PositiveInt = 32
    """Requests to the server that each rank has in flight."""

    weights: Literal["fixed", "actor", "reference"] = "fixed"
    """Weights of the teacher. fixed: the model of `path` or of the server. actor: the policy itself before each update,
    which makes sense with another `prompt` (self-distillation). reference: the reference, with
    `reference.refresh_every` an earlier policy."""
    prompt: str | None = None
    """Template of the prompt that the teacher reads in place of the student's, such as "{prompt} The answer is
    {answer}.": {prompt} is the student's text, {answer} and other names are fields of the record. null: the same."""

    tokenizer: Path | None = None
    """Directory of the teacher's tokenizer, where it is not that of the policy: the teacher then reads the text, and
    log-probs are compared span by span, by recipes/distillation.py. null: the policy's tokens."""

    _refused = refused_values(
        protocol=_of_servers("sglang"),
        served_model=_of_servers(""),
        api_key_env=_of_servers(None),
        parallel=_of_servers(32),
        url=(
            lambda url, others: url is not None and others.get("path") is not None,
            "the teacher is the model of path already. Leave one of them out",
        ),
        weights=(
            lambda weights, others: weights != "fixed" and (others.get("path") or others.get("url")),
            "the teacher is that role, without a path and a url. Leave them out",
        ),
    )

    @property
    def has_model(self) -> bool:
        """Whether the job loads a model for this teacher."""
        return self.url is None and self.weights == "fixed"


MaxMismatch = float | Literal["auto"] | None
"""Bound of the difference between the log-probs of engines and trainer, in nats."""


class RolloutConfig(ConfigSection):
    """Generation of samples by engines."""

    engine: Literal["hf", "sglang", "vllm"] = "hf"
    """Engine. hf: transformers in the training process, for small models and tests. sglang: SGLang engines. vllm: vLLM
    engines."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature. 0: greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling: smallest set of tokens with this probability. 1: off. Below 1 training computes distributions
    over these tokens, see `algorithm.support`."""
    top_k: int = Field(0, ge=0)
    """Sample from the k most likely tokens. 0: off. Otherwise distributions are over them, see `algorithm.support`."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Sample from the tokens with at least this share of the probability of the most likely one (arXiv:2407.01082). 0:
    off. vLLM measures `top_p` and `top_k` within these tokens, other engines take those that pass each of the three.
    Log-probs, in engines and training, are of the distribution over the tokens that the three leave, see
    `algorithm.support`."""
    stop: StopStrings = []
    """Strings that end a response, such as `["</answer>"]`. Its last token is the one that completes one of them, also
    in the middle of the token, on every engine. Rewards see the text up to the end of that token, the string included.
    Special tokens count with their text. []: responses end only with the model's stop tokens: of
    config.json, generation_config.json, tokenizer and chat template, on every engine."""
    max_new_tokens: PositiveInt = 256
    """Longest response, in tokens, over all turns."""
    max_running_requests: PositiveInt | Literal["auto"] = 256
    """Samples that an engine generates at the same time. auto: as many as its key-value cache is good for; the number
    follows the engine's own measure of its cache and of waiting requests, and with `mode: async` so does how far
    generation runs ahead, within `max_staleness`. Processes start with the engine's own largest number.
    The engine hf needs a number."""
    partial_rollout: bool = False
    """Continue samples that were aborted in the next iteration, instead of discarding them."""
    extra_prompts: int = Field(0, ge=0)
    """Prompts submitted in addition to those that the recipe requests, pending ones included. The samples of the first
    complete ones are returned; the others are aborted, and with `partial_rollout` resumed in the next iteration."""
    mode: Literal["sync", "one_step_off", "async"] = "sync"
    """When samples are generated. sync: while training waits. one_step_off: for the next iteration while this one
    trains, with the weights of one iteration before. async: without pause; weights reach the engines with requests in
    flight, and `max_staleness` limits how old a token may be when it is trained. The last two need `num_ranks` or
    `urls`."""
    max_staleness: PositiveInt = 1
    """Largest number of weight updates between the generation and the training of a token, with `mode: async`."""
    stale: Literal["continue", "drop"] = "continue"
    """Treatment of samples that take more updates than `max_staleness`. continue: they are completed under newer
    weights, and their tokens that are too old are not in the loss. drop: their group is dropped for another prompt."""
    keep_kv_cache: bool = False
    """Whether requests in flight keep keys and values of the old weights when the weights are updated, with `mode:
    async`. false: these are computed again, so that log-probabilities are exactly what the new weights give."""
    layout: str = "tp1"
    """Parallel sizes of one engine such as tp8-ep8: tensor (tp), pipeline (pp), expert (ep) parallelism and
    data-parallel attention (adp), in which ep and adp divide the tp ranks. vLLM has no adp, and ep over all tp ranks or
    none."""
    wire: Literal["cast", "fp8_block", "fp8_channel", "mxfp8", "int4"] = "cast"
    """Form in which SGLang engines have their weights, and receive them. cast: the dtype of the model. The others are
    quantized by the ranks that send, and need GPUs; servers of `urls` need `weight_transfer: shards` and the same
    quantization_config. fp8_block: FP8 with a scale for each block of 128 x 128, as DeepSeek-V3. fp8_channel: FP8 with
    a scale for each row. mxfp8: FP8 with a power of two for each 32 of a row, for dense models and GPUs from Blackwell
    on. int4: INT4 with a scale for each 128 of a row, weights only, for dense models and engines of the job."""
    delta: bool = False
    """Send only the elements that the last update has changed, to SGLang engines that keep their weights: with
    `num_ranks` or `sleep: false`, and to servers of `urls` with `weight_transfer: shards` or `disk`, started with the
    loader of `shards`. Senders keep copies of the weights in host memory."""
    adapters: bool = False
    """Send only the adapters of `actor.lora`: engines receive the weights under them once, and compute with adapters
    themselves. false: adapters are merged into the weights, all of which are sent in every weight sync. For adapters of
    attention and, in models without experts, of feed-forward layers; not with latent attention."""
    sharding_table: Path | None = None
    """File of `verl-mg trace` with the parameters of an engine, instead of the built-in table. It must be traced
    from this engine and model, and for `layout`. None: the built-in table of the architecture; without one the job
    traces the engine as it begins."""
    num_ranks: int = Field(0, ge=0)
    """Ranks only for engines, the last ones of the job. 0: engines share all ranks with the actor."""
    memory_fraction: float = Field(0.6, gt=0, lt=1)
    """Fraction of the memory of a GPU that is free when engines start, for their weights and key-value cache. The
    default leaves memory for training. With `num_ranks`, 6 GiB are left in any case."""
    sleep: bool = True
    """Release weights and cache of engines while training. Has no effect with `num_ranks`."""
    replay_routing: bool = False
    """Train with the experts that the engine selected for each token, for mixture-of-experts models, on both backends:
    on `fsdp` where `transformers` runs all experts by registered functions."""
    replay_selections: bool = False
    """Train with the keys that the engine selected for each token, for models with sparse attention. For SGLang engines
    of the job whose ranks attend to whole requests: a `layout` of tp1, or with adp as large as tp."""
    max_mismatch: MaxMismatch = "auto"
    """Largest mean of |log-prob of the trainer - of the engine| in nats, over the first samples that are generated
    after a start, and before them over the end of a row as long as the longest prompt and response. With a larger one
    the job ends before it trains. auto: 1e-3 in float32, 0.05 in bfloat16, 0.2 with a quantized `wire` or
    `kv_cache_dtype`, training in FP8, or a mixture of experts without `replay_routing` or sparse attention without
    `replay_selections` (0.01 in float32). null: no bound; metrics of `mismatch/` show the difference."""
    request_timeout_s: float = Field(3600.0, gt=0)
    """Seconds after which a request to an engine is aborted; its sample ends there with finish reason timeout."""
    python: Path | None = None
    """Python that runs the processes of engines, where the engine is installed in a separate environment, such as
    .venv-vllm/bin/python. null: the job's."""
    vllm: dict[str, Any] = {}
    """Further engine arguments of vLLM by their own names, such as {max_num_batched_tokens: 16384}."""
    sglang: dict[str, Any] = {}
    """Further SGLang server arguments by their own names, such as {attention_backend: fa3}."""
    urls: list[str] = []
    """SGLang servers that are already running, such as [http://node7:30000], instead of engines of this job. A pair for
    prefill and decoding is http://PREFILL+http://DECODE."""
    urls_file: Path | None = None
    """File of further servers, one address a line, which is read again and again: servers that are added to it join the
    job while it runs, and those that are removed finish their samples and leave it."""
    api_key_env: str | None = None
    """Name of the environment variable with the key of the servers' argument `--api-key`."""
    admin_key_env: str | None = None
    """Name of the environment variable with the key of the servers' argument `--admin-api-key`."""
    weight_transfer: Literal["disk", "process_group", "shards", "broadcast"] = "process_group"
    """Path of the weights to the servers of `urls`. disk: files in `shared_folder`. shards: each rank of a server
    receives its shards from the ranks that have them; servers are started with `--custom-weight-loader
    verl_mg.engines.sglang.shard_receiver.receive_shards`. broadcast: each rank of a server receives the whole model
    through one rank of the job. process_group: shards where servers have that loader, broadcast to others."""
    shared_folder: Path | None = None
    """Folder for weights with `weight_transfer: disk`, used by this job only. Job and servers see it under the same
    path."""
    tools: list[str] = []
    """Tools that the policy can call: annotated Python functions, or classes whose methods are called on an object for
    each sample, as `package.module:name` or `file.py:name`; MCP servers as `mcp:http://HOST:PORT/mcp` or
    `mcp:COMMAND ARGUMENT...`. With `PREFIX=` in front of it, the tools are named PREFIX_name."""
    max_turns: PositiveInt = 1
    """Assistant turns of a sample with tools."""
    tool_timeout_s: float = Field(30.0, gt=0)
    """Seconds after which a tool call is answered with an error."""
    tool_call_parser: str = "qwen25"
    """Format of tool calls, by the name of SGLang's parser."""
    reasoning_parser: str | None = None
    """Format of reasoning, by the name of SGLang's parser, such as qwen3: agents receive it apart from the text, and
    calls of tools in it are not made. null: reasoning is part of the text."""
    agent: str | None = None
    """Agent that makes each sample: an async function `run(session, sample)` as `package.module:name` or
    `file.py:name`, or the name of a file of recipes/environments/, such as harbor. It calls the policy by the URL of
    its session and returns the reward. null: the policy's response to the prompt is the sample."""
    agent_command: str | list[str] = ""
    """Command that makes each sample, in place of `agent`: a program that runs in the sandbox, with the URL of its
    session in its environment. A line for the shell, or program and arguments."""
    agent_options: dict[str, Any] = {}
    """Options that `agent` receives as `session.options`; of `agent_command`, `folder` (copied to the folder in which
    the command runs) and `paths` (visible to it)."""
    agent_timeout_s: float = Field(1800.0, gt=0)
    """Seconds after which an agent is stopped. Its sample keeps what was generated."""
    agent_concurrency: PositiveInt | None = None
    """Agents of an engine that run at the same time. null: as many as the engine has free slots. More are useful where
    agents spend their time on tools."""
    agent_retries: int = Field(0, ge=0)
    """Times that an agent is started again after it has raised an exception, in a new session."""
    agent_failure_reward: float = 0.0
    """Reward of a sample whose agent has failed, or was stopped at its time limit."""
    agent_trained: list[str] = []
    """Names of models, as agents write them in their requests, whose replies are trained, such as the side of a game
    that learns. []: all replies."""
    agent_names: list[str] = []
    """Names of the agents that play a part in a sample, such as [solver, critic]: a request names one of them as its
    model, and each has its own rows, rewards and group statistics. []: all requests are of one agent."""
    agent_host: str = "127.0.0.1"
    """Address that the agents' endpoint listens on, on a free port. Other machines reach only another address than the
    default, such as that of the node in a cluster."""
    chat_template_options: dict[str, Any] = {}
    """Variables of the chat template, such as {enable_thinking: false}, wherever it is applied: to prompts, to
    demonstrations and pairs, and to conversations of agents and tools."""

    @property
    def limits_draws(self) -> bool:
        """Whether tokens are drawn from candidates, not from the whole vocabulary."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    @property
    def fixed_requests(self) -> int | None:
        """Samples that an engine generates at the same time; None where their number follows the engine's load."""
        return None if self.max_running_requests == "auto" else self.max_running_requests

    @property
    def has_agents(self) -> bool:
        """Whether samples are made by agents."""
        return self.agent is not None or bool(self.agent_command)

    @property
    def has_processes(self) -> bool:
        """Whether samples are generated by engines outside the processes of ranks."""
        return self.engine != "hf"

    @property
    def has_servers(self) -> bool:
        """Whether samples are generated by servers outside the job."""
        return bool(self.urls) or self.urls_file is not None

    _refused = refused_values(
        agent_command=(
            lambda command, others: command and others.get("agent") is not None,
            "rollout.agent makes the samples already. Leave one of them out",
        )
    )

    @field_validator("layout")
    @classmethod
    def _can_be_parsed(cls, text: str) -> str:
        _check(EngineLayout.parse, text)
        return text

    @property
    def engine_arguments(self) -> dict[str, Any]:
        """Further arguments of the engine by its own names; the hf engine has none."""
        return {"sglang": self.sglang, "vllm": self.vllm}.get(self.engine, {})

    @field_validator("max_mismatch", mode="before")
    @classmethod
    def _is_a_bound(cls, value: Any) -> Any:
        # Decided here, as for `recompute`.
        if value is None or value == "auto":
            return value
        with suppress(TypeError, ValueError):
            if not isinstance(value, bool) and 0 < float(value) < math.inf:
                return float(value)
        raise ValueError("neither a number above 0, auto nor null")
