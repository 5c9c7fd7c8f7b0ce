"""Rows of the models that are trained, and of the reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import get_args

from verl_mg.config.roles import RecomputeModule
from verl_mg.errors import UserError
from verl_mg.from_verl.job import ALWAYS, Condition, VerlJob
from verl_mg.from_verl.rows import CRITIC, FSDP, MEGATRON, NONE, REFERENCE, Row, Values, keys_of, same

SIZES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "virtual_pipeline_model_parallel_size": "vpp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
}
"""Parts of a layout by verl's keys of Megatron."""
OPTIMIZERS = {"adamw": "adamw", "adam": "adamw", "muon": "muon"}
OF_MEGATRON = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""verl's default targets of adapters with Megatron: all layers, as null here."""
SWITCHES = ("param_offload", "grad_offload", "optimizer_offload")


def _layout(theirs: str, ours: str) -> Callable[[VerlJob], Values]:
    def convert(job: VerlJob) -> Values:
        keys = {short: f"{theirs}.megatron.{key}" for key, short in SIZES.items()}
        given = {short: job.count(key) for short, key in keys.items() if short == "tp" or job[key] is not None}
        if given.get("etp") == given["tp"]:
            del given["etp"]
        return {ours: "-".join(f"{s}{n}" for s, n in given.items() if n != 1 or s == "etp") or "tp1"}

    return convert


def _shards(section: str, ours: str) -> Callable[[VerlJob], Values]:
    def convert(job: VerlJob) -> Values:
        size = job.count(f"{section}.ulysses_sequence_parallel_size")
        return {f"{ours}.backend": "fsdp", f"{ours}.layout": f"cp{size}" if size > 1 else "tp1"}

    return convert


def _tokens(micro: str, dynamic: str, longest: str, ours: str, cp: Callable[[VerlJob], int]) -> Callable[..., Values]:
    """The tokens of a micro-batch: verl's limit is for a GPU, ours for the GPUs that share its rows."""

    def convert(job: VerlJob) -> Values:
        row = job.count("data.max_prompt_length") + job.count("data.max_response_length")
        if job[dynamic]:
            return {ours: max(job.count(longest) * cp(job), row)}
        return {ours: job.count(micro) * row} if job[micro] else {}

    return convert


def _cp(theirs: str, fsdp: str) -> Callable[[VerlJob], int]:
    keys = (f"{theirs}.megatron.context_parallel_size", f"{fsdp}.ulysses_sequence_parallel_size")
    return lambda job: job.count(keys[0] if job.megatron else keys[1])


def _optimizer(theirs: str, ours: str) -> Callable[[VerlJob], Values]:
    def convert(job: VerlJob) -> Values:
        kind = OPTIMIZERS.get(str(job[f"{theirs}.optimizer"]).lower())
        if kind is None:
            job.report(NONE, f"{theirs}.optimizer", "the optimizer is AdamW or Muon")
        values: Values = {f"{ours}.{key}": job[f"{theirs}.{key}"] for key in ("lr", "weight_decay", "betas")}
        # No clipping is 0 here, and a null or a number that no gradient reaches there.
        values[f"{ours}.clip_grad"] = job[f"{theirs}.clip_grad"] or 0.0
        return values | {f"{ours}.kind": kind or "adamw"} | _schedule(job, theirs, ours)

    return convert


def _schedule(job: VerlJob, theirs: str, ours: str) -> Values:
    key = f"{theirs}.lr_decay_style" if job.megatron else f"{theirs}.lr_scheduler_type"
    style, values = job[key], Values()
    if style not in ("constant", "linear", "cosine"):
        job.report(NONE, key, "the learning rate is constant, or falls linearly or as a cosine")
        style = "constant"
    values[f"{ours}.schedule"] = style
    # Its schedulers take a step in an iteration, ours in each optimizer step.
    of_warmup = f"{theirs}.lr_warmup_steps"
    steps = 0 if job[of_warmup] is None else job.integer(of_warmup)
    ratio = 0 if job[f"{of_warmup}_ratio"] is None else job.number(f"{of_warmup}_ratio")
    if steps > 0:
        values[f"{ours}.warmup_steps"] = steps * job.updates
    elif ratio > 0:
        values[f"{ours}.warmup_ratio"] = ratio
    if style == "constant":
        return values
    if job.megatron:
        values[f"{ours}.min_lr"] = job[f"{theirs}.min_lr"]
    else:
        lowest = 0 if job[f"{theirs}.min_lr_ratio"] is None else job.number(f"{theirs}.min_lr_ratio")
        values[f"{ours}.min_lr"] = lowest * job.number(f"{theirs}.lr")
    decays = f"{theirs}.lr_decay_steps"
    last = job.count(decays) if job.megatron and job[decays] is not None else job.iterations
    if last:
        values[f"{ours}.decay_steps"] = last * job.updates
    elif f"{ours}.warmup_ratio" not in values:  # which decays over the whole job
        raise job.refusal(key, "it ends with the job, whose iterations are unknown. Add trainer.total_training_steps=N")
    return values


def _offload(section: str, ours: str, keys: tuple[str, ...] = SWITCHES) -> Callable[[VerlJob], Values]:
    return lambda job: {ours: any(bool(job[f"{section}.{key}"]) for key in keys)}


def _recompute(job: VerlJob, ours: str = "actor", theirs: str = "aorr.actor") -> Values:
    fields = f"{theirs}.megatron.override_transformer_config"
    how = job[f"{fields}.recompute_granularity"]
    if how != "selective":
        return {f"{ours}.recompute": how == "full"}
    modules, known = job.listed(f"{fields}.recompute_modules"), get_args(RecomputeModule)
    if unknown := [name for name in modules if name not in known]:
        text = f"{', '.join(unknown)} cannot be recomputed; modules are {', '.join(known)}"
        job.report(NONE, f"{fields}.recompute_modules", text)
    return {f"{ours}.recompute": [name for name in modules if name in known]}


def _checkpointed(model: str, ours: str) -> Callable[[VerlJob], Values]:
    return lambda job: {f"{ours}.recompute": bool(job[f"{model}.enable_gradient_checkpointing"])}


def _dtype(job: VerlJob) -> Values:
    key = "aorr.actor.megatron.dtype" if job.megatron else "aorr.actor.fsdp_config.dtype"
    name = str(job[key])
    name = {"fp32": "float32", "bf16": "bfloat16"}.get(name, name)
    if name not in ("float32", "bfloat16"):
        job.report(NONE, key, "weights are bfloat16 with float32 master weights, or float32")
        name = "bfloat16"
    return {"model.dtype": name}


def _adapters(job: VerlJob) -> Values:
    names = ("lora.rank", "lora.alpha", "lora.target_modules", "lora.adapter_path")
    if not job.megatron:
        names = ("lora_rank", "lora_alpha", "target_modules", "lora_adapter_path")
    rank, path = job[f"aorr.model.{names[0]}"], job[f"aorr.model.{names[3]}"]
    if not rank:
        return {}
    values: Values = {"actor.lora.rank": rank, "actor.lora.alpha": float(job.number(f"aorr.model.{names[1]}"))}
    targets = job.listed(f"aorr.model.{names[2]}")
    if targets not in ([], ["all-linear"]) and set(targets) != set(OF_MEGATRON):
        if set(targets) & set(OF_MEGATRON):
            job.report(NONE, f"aorr.model.{names[2]}", "targets have the names of Hugging Face: q_proj, down_proj, ...")
        else:
            values["actor.lora.targets"] = targets
    return values | ({"actor.lora.path": path} if path else {})


OF_KEYS = {"recompute_granularity", "recompute_modules", "recompute_method", "recompute_num_layers"}


def _fields(section: str, part: str) -> Callable[[VerlJob], Values]:
    """The fields of a configuration of megatron-core that the section `megatron` takes."""

    def convert(job: VerlJob) -> Values:
        given = {name: value for name, value in job.section(section).items() if name not in OF_KEYS}
        values: Values = {}
        for name, value in given.items():
            if name == "optimizer_cpu_offload":
                values["actor.optimizer.cpu_offload"] = bool(value)
            elif reason := _obstacle(part, name, value):
                job.report(NONE, f"{section}.{name}", reason)
            else:
                values[f"megatron.{part}.{name}"] = value
        return values

    return convert


def _obstacle(part: str, name: str, value: object) -> str:
    """Returns why the section `megatron` does not take a field, or ""."""
    # Here: megatron-core and torch take seconds to import, and most files have no such fields.
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from verl_mg.megatron import config_fields

    kinds = {
        "transformer": (MLATransformerConfig, config_fields.TRANSFORMER),
        "ddp": (DistributedDataParallelConfig, config_fields.DDP),
        "optimizer": (OptimizerConfig, config_fields.OPTIMIZER),
    }
    kind, refused = kinds[part]
    try:
        config_fields.given_fields(part, kind, {name: value}, refused)
    except UserError as error:
        return str(error).removeprefix(f"megatron.{part}.{name}").lstrip(":=").strip().rstrip(".")
    return ""


def _replay(job: VerlJob) -> Values:
    mode = job["aorr.actor.megatron.router_replay.mode"]
    if mode not in ("disabled", "R3", None):
        job.report(
            NONE, "aorr.actor.megatron.router_replay.mode", "the experts of the engine are replayed (R3), or none"
        )
    return {"rollout.replay_routing": bool(job["aorr.rollout.enable_rollout_routing_replay"]) or mode == "R3"}


def _critic_path(job: VerlJob) -> Values:
    path = job["critic.model.path"]
    if path is None:
        text = "verl's own default is a path of its authors; the critic starts from model.path"
        job.report("ask", "critic.model.path", text)
        return {}
    return {} if path == job["aorr.model.path"] else {"critic.path": str(Path(str(path)).expanduser())}


WITH_REFERENCE = Condition(lambda job: job.has_reference and job.megatron, "without a KL penalty, or with FSDP")
WITH_SHARDED_REFERENCE = Condition(
    lambda job: job.has_reference and not job.megatron, "without a KL penalty, or with Megatron"
)
OPTIMIZED = (
    "lr weight_decay betas clip_grad optimizer lr_scheduler_type lr_decay_style lr_warmup_steps lr_warmup_steps_ratio "
    "min_lr_ratio min_lr lr_decay_steps"
)
OPTIMIZER_KEYS = "kind lr weight_decay betas clip_grad schedule min_lr decay_steps warmup_steps warmup_ratio"


def _critic_only(condition: Condition) -> Condition:
    otherwise = ", or ".join(filter(None, ("without a critic", condition.otherwise)))
    return Condition(lambda job: job.has_critic and condition.holds(job), otherwise)


def _trained(theirs: str, fsdp: str, model: str, ours: str, also: Callable[[Condition], Condition]) -> tuple[Row, ...]:
    """The rows that actor and critic have in common."""
    always = also(ALWAYS)
    micro, dynamic = f"{theirs}.ppo_micro_batch_size_per_gpu", f"{theirs}.use_dynamic_bsz"
    longest, tokens = f"{theirs}.ppo_max_token_len_per_gpu", f"{ours}.tokens_per_micro_batch"
    sizes = keys_of(f"{theirs}.megatron: {' '.join(SIZES)}")
    fields = f"{theirs}.megatron.override_transformer_config"
    return (
        Row(sizes, (f"{ours}.layout",), _layout(theirs, f"{ours}.layout"), "`tp4-pp2-vpp2-cp2-ep8-etp1`",
            also(MEGATRON)),
        Row((f"{fsdp}.ulysses_sequence_parallel_size",), (f"{ours}.backend", f"{ours}.layout"), _shards(fsdp, ours),
            "`backend=fsdp`, with `cp2`", also(FSDP)),
        Row((micro, dynamic, longest), (tokens,), _tokens(micro, dynamic, longest, tokens, _cp(theirs, fsdp)),
            "always by tokens, of all ranks that share a row by cp", always),
        Row(keys_of(f"{theirs}.optim: {OPTIMIZED}"), keys_of(f"{ours}.optimizer: {OPTIMIZER_KEYS}"),
            _optimizer(f"{theirs}.optim", f"{ours}.optimizer"),
            "verl's schedules count iterations, ours optimizer steps", always),
        Row(keys_of(f"{theirs}.megatron: {' '.join(SWITCHES)}"), (f"{ours}.offload",),
            _offload(f"{theirs}.megatron", f"{ours}.offload"), "all of them together", also(MEGATRON)),
        Row(keys_of(f"{fsdp}: param_offload optimizer_offload"), (f"{ours}.offload",),
            _offload(fsdp, f"{ours}.offload", ("param_offload", "optimizer_offload")), "", also(FSDP)),
        Row((f"{model}.enable_gradient_checkpointing",), (f"{ours}.recompute",), _checkpointed(model, ours),
            "on there with FSDP", also(FSDP)),
        Row(keys_of(f"{fields}: recompute_granularity recompute_modules"), (f"{ours}.recompute",),
            lambda job: _recompute(job, ours, theirs), "", also(MEGATRON)),
    )  # fmt: skip


MODELS = (
    Row(("aorr.model.path",), ("model.path",), lambda job: {"model.path": str(Path(str(job["aorr.model.path"]))
        .expanduser())}, "a directory, or a name of the Hugging Face hub"),
    Row(("aorr.actor.strategy",), ("actor.backend",), lambda job: {}, "`fsdp2` is `fsdp`"),
    Row(("aorr.actor.megatron.dtype", "aorr.actor.fsdp_config.dtype"), ("model.dtype",), _dtype,
        "bfloat16 has float32 master weights in both"),
    Row(keys_of("aorr.model: lora_rank lora_alpha target_modules lora_adapter_path",
                "aorr.model.lora: rank alpha target_modules adapter_path"),
        ("actor.lora",), _adapters, "`{rank: 16, alpha: 32}`"),
    *_trained("aorr.actor", "aorr.actor.fsdp_config", "aorr.model", "actor", lambda condition: condition),
    Row(("aorr.actor.fsdp_config.fsdp_size",), ("fsdp.replicas",),
        lambda job: {} if job["aorr.actor.fsdp_config.fsdp_size"] in (-1, None)
        else {"fsdp.replicas": max(job.ranks // job.count("aorr.actor.fsdp_config.fsdp_size"), 1)},
        "ranks of a copy there, number of copies here", FSDP),
    same("aorr.actor.fsdp_config.reshard_after_forward", "fsdp.reshard_after_forward", when=FSDP),
    same("aorr.actor.fsdp_config.offload_policy", "fsdp.cpu_offload", when=FSDP),
    same("aorr.actor.freeze_vision_tower", "fsdp.freeze_vision_tower", when=FSDP),
    same("aorr.actor.megatron.dynamic_context_parallel", "actor.dynamic_context", when=MEGATRON),
    Row(("aorr.actor.megatron.override_transformer_config.*",), ("megatron.transformer",),
        _fields("aorr.actor.megatron.override_transformer_config", "transformer"),
        "megatron-core's own names, for all models of the job", MEGATRON),
    Row(("aorr.actor.megatron.override_ddp_config.*",), ("megatron.ddp",),
        _fields("aorr.actor.megatron.override_ddp_config", "ddp"), "", MEGATRON),
    Row(("aorr.actor.optim.override_optimizer_config.*",), ("megatron.optimizer", "actor.optimizer.cpu_offload"),
        _fields("aorr.actor.optim.override_optimizer_config", "optimizer"),
        "`optimizer_cpu_offload` computes the step there", MEGATRON),
    Row(("aorr.actor.megatron.router_replay.mode", "aorr.rollout.enable_rollout_routing_replay"),
        ("rollout.replay_routing",), _replay, "`R3`"),
    Row(("critic.model.path",), ("critic.path",), _critic_path, "", CRITIC),
    *_trained("critic", "critic.fsdp", "critic.model", "critic", _critic_only),
    Row(keys_of(f"aorr.ref.megatron: {' '.join(SIZES)}"), ("reference.layout",),
        _layout("aorr.ref", "reference.layout"), "", WITH_REFERENCE),
    Row(("aorr.ref.fsdp_config.ulysses_sequence_parallel_size",), ("reference.backend", "reference.layout"),
        _shards("aorr.ref.fsdp_config", "reference"), "", WITH_SHARDED_REFERENCE),
    Row(("aorr.ref.megatron.param_offload",), ("reference.offload",),
        _offload("aorr.ref.megatron", "reference.offload", ("param_offload",)), "", WITH_REFERENCE),
    Row(("aorr.ref.fsdp_config.param_offload",), ("reference.offload",),
        _offload("aorr.ref.fsdp_config", "reference.offload", ("param_offload",)), "", WITH_SHARDED_REFERENCE),
    Row(keys_of("aorr.ref: log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz log_prob_max_token_len_per_gpu"),
        ("reference.tokens_per_micro_batch",),
        _tokens("aorr.ref.log_prob_micro_batch_size_per_gpu", "aorr.ref.log_prob_use_dynamic_bsz",
                "aorr.ref.log_prob_max_token_len_per_gpu", "reference.tokens_per_micro_batch",
                _cp("aorr.ref", "aorr.ref.fsdp_config")), "", REFERENCE),
)  # fmt: skip
