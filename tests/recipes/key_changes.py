"""Values of keys of recipes with which a run is another one, and the outcome by which two runs are compared."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as parquet
from pydantic import BaseModel

from tests.helpers.tiny_jobs import RECIPES, logged
from verl_mg.config.keys import subsection
from verl_mg.job.recipe import load_recipe

NAMES = tuple(sorted(path.stem for path in RECIPES.glob("[!_]*.py")))


class Change(NamedTuple):
    """A value of a key, and what else the run has to have for the key to matter."""

    values: tuple[str, ...]  # the first that is not the default is taken
    others: tuple[str, ...] = ()


KL, WEIGHT = "algorithm.kl.coefficient=0.5", "algorithm.off_policy.weight=token"
COMPARED = "algorithm.old_logprobs=recompute"  # with those of the rollout the ratio would be 1
FALLING = ("algorithm.kl.target=9000", "algorithm.kl.horizon=8")
RISING = ("algorithm.kl.target=1e-9", "algorithm.kl.horizon=1000")
# Steps so large that ratios and values leave any bound.
SMALL, LARGE = "1e-6", "9.0"
CHANGES = {
    "support": Change(("full",), ("rollout.top_p=0.5",)),
    "prompts_per_iteration": Change(("4",)),
    "pairs_per_iteration": Change(("4",)),
    "examples_per_iteration": Change(("4",)),
    "group_size": Change(("2", "3")),
    "clip_low": Change((SMALL,)),
    "clip_high": Change((SMALL,)),
    "dual_clip": Change(("1.0001",)),
    "entropy_coefficient": Change(("0.5",)),
    "kl.coefficient": Change(("0.5", "0.1")),
    "kl.placement": Change(("loss", "reward"), (KL,)),
    "kl.estimator": Change(("k2", "k1"), (KL,)),
    "kl.target": Change(("0.001",), (KL,)),
    "kl.horizon": Change(("8",), (KL, "algorithm.kl.target=0.001")),
    "kl.min_coefficient": Change(("0.5",), (KL, *FALLING)),
    "kl.max_coefficient": Change(
        ("0.5",), (KL, "algorithm.kl.target=1e-9", "algorithm.kl.horizon=1000", "job.iterations=4")
    ),
    "off_policy.weight": Change(("token",), (COMPARED,)),
    "off_policy.low": Change(("1",), (WEIGHT, COMPARED)),
    "off_policy.high": Change(("1",), (WEIGHT, COMPARED)),
    # With these bounds many weights are 0; without, their mean is 1 up to rounding.
    "off_policy.normalize": Change(
        ("true",), (WEIGHT, COMPARED, "algorithm.off_policy.low=1", "algorithm.off_policy.high=1")
    ),
    "off_policy.rejection": Change(("{token-k2: 1e-30}",), (COMPARED,)),
    "off_policy.opsm_delta": Change(("1e-9",)),
    "off_policy.score_centering": Change(("3",), (COMPARED,)),
    "num_minibatches": Change(("4",)),
    "num_epochs": Change(("3",)),
    "old_logprobs": Change(("rollout", "recompute")),
    "fraction": Change(("0.5",)),
    "covariance_low": Change(("-9",), ("algorithm.fraction=0.5",)),
    "covariance_high": Change(("0",), ("algorithm.fraction=0.5", "algorithm.covariance_low=-9e9")),
    "dynamic_sampling": Change(("streaming",)),
    "max_sampling_rounds": Change(("1",)),
    "overlong_buffer": Change(("5",)),
    "overlong_filter": Change(("true",)),
    "beta": Change(("0.9",)),
    "loss_type": Change(("ipo",)),
    "k": Change(("1",)),
    "whiten": Change(("true",)),
    "bound_process": Change(("true",)),
    "label_smoothing": Change(("0.3",)),
    "normalize_by_std": Change(("false", "true")),
    "divergence": Change(("kl",)),
    "limit_low": Change((SMALL,)),
    "limit_high": Change((SMALL,)),
    "ratio_limit": Change(("1.0001",)),
    "loss_aggregation": Change(("seq-mean-token-sum",)),
    "rewards": Change(("{right: 3}",)),
    "gamma": Change(("0.5",)),
    "step_weight": Change(("0.1",)),
    "divergence.kind": Change(("forward",)),
    "divergence.beta": Change(("0.1",), ("algorithm.divergence.kind=js",)),
    "divergence.top_k": Change(("2",)),
    "divergence.tail": Change(("renormalized",), ("algorithm.divergence.top_k=2",)),
    "data_fraction": Change(("0.5",)),
    "penalty": Change(("9",), ("algorithm.fraction=0.5",)),
    "turn_weight": Change(("0.1",)),
    "buffer_samples": Change(("16",)),
    "draws_per_prompt": Change(("2",)),
    "resampling": Change(("best_worst",)),
    "filter_probability": Change(("0.9",), ("algorithm.resampling=best_random",)),
    "power": Change(("9",), ("algorithm.resampling=pow",)),
    "lam": Change(("0.3",)),
    "critic_lam": Change(("0.3",)),
    "critic_warmup": Change(("1",)),
    "value_clip": Change((SMALL,)),
    "accuracy_low": Change(("0.9",)),
    "accuracy_high": Change(("0.01",)),
    "process_weight": Change(("0.1",)),
    "process_update": Change(("after",)),
    "process_minibatches": Change(("2",)),
    "tau_positive": Change(("9",)),
    "tau_negative": Change(("9",)),
    "lam_alpha": Change(("0.9",)),
    "imitation": Change(("0.9",)),
}


OF_RECIPE = {("prime", "max_sampling_rounds"): ("algorithm.accuracy_low=0.9",)}
"""What a key has to have with it in one recipe."""
SMALL_RUN = {
    **{f"{what}_per_iteration": 8 for what in ("prompts", "pairs", "examples")},
    **{"num_minibatches": 2, "critic_warmup": 0, "buffer_samples": 32},
}
EXACT, EVALUATED, SAMPLED = (
    "reward.function=verl_mg.rewards.exact:score",
    "evaluation.every=1",
    "evaluation.temperature=1",
)
OPTIMIZER, LORA, SET = "actor.optimizer", "actor.lora", "data.test={a: {path: TASK/data/test.jsonl}}"
SOURCES = "data.train={a: {path: TASK/data/train.jsonl}, b: {path: OTHER/data/train.jsonl}}"
SELF = "teachers={self: {}}"
TOOLS, FSDP = "rollout.tools=[verl_mg.agents.tools.builtin:calculator]", "actor.backend=fsdp"
USUAL = "reward.function=verl_mg.rewards.math:score"  # a model of rewards excludes other functions
MIXTURE = "reward={mixture: {a: {function: verl_mg.rewards.exact:score}}}"
# Five passes over 20 prompts, of which some are outside of the band.
AGAIN = (
    *("job.iterations=12", "data.train=TASK/data/test.jsonl"),
    *("data.curriculum.high=0.3", "data.curriculum.pass_threshold=-0.9"),
)
SECTIONS: dict[str, tuple[str, ...]] = {
    "ModelConfig.dtype": ("model.dtype=bfloat16",),
    "DataConfig.train": ("data.train=OTHER/data/train.jsonl",),
    "DataConfig.test": (EVALUATED, "data.test=OTHER/data/test.jsonl"),
    "DataConfig.prompt_field": ("data.prompt_field=answer",),
    "DataConfig.chat_template": ("data.chat_template=true",),
    "DataConfig.instruction": ("data.instruction='1'",),
    "DataConfig.system_prompt": ("data.chat_template=true", "data.system_prompt='1'"),
    "DataConfig.max_prompt_tokens": ("data.max_prompt_tokens=1",),
    "SourceConfig.path": (SOURCES, "data.train.a.path=OTHER/data/train.jsonl"),
    "SourceConfig.weight": (SOURCES, "data.train.a.weight=99"),
    "SourceConfig.prompt_field": (SOURCES, "data.train.a.prompt_field=answer"),
    "SourceConfig.answer_field": (SOURCES, "data.train.a.answer_field=nowhere"),
    "SourceConfig.instruction": (SOURCES, "data.train.a.instruction='1'"),
    "SourceConfig.chat_template": (SOURCES, "data.train.a.chat_template=true"),
    "SourceConfig.system_prompt": (SOURCES, "data.chat_template=true", "data.train.a.system_prompt='1'"),
    "SourceConfig.reward": (SOURCES, "data.train.a.reward={function: verl_mg.rewards.exact:score}"),
    "EvaluationSetConfig.prompts": (EVALUATED, SET, "data.test.a.prompts=2"),
    "EvaluationSetConfig.samples": (EVALUATED, SAMPLED, SET, "data.test.a.samples=2"),
    "EvaluationSetConfig.temperature": (EVALUATED, SET, "data.test.a.temperature=1"),
    "EvaluationSetConfig.top_p": (EVALUATED, SAMPLED, SET, "data.test.a.top_p=0.1"),
    "EvaluationSetConfig.max_new_tokens": (EVALUATED, SET, "data.test.a.max_new_tokens=1"),
    "EvaluationSetConfig.stop": (EVALUATED, SAMPLED, SET, "data.test.a.stop=['1', '2', '3', a, b, c]"),
    "EvaluationSetConfig.k": (EVALUATED, SAMPLED, "evaluation.samples=4", SET, "data.test.a.k=[3]"),
    "EvaluationSetConfig.pass_threshold": (
        EVALUATED,
        SAMPLED,
        SET,
        "evaluation.samples=2",
        "data.test.a.pass_threshold=0",
    ),
    "RewardConfig.function": (EXACT,),
    "RewardConfig.mixture": ("reward={mixture: {a: {function: verl_mg.rewards.exact:score}}}",),
    "WeightedRewardConfig.function": (MIXTURE, "reward.mixture.a.function=recipes/tasks/repeat_digit.py:score"),
    "WeightedRewardConfig.weight": (MIXTURE, "reward.mixture.a.weight=3"),
    "CurriculumConfig.low": ("job.iterations=6", "data.curriculum.low=0.9"),
    "CurriculumConfig.high": ("job.iterations=6", "data.curriculum.high=0.01"),
    "CurriculumConfig.pass_threshold": (
        *("job.iterations=6", "data.curriculum.low=0.9"),
        "data.curriculum.pass_threshold=-9",
    ),
    "CurriculumConfig.revisit": (*AGAIN, "data.curriculum.revisit=1"),
    "CurriculumConfig.decay": (*AGAIN, "data.curriculum.decay=0.9"),
    "ModelConfig.kernels": ("model.kernels=transformer_engine",),
    "DataConfig.chosen_field": ("data.chosen_field=prompt",),
    "DataConfig.rejected_field": ("data.rejected_field=prompt",),
    "DataConfig.loss_on": ("data.loss_on=last",),
    "DataConfig.prepare": ("data.prepare=nowhere:prepare",),
    "SourceConfig.prepare": (SOURCES, "data.train.a.prepare=nowhere:prepare"),
    "RewardConfig.options": ("reward.function=verl_mg.rewards.regex_format:RegexFormat", "reward.options={miss: 9}"),
    "RewardConfig.from_model": (USUAL, "reward.from_model=true"),
    "WeightedRewardConfig.options": (
        "reward={mixture: {a: {function: verl_mg.rewards.regex_format:RegexFormat}}}",
        "reward.mixture.a.options={miss: 9}",
    ),
    "RoleSection.ranks": ("actor.ranks=7",),
    "RoleSection.offload": ("actor.offload=true",),
    "RoleSection.dynamic_context": ("actor.dynamic_context=true",),
    "TrainableConfig.recompute": ("actor.recompute=[mla_up_proj]",),
    "TrainableConfig.tokens_per_micro_batch": ("actor.tokens_per_micro_batch=8",),
    "FrozenConfig.tokens_per_micro_batch": (KL, "reference.tokens_per_micro_batch=8"),
    "CriticConfig.path": (USUAL, "reward.from_model=true", "reward_model.path=OTHER/model"),
    "OptimizerConfig.nvme_folder": (f"{OPTIMIZER}.cpu_offload=true", f"{OPTIMIZER}.nvme_folder=nowhere"),
    "LoraConfig.path": ("actor.lora={}", f"{LORA}.path=nowhere"),
    "LoraConfig.experts": ("actor.lora={}", f"{LORA}.experts=true"),
    "FsdpConfig.replicas": (FSDP, "fsdp.replicas=2"),
    "MegatronConfig.optimizer": ("megatron.optimizer={nothing: 1}",),
    "MegatronConfig.ddp": ("megatron.ddp={nothing: 1}",),
    "TeacherConfig.url": (SELF, "algorithm.divergence.top_k=2", "teachers.self.url=nowhere"),
    "TeacherConfig.weights": (SELF, "teachers.self.weights=actor"),
    "TeacherConfig.prompt": (SELF, "teachers.self.prompt='{answer}='"),
    "RolloutConfig.engine": ("rollout.engine=vllm",),
    "RolloutConfig.mode": ("rollout.mode=async",),
    "RolloutConfig.max_running_requests": ("rollout.extra_prompts=3", "rollout.max_running_requests=1"),
    "RolloutConfig.partial_rollout": (
        *("rollout.extra_prompts=3", "rollout.max_running_requests=3"),
        "rollout.partial_rollout=true",
    ),
    "RolloutConfig.layout": ("rollout.layout=tp2",),
    "RolloutConfig.num_ranks": ("rollout.num_ranks=1",),
    "RolloutConfig.memory_fraction": ("rollout.memory_fraction=0.5",),
    "RolloutConfig.sleep": ("rollout.sleep=false",),
    "RolloutConfig.wire": ("rollout.wire=int4",),
    "RolloutConfig.delta": ("rollout.delta=true",),
    "RolloutConfig.adapters": ("actor.lora={}", "rollout.adapters=true"),
    "RolloutConfig.sharding_table": ("rollout.sharding_table=nowhere.json",),
    "RolloutConfig.replay_routing": ("rollout.replay_routing=true",),
    "RolloutConfig.replay_selections": ("rollout.replay_selections=true",),
    "RolloutConfig.urls": ("rollout.urls=['http://127.0.0.1:1']",),
    "RolloutConfig.urls_file": ("job.deterministic=true", "rollout.urls_file=nowhere.txt"),
    "RolloutConfig.tools": (TOOLS,),
    "RolloutConfig.agent": ("rollout.agent=nowhere:run",),
    "RolloutConfig.agent_command": ("rollout.agent_command=nothing",),
    "RolloutConfig.extra_prompts": ("rollout.extra_prompts=3",),
    "OptimizerConfig.kind": (f"{OPTIMIZER}.kind=muon",),
    "OptimizerConfig.lr": (f"{OPTIMIZER}.lr=0.1",),
    "OptimizerConfig.min_lr": (
        f"{OPTIMIZER}.schedule=linear",
        f"{OPTIMIZER}.decay_steps=2",
        f"{OPTIMIZER}.min_lr=0.02",
    ),
    "OptimizerConfig.schedule": (f"{OPTIMIZER}.warmup_ratio=0.3", f"{OPTIMIZER}.schedule=linear"),
    "OptimizerConfig.warmup_steps": (f"{OPTIMIZER}.warmup_steps=9",),
    "OptimizerConfig.warmup_ratio": (f"{OPTIMIZER}.warmup_ratio=0.9",),
    "OptimizerConfig.decay_steps": (
        f"{OPTIMIZER}.schedule=linear",
        f"{OPTIMIZER}.decay_steps=90",
        f"{OPTIMIZER}.decay_steps=3",
    ),
    "OptimizerConfig.weight_decay": (f"{OPTIMIZER}.weight_decay=3",),
    "OptimizerConfig.betas": (f"{OPTIMIZER}.betas=[0.1, 0.1]",),
    "OptimizerConfig.momentum": (f"{OPTIMIZER}.kind=muon", f"{OPTIMIZER}.momentum=0.1"),
    "OptimizerConfig.eps": (f"{OPTIMIZER}.eps=0.1",),
    "OptimizerConfig.clip_grad": (f"{OPTIMIZER}.clip_grad=0.001",),
    "OptimizerConfig.moments_dtype": (f"{OPTIMIZER}.moments_dtype=bfloat16",),
    "GuardConfig.max_kl": ("actor.guard.max_kl=1e-9",),
    "GuardConfig.action": ("actor.guard.max_kl=1e-9", "actor.guard.action=rollback"),
    "TrainableConfig.lora": ("actor.lora={}",),
    "LoraConfig.rank": ("actor.lora={}", f"{LORA}.rank=2"),
    "LoraConfig.alpha": ("actor.lora={}", f"{LORA}.alpha=1"),
    "LoraConfig.targets": ("actor.lora={}", f"{LORA}.targets=[q_proj]"),
    "LoraConfig.seed": ("actor.lora={}", f"{LORA}.seed=3"),
    "RoleSection.dtype": ("actor.dtype=bfloat16",),
    "RoleSection.backend": ("actor.backend=fsdp",),
    "RoleSection.layout": ("actor.layout=tp2",),
    "RoleSection.pipeline_layers": ("actor.pipeline_layers=[9]",),
    "FrozenConfig.path": (KL, "reference.path=null"),
    "ReferenceConfig.refresh_every": (KL, "reference.refresh_every=1"),
    "RolloutConfig.temperature": ("rollout.temperature=0.5",),
    "RolloutConfig.top_p": ("rollout.top_p=0.5",),
    "RolloutConfig.top_k": ("rollout.top_k=2",),
    "RolloutConfig.min_p": ("rollout.min_p=0.5",),
    "RolloutConfig.stop": ("rollout.stop=['1', '2', '3', a, b, c]",),
    "RolloutConfig.max_new_tokens": ("rollout.max_new_tokens=2",),
    "RolloutConfig.max_mismatch": ("rollout.max_mismatch=1e-30",),
    "RolloutConfig.chat_template_options": ("data.chat_template=true", "rollout.chat_template_options={a: 1}"),
    "EvaluationConfig.every": ("evaluation.every=1",),
    "EvaluationConfig.prompts": (EVALUATED, "evaluation.prompts=2"),
    "EvaluationConfig.samples": (EVALUATED, SAMPLED, "evaluation.samples=2"),
    "EvaluationConfig.temperature": (EVALUATED, SAMPLED),
    "EvaluationConfig.top_p": (EVALUATED, SAMPLED, "evaluation.top_p=0.1"),
    "EvaluationConfig.max_new_tokens": (EVALUATED, "evaluation.max_new_tokens=1"),
    "EvaluationConfig.stop": (EVALUATED, SAMPLED, "evaluation.stop=['1', '2', '3', a, b, c]"),
    "EvaluationConfig.k": (EVALUATED, SAMPLED, "evaluation.samples=4", "evaluation.k=[3]"),
    "EvaluationConfig.pass_threshold": (EVALUATED, SAMPLED, "evaluation.samples=2", "evaluation.pass_threshold=0"),
    "JobConfig.seed": ("job.seed=5",),
    "JobConfig.iterations": ("job.iterations=3",),
    "JobConfig.deterministic": ("rollout.extra_prompts=3", "job.deterministic=true"),
    "JobConfig.save": ("job.save=true",),
    "RecordConfig.samples_per_rank": ("record.samples_per_rank=1",),
    "CheckpointConfig.every": ("checkpoint.every=1",),
    "CheckpointConfig.keep": ("checkpoint.every=1", "checkpoint.keep=1"),
    "CheckpointConfig.export_every": ("checkpoint.export_every=1",),
    "ProfileConfig.iterations": ("profile.iterations=[1]",),
    "ProfileConfig.ranks": ("profile.iterations=[1]", "profile.ranks=3"),
    "MegatronConfig.transformer": ("megatron.transformer={init_method_std: 0.5, hidden_dropout: 0.5}",),
}
"""Keys of other sections, by the class that declares them: overrides of a recipe, the last its own; TASK and OTHER are
the folders of two tasks."""
RECIPE_OF = {
    **{"DataConfig.chosen_field": "dpo", "DataConfig.rejected_field": "dpo", "DataConfig.loss_on": "sft"},
    **{f"TeacherConfig.{name}": "gkd" for name in ("url", "weights", "prompt")},
}
"""The recipe, if it is not grpo."""


def keys_of(section: BaseModel, prefix: str = "") -> dict[str, Any]:
    """The keys below a section of defaults that are values, with these defaults."""
    found: dict[str, Any] = {}
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        found |= keys_of(value, f"{prefix}{name}.") if subsection(field.annotation) else {prefix + name: value}
    return found


@cache
def recipe_keys(name: str) -> dict[str, Any]:
    """The keys of the recipe NAME, with its defaults."""
    return keys_of(load_recipe(name).config())


def overrides_of(name: str, other_model: Path, others: Sequence[str]) -> list[str]:
    """Overrides of a short run of a recipe whose steps are so large that every bound is reached; `others` win."""
    of_recipe = [f"algorithm.{key}={value}" for key, value in SMALL_RUN.items() if key in recipe_keys(name)]
    trained = [role for role in ("actor", "critic", "reward_model", "process_reward") if role in _sections(name)]
    steps = [f"{role}.optimizer={{lr: 0.03, warmup_steps: 0}}" for role in trained]
    reference = [f"reference.path={other_model}"] if _has_reference(name, others) else []
    return [*of_recipe, *steps, *reference, "job.iterations=2", "job.save=false", "checkpoint.every=0",
            "evaluation.every=0", *others]  # fmt: skip


def _sections(name: str) -> set[str]:
    recipe = load_recipe(name)
    return set(recipe.roles(recipe.config()))


def _has_reference(name: str, others: Sequence[str]) -> bool:
    return bool(_sections(name) & {"reference", "teachers"}) or any("kl.coefficient" in other for other in others)


def changed(name: str, key: str) -> list[str]:
    """The overrides of a change, with its others first."""
    of_key = CHANGES[key]
    default = str(recipe_keys(name)[key]).lower()
    value = next(value for value in of_key.values if value.lower() != default)
    known = {f"algorithm.{other}" for other in recipe_keys(name)}
    others = [text for text in of_key.others if not text.startswith("algorithm.") or text.partition("=")[0] in known]
    return [*others, *OF_RECIPE.get((name, key), ()), f"algorithm.{key}={value}"]


def outcome(output: Path) -> Any:
    """What a run has computed and written, without what no two runs share."""
    lines = [{k: v for k, v in line.items() if not k.startswith(("time/", "memory/"))} for line in logged(output)]
    rows = [row for file in sorted(output.glob("samples/**/*.parquet")) for row in parquet.read_table(file).to_pylist()]
    samples = [{k: v for k, v in row.items() if k in ("prompt", "response", "reward", "tokens")} for row in rows]
    files = sorted(str(file.relative_to(output)) for file in output.rglob("*") if "tfevents" not in file.name)
    return lines, samples, files
