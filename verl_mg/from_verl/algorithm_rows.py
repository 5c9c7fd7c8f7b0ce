"""Rows of data, reward and algorithm."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl_mg.from_verl.job import Condition, VerlJob
from verl_mg.from_verl.rows import (
    AGGREGATED,
    ASK,
    CLIPPED,
    CRITIC,
    NONE,
    Row,
    Values,
    advantage_is,
    keys_of,
    loss_is,
    same,
)


def _sources(key: str, ours: str) -> Callable[[VerlJob], Values]:
    def convert(job: VerlJob) -> Values:
        value = job[key]
        if value is None:
            return {}
        paths = [str(Path(str(path)).expanduser()) for path in (value if isinstance(value, list) else [value])]
        if len(paths) == 1:
            return {ours: paths[0]}
        names: Values = {}
        for path in paths:
            parts = [part for part in Path(path).with_suffix("").parts[-2:] if part not in ("/", "..", ".")]
            name = re.sub(r"\W", "_", "_".join(parts))
            names[name if name not in names else f"{name}_{len(names)}"] = {"path": path}
        if key == "data.train_files":
            for source in names.values():
                rows = job.rows_of(source["path"])
                if rows:
                    source["weight"] = float(rows)
            if any("weight" not in source for source in names.values()):
                for source in names.values():
                    source.pop("weight", None)
                text = "rows of all files are drawn alike there, by weight here: write data.train.NAME.weight as rows"
                job.report(ASK, key, text)
        return {ours: names}

    return convert


def _overlong(job: VerlJob) -> Values:
    if not job["data.filter_overlong_prompts"] and job["data.truncation"] != "error":
        job.report(NONE, "data.truncation", "prompts are never cut: a longer one is an error, or left out with drop")
    return {"data.overlong_prompts": "drop" if job["data.filter_overlong_prompts"] else "error"}


def _reward(job: VerlJob) -> Values:
    path, name = job["reward.custom_reward_function.path"], job["reward.custom_reward_function.name"]
    values: Values = {}
    if job["reward.reward_model.enable"]:
        values = {"reward.from_model": True, "reward_model.path": job["reward.reward_model.model_path"]}
        if path:
            job.report(NONE, "reward.custom_reward_function.path", "with a reward model no function is called")
        return values
    options = job.section("reward.custom_reward_function.reward_kwargs")
    if path:
        values["reward.function"] = f"verl:{path}:{name or 'compute_score'}"
    else:
        values["reward.function"] = "verl:verl.utils.reward_score:default_compute_score"
        text = "verl's scores by data_source are called, so verl must be installed; verl_mg.rewards has some of them"
        job.report(ASK, "reward.custom_reward_function.path", text)
    if options:
        values["reward.options"] = options
    if job["reward.reward_manager.name"] not in ("naive", "dapo", "batch", "prime"):
        job.report(NONE, "reward.reward_manager.name", "a reward is a function of one sample, or of several")
    return values


def _overlong_reward(job: VerlJob) -> Values:
    section = "reward.reward_kwargs.overlong_buffer_cfg"
    if not job[f"{section}.enable"]:
        return {}
    if job[f"{section}.penalty_factor"] != 1.0:
        job.report(NONE, f"{section}.penalty_factor", "the reward falls by 1")
    return {"algorithm.overlong_buffer": job[f"{section}.len"]}


DATA = (
    Row(("data.train_files",), ("data.train",), _sources("data.train_files", "data.train"),
        "the same Parquet files, without further options: [data.md](data.md)"),
    Row(("data.val_files",), ("data.test",), _sources("data.val_files", "data.test"), "several by name"),
    Row(("data.prompt_key",), ("data.prompt_field",),
        lambda job: {} if job["data.prompt_key"] == "prompt" else {"data.prompt_field": job["data.prompt_key"]}),
    same("data.image_key", "data.image_field"),
    same("data.train_batch_size", "algorithm.prompts_per_iteration", "prompts, in both"),
    same("data.max_prompt_length", "data.max_prompt_tokens"),
    same("data.max_response_length", "rollout.max_new_tokens"),
    Row(("data.filter_overlong_prompts", "data.truncation"), ("data.overlong_prompts",), _overlong,
        "`drop` or `error`; nothing is cut"),
    Row(("data.val_max_samples",), ("evaluation.prompts",),
        lambda job: {"evaluation.prompts": size if (size := job.integer("data.val_max_samples")) > 0 else None},
        "-1 there and null here are all"),
    Row(("data.seed",), ("job.seed",), lambda job: {} if job["data.seed"] is None else {"job.seed": job["data.seed"]}),
    Row(keys_of("reward.custom_reward_function: path name reward_kwargs.*", "reward.reward_manager.name",
                "reward.reward_model: enable model_path"),
        keys_of("reward: function options from_model", "reward_model.path"), _reward, "`verl:PATH:NAME`"),
    Row(keys_of("reward.reward_kwargs.overlong_buffer_cfg: enable len penalty_factor"),
        ("algorithm.overlong_buffer",), _overlong_reward, "of `recipes/dapo.py`",
        Condition(lambda job: job["reward.reward_manager.name"] == "dapo", "with another reward_manager")),
    same("reward.num_workers", "reward.workers"),
)  # fmt: skip


# -- algorithm


ESTIMATORS = {"kl": "k1", "abs": "abs", "mse": "k2", "low_var_kl": "k3"}
"""Our names of the estimators of the divergence, where verl has another name too."""


def _kl(job: VerlJob) -> Values:
    if not job.has_reference:
        return {}
    if job["algorithm.use_kl_in_reward"] and job["aorr.actor.use_kl_loss"]:
        raise job.refusal(
            "algorithm.use_kl_in_reward", "recipes have one KL penalty. Set use_kl_loss=false or this one"
        )
    in_reward = bool(job["algorithm.use_kl_in_reward"])
    key = "algorithm.kl_penalty" if in_reward else "aorr.actor.kl_loss_type"
    name = str(job[key])
    plain, plus = name.removesuffix("+"), name.endswith("+")
    estimator = ESTIMATORS.get(plain, plain)
    estimator += "+" if plus and estimator in ("k1", "k3") else ""  # the gradient of k2+ is that of k2
    values: Values = {"algorithm.kl.placement": "reward" if in_reward else "loss", "algorithm.kl.estimator": estimator}
    coefficient = "algorithm.kl_ctrl.kl_coef" if in_reward else "aorr.actor.kl_loss_coef"
    values["algorithm.kl.coefficient"] = job[coefficient]
    if in_reward and job["algorithm.kl_ctrl.type"] == "adaptive":
        values["algorithm.kl.target"] = job["algorithm.kl_ctrl.target_kl"]
        values["algorithm.kl.horizon"] = job["algorithm.kl_ctrl.horizon"]
    return values


def _minibatches(job: VerlJob) -> Values:
    if job.has_critic and job["critic.ppo_mini_batch_size"] != job["aorr.actor.ppo_mini_batch_size"]:
        job.report(NONE, "critic.ppo_mini_batch_size", "actor and critic take the same number of steps")
    return {"algorithm.num_minibatches": job.minibatches}


def _epochs(job: VerlJob) -> Values:
    if job.has_critic and job["critic.ppo_epochs"] != job["aorr.actor.ppo_epochs"]:
        job.report(NONE, "critic.ppo_epochs", "actor and critic take the same number of steps")
    return {"algorithm.num_epochs": job["aorr.actor.ppo_epochs"]}


def _aggregation(job: VerlJob) -> Values:
    mode, scale = job["aorr.actor.loss_agg_mode"], job["aorr.actor.loss_scale_factor"]
    if mode == "seq-mean-token-sum-norm" and scale not in (None, job["data.max_response_length"]):
        job.report(NONE, "aorr.actor.loss_scale_factor", "sums are divided by rollout.max_new_tokens")
    if job.has_critic and job["critic.loss_agg_mode"] != mode:
        job.report(NONE, "critic.loss_agg_mode", "actor and critic have the same aggregation")
    return {"algorithm.loss_aggregation": mode}


def _filter(job: VerlJob) -> Values:
    if not job["algorithm.filter_groups.enable"]:
        return {}
    rounds = job.integer("algorithm.filter_groups.max_num_gen_batches")
    if job["algorithm.filter_groups.metric"] not in (None, "reward", "acc", "score", "seq_reward"):
        job.report(NONE, "algorithm.filter_groups.metric", "groups are kept whose rewards differ")
    return {"algorithm.max_sampling_rounds": rounds if rounds > 0 else None}


def _pf_ppo(job: VerlJob) -> Values:
    if not job["algorithm.use_pf_ppo"]:
        return {}
    return {
        "algorithm.resampling": job["algorithm.pf_ppo.reweight_method"],
        "algorithm.power": job["algorithm.pf_ppo.weight_pow"],
        "algorithm.buffer_samples": job.count("data.train_batch_size") * job.count("aorr.rollout.n"),
    }


def _correction(job: VerlJob) -> Values:
    section = "algorithm.rollout_correction"
    weight, rejection = job[f"{section}.rollout_is"], job[f"{section}.rollout_rs"]
    values: Values = {"algorithm.old_logprobs": "rollout"} if job[f"{section}.bypass_mode"] else {}
    if job[f"{section}.bypass_mode"] and (weight or rejection):
        text = (
            "weights compare the actor's log-probs with the rollout's, which it takes for them. Set bypass_mode=false"
        )
        raise job.refusal(f"{section}.bypass_mode", text)
    if job[f"{section}.bypass_mode"] and job[f"{section}.loss_type"] != "ppo_clip":
        job.report(NONE, f"{section}.loss_type", "with the rollout's log-probs a recipe keeps its loss")
    if weight:
        (threshold,) = _thresholds(job, f"{section}.rollout_is_threshold", 1)
        low, high = threshold
        values |= {"algorithm.off_policy.weight": weight, "algorithm.off_policy.high": high}
        values |= {} if low is None else {"algorithm.off_policy.low": low}
        values["algorithm.off_policy.normalize"] = bool(job[f"{section}.rollout_is_batch_normalize"])
    if rejection:
        criteria = [part.strip() for part in str(rejection).split(",")]
        bounds = _thresholds(job, f"{section}.rollout_rs_threshold", len(criteria))
        values["algorithm.off_policy.rejection"] = {
            _criterion(name): _limits(name, *bound) for name, bound in zip(criteria, bounds, strict=True)
        }
    return values


def _criterion(name: str) -> str:
    """Returns our name of a criterion: `seq_sum_k1` is `sequence-sum-k1`."""
    return name.replace("seq_", "sequence_").replace("_", "-")


def _limits(criterion: str, low: float | None, high: float) -> Any:
    """Returns the bounds of the ratio of k1, or the bound of k2 and k3."""
    # verl bounds the engine's probability over the trainer's, and we the inverse; a single bound holds on both sides.
    return [1 / high, high if low is None else 1 / low] if criterion.endswith("k1") else high


BOUNDS = re.compile(r"\s*(?:([\d.e+-]+)_)?([\d.e+-]+)\s*")


def _thresholds(job: VerlJob, key: str, count: int) -> list[tuple[float | None, float]]:
    """Returns the bounds of "0.5_2.0", or of 2.0, which has no lower one, of each of some criteria or of all."""
    bounds = []
    for text in str(job[key]).split(","):
        match = BOUNDS.fullmatch(text)
        try:
            low, high = (None if part is None else float(part) for part in match.groups()) if match else (None, None)
        except ValueError:
            high = None
        if high is None or high <= 0 or (low is not None and low <= 0):
            raise job.refusal(key, "not 2.0, or 0.5_2.0, for each criterion. Correct it")
        bounds.append((low, high))
    if len(bounds) not in (1, count):
        raise job.refusal(key, f"there are {count} criteria. Write a threshold for each, or one for all")
    return bounds * count if len(bounds) == 1 else bounds


def _ratio_limit(job: VerlJob) -> Values:
    if job.loss in ("dppo_tv", "dppo_kl"):
        return {"algorithm.ratio_limit": job["aorr.actor.clip_ratio_c"]}
    if job.loss == "vanilla":
        return {"algorithm.dual_clip": job["aorr.actor.clip_ratio_c"]}
    if "aorr.actor.clip_ratio_c" in job.given:
        job.report("ignored", "aorr.actor.clip_ratio_c", "verl does not read it with this loss")
    return {"algorithm.dual_clip": None}


def _clips(job: VerlJob, side: str) -> Values:
    value = job[f"aorr.actor.clip_ratio_{side}"]
    value = job["aorr.actor.clip_ratio"] if value is None else value
    if job.loss in ("dppo_tv", "dppo_kl"):
        return {f"algorithm.limit_{side}": value, "algorithm.divergence": job.loss.removeprefix("dppo_")}
    return {f"algorithm.clip_{side}": value}


ALGORITHM = (
    Row(("algorithm.adv_estimator", "aorr.actor.policy_loss.loss_mode", "algorithm.filter_groups.enable",
         "algorithm.use_pf_ppo"), (), lambda job: {}, "the recipe: [recipes/README.md](../recipes/README.md)"),
    same("algorithm.gamma", "algorithm.gamma", when=advantage_is("gae", "reinforce_plus_plus")),
    Row(("algorithm.lam",), ("algorithm.lam", "algorithm.critic_lam"),
        lambda job: {"algorithm.lam": job["algorithm.lam"], "algorithm.critic_lam": job["algorithm.lam"]},
        "one there; the critic's returns have their own here", CRITIC),
    same("algorithm.norm_adv_by_std_in_grpo", "algorithm.normalize_by_std",
         when=advantage_is("grpo", "grpo_vectorized")),
    Row(("algorithm.filter_groups.max_num_gen_batches", "algorithm.filter_groups.metric"),
        ("algorithm.max_sampling_rounds",), _filter,
        "of `recipes/dapo.py`, null for 0; at the limit verl stops, and the recipe trains on fewer groups"),
    Row(keys_of("algorithm: use_kl_in_reward kl_penalty", "aorr.actor: use_kl_loss kl_loss_type kl_loss_coef",
                "algorithm.kl_ctrl: kl_coef type target_kl horizon"),
        keys_of("algorithm.kl: placement estimator coefficient target horizon"), _kl,
        "`kl` is `k1`, `low_var_kl` is `k3`; a coefficient of 0, the default here, builds no reference"),
    Row(keys_of("algorithm.rollout_correction: rollout_is rollout_is_threshold rollout_rs rollout_rs_threshold "
                "rollout_is_batch_normalize bypass_mode loss_type"),
        keys_of("algorithm.off_policy: weight low high normalize rejection", "algorithm.old_logprobs"), _correction,
        "`seq_sum_k1` is `sequence-sum-k1`, of the inverse ratio; a rejected token still counts in the normalizer"),
    same("aorr.rollout.n", "algorithm.group_size"),
    Row(("aorr.actor.ppo_mini_batch_size", "critic.ppo_mini_batch_size"), ("algorithm.num_minibatches",), _minibatches,
        "here the number of parts: 512 prompts in parts of 128 are 4"),
    Row(("aorr.actor.ppo_epochs", "critic.ppo_epochs"), ("algorithm.num_epochs",), _epochs),
    Row(("aorr.actor.clip_ratio_low",), ("algorithm.clip_low", "algorithm.limit_low", "algorithm.divergence"),
        lambda job: _clips(job, "low"), "`clip_ratio` has an effect there only where this is null; `limit_low` of DPPO",
        CLIPPED),
    Row(("aorr.actor.clip_ratio_high",), ("algorithm.clip_high", "algorithm.limit_high"),
        lambda job: _clips(job, "high"), "", CLIPPED),
    Row(("aorr.actor.clip_ratio_c",), ("algorithm.dual_clip", "algorithm.ratio_limit"), _ratio_limit,
        "`ratio_limit` of `recipes/dppo.py`; off here by default, except in Clip-Cov"),
    Row(("aorr.actor.loss_agg_mode", "critic.loss_agg_mode", "aorr.actor.loss_scale_factor"),
        ("algorithm.loss_aggregation",), _aggregation,
        "a recipe's default is its paper's; over the mini-batch of all ranks, always", AGGREGATED),
    same("aorr.actor.entropy_coeff", "algorithm.entropy_coefficient", "0.001 in verl before 0.3"),
    same("aorr.actor.tau_pos", "algorithm.tau_positive", "of `recipes/sapo.py`", loss_is("sapo")),
    same("aorr.actor.tau_neg", "algorithm.tau_negative", "of `recipes/sapo.py`", loss_is("sapo")),
    same("aorr.actor.policy_loss.clip_cov_ratio", "algorithm.fraction", "`recipes/clip_cov.py`", loss_is("clip_cov")),
    same("aorr.actor.policy_loss.clip_cov_lb", "algorithm.covariance_low", "", loss_is("clip_cov")),
    same("aorr.actor.policy_loss.clip_cov_ub", "algorithm.covariance_high", "", loss_is("clip_cov")),
    same("aorr.actor.policy_loss.kl_cov_ratio", "algorithm.fraction", "of `recipes/kl_cov.py`", loss_is("kl_cov")),
    same("aorr.actor.policy_loss.ppo_kl_coef", "algorithm.penalty", "of `recipes/kl_cov.py`", loss_is("kl_cov")),
    same("critic.cliprange_value", "algorithm.value_clip", when=CRITIC),
    same("trainer.critic_warmup", "algorithm.critic_warmup", when=CRITIC),
    Row(("algorithm.pf_ppo.reweight_method", "algorithm.pf_ppo.weight_pow"),
        ("algorithm.resampling", "algorithm.power", "algorithm.buffer_samples"), _pf_ppo, "of `recipes/pf_ppo.py`"),
)  # fmt: skip
