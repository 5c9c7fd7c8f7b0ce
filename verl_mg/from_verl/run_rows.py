"""Rows of engines, evaluation and the run."""

from __future__ import annotations

from pathlib import Path

from verl_mg.from_verl.job import Condition, VerlJob
from verl_mg.from_verl.rows import ASK, NONE, Row, Values, keys_of, same

ENGINES = ("hf", "sglang", "vllm")
SERVICES = ("wandb", "mlflow", "swanlab")
ALWAYS_WRITTEN = ("console", "tensorboard", "file")
PARSERS = {"hermes": "qwen25", "qwen3_coder": "qwen3_coder"}
"""SGLang's names of the formats of tool calls, by verl's."""
MULTI_TURN = Condition(lambda job: bool(job["aorr.rollout.multi_turn.enable"]), "without multi_turn.enable")


def _engine(job: VerlJob) -> Values:
    name = job["aorr.rollout.name"]
    if name not in ENGINES:
        raise job.refusal("aorr.rollout.name", f"there is no such engine. Write one of {', '.join(ENGINES)}")
    if "aorr.rollout.name" not in job.given:
        job.report(ASK, "aorr.rollout.name", "verl requires it since 0.6, and took vllm before")
    return {"rollout.engine": name}


def _layout(job: VerlJob) -> Values:
    if job["aorr.rollout.name"] == "hf":
        return {}
    parts = ("tensor_model", "pipeline_model", "data", "expert")
    tp, pp, dp, ep = (job.count(f"aorr.rollout.{part}_parallel_size") for part in parts)
    # With dp the ranks of an engine are tp * dp there, and attention is divided by tp of them.
    sizes = {"tp": tp * dp, "pp": pp, "ep": ep, "adp": dp}
    if dp > 1 and job["aorr.rollout.name"] == "vllm":
        job.report(NONE, "aorr.rollout.data_parallel_size", "vLLM engines here have no adp: one engine for each")
        sizes = {"tp": tp, "pp": pp, "ep": ep if tp % ep == 0 else 1}
        if ep > 1:
            job.report(NONE, "aorr.rollout.expert_parallel_size", "ep divides the tp of an engine")
    return {"rollout.layout": "-".join(f"{key}{size}" for key, size in sizes.items() if size > 1) or "tp1"}


def _arguments(job: VerlJob) -> Values:
    """Arguments of the engine itself; those that only one engine has are left to the other's defaults."""
    engine = job["aorr.rollout.name"]
    if engine not in ("vllm", "sglang"):
        return {}
    names = {
        "enforce_eager": {"vllm": "enforce_eager", "sglang": "disable_cuda_graph"},
        "enable_prefix_caching": {"vllm": "enable_prefix_caching", "sglang": "disable_radix_cache"},
        "enable_chunked_prefill": {"vllm": "enable_chunked_prefill"},
        "max_num_batched_tokens": {"vllm": "max_num_batched_tokens"},
    }
    values: Values = {}
    for theirs, ours in names.items():
        key = f"aorr.rollout.{theirs}"
        if key not in job.given or job[key] is None:
            continue
        if engine not in ours:
            job.report("ignored", key, f"of vLLM's schedule; {engine} has its own")
        else:
            turned = ours[engine].startswith("disable") and theirs.startswith("enable")
            values[f"rollout.{engine}.{ours[engine]}"] = not job[key] if turned else job[key]
    for other in ("vllm", "sglang"):
        given = job.section(f"aorr.rollout.engine_kwargs.{other}")
        if other == engine:
            values |= {f"rollout.{engine}.{name}": value for name, value in given.items() if value is not None}
        elif given:
            job.report("ignored", f"aorr.rollout.engine_kwargs.{other}.*", f"the engine is {engine}")
    return values


def _quantized(job: VerlJob) -> Values:
    kind = job["aorr.rollout.quantization"]
    given = job.section("aorr.rollout.quantization") or kind
    if not given:
        return {}
    if kind == "fp8" and job["aorr.rollout.name"] == "sglang":
        return {"rollout.wire": "fp8_block"}
    job.report(NONE, "aorr.rollout.quantization", "only SGLang has quantized weights: rollout.wire")
    return {}


def _sampling(job: VerlJob) -> Values:
    top_p, top_k = job["aorr.rollout.top_p"], max(job.integer("aorr.rollout.top_k"), 0)
    values = {"rollout.temperature": job["aorr.rollout.temperature"], "rollout.top_p": top_p, "rollout.top_k": top_k}
    limited = (top_p < 1 or top_k > 0) and values["rollout.temperature"] > 0
    return values | ({"algorithm.support": "full"} if limited else {})


def _evaluation(job: VerlJob) -> Values:
    section, sampled = "aorr.rollout.val_kwargs", job["aorr.rollout.val_kwargs.do_sample"]
    values: Values = {
        "evaluation.samples": job[f"{section}.n"],
        "evaluation.temperature": job[f"{section}.temperature"] if sampled else 0.0,
    }
    if sampled:
        values["evaluation.top_p"] = job[f"{section}.top_p"]
        if max(job.integer(f"{section}.top_k"), 0) != max(job.integer("aorr.rollout.top_k"), 0):
            job.report(NONE, f"{section}.top_k", "an evaluation has the top_k of training")
    return values


def _every(job: VerlJob) -> Values:
    every = job.integer("trainer.test_freq")
    if every <= 0 and job["trainer.val_before_train"]:
        if "trainer.val_before_train" in job.given:
            job.report(
                NONE, "trainer.val_before_train", "without test_freq there is no evaluation; write evaluation.every"
            )
    elif every > 0 and not job["trainer.val_before_train"]:
        job.report(NONE, "trainer.val_before_train", "with evaluation.every one runs before training too")
    return {"evaluation.every": max(every, 0)}


def _tools(job: VerlJob) -> Values:
    section = "aorr.rollout.multi_turn"
    turns, name = job[f"{section}.max_assistant_turns"], str(job[f"{section}.format"])
    if turns is None:
        job.report(NONE, f"{section}.max_assistant_turns", "a sample has a number of turns; write rollout.max_turns")
    job.report(ASK, f"{section}.enable", "write the tools into rollout.tools, as functions or classes: agent_tools.md")
    values: Values = {} if turns is None else {"rollout.max_turns": turns}
    return values | {"rollout.tool_call_parser": PARSERS.get(name, name)}


def _iterations(job: VerlJob) -> Values:
    if job.iterations:
        return {"job.iterations": job.iterations}
    text = "iterations are counted here; write job.iterations as epochs * rows of the data / prompts_per_iteration"
    job.report(ASK, "trainer.total_epochs", text)
    return {}


def _checkpoints(job: VerlJob) -> Values:
    every = max(job.integer("trainer.save_freq"), 0)
    values: Values = {"checkpoint.every": every}
    if every:
        values["checkpoint.keep"] = job["trainer.max_actor_ckpt_to_keep"] or None
        if "hf_model" in job.listed("aorr.actor.checkpoint.save_contents"):
            values["checkpoint.export_every"] = every
    return values


def _services(job: VerlJob) -> Values:
    named = job.listed("trainer.logger")
    if others := [name for name in named if name not in SERVICES + ALWAYS_WRITTEN]:
        job.report(NONE, "trainer.logger", f"{', '.join(others)}: services are {', '.join(SERVICES)}")
    return {"tracking.services": [name for name in named if name in SERVICES]}


def _resume(job: VerlJob) -> Values:
    if job["trainer.resume_mode"] != "auto":
        job.report(ASK, "trainer.resume_mode", "a job resumes in job.output; write a new folder for a new run")
    return {}


def _folder(text: str) -> str:
    return text if "://" in text else str(Path(text).expanduser())


RUN = (
    Row(("aorr.rollout.name",), ("rollout.engine",), _engine,
        "`sglang` or `vllm`, with `rollout.python` where the engine has a separate environment; or `hf`"),
    Row(keys_of("aorr.rollout: temperature top_p top_k"),
        keys_of("rollout: temperature top_p top_k", "algorithm: support"), _sampling,
        "off is 0, not -1; with limits `full`, as there: all tokens are trained, sampled or not"),
    Row(keys_of("aorr.rollout: tensor_model_parallel_size pipeline_model_parallel_size data_parallel_size "
                "expert_parallel_size"), ("rollout.layout",), _layout, "`tp8-ep8`; 2 there, 1 here"),
    same("aorr.rollout.gpu_memory_utilization", "rollout.memory_fraction",
         "of the memory that is free when engines start, not of all"),
    same("aorr.rollout.free_cache_engine", "rollout.sleep"),
    same("aorr.rollout.max_num_seqs", "rollout.max_running_requests"),
    Row(keys_of("aorr.rollout: enforce_eager enable_prefix_caching enable_chunked_prefill max_num_batched_tokens",
                "aorr.rollout.engine_kwargs: vllm.* sglang.*"), ("rollout.vllm", "rollout.sglang"), _arguments),
    Row(keys_of("aorr.rollout: quantization quantization.*"), ("rollout.wire",), _quantized, "`fp8_block`"),
    same("aorr.rollout.full_determinism", "job.deterministic"),
    Row(keys_of("aorr.rollout.multi_turn: enable max_assistant_turns format"),
        ("rollout.max_turns", "rollout.tool_call_parser"), _tools, "`hermes` is `qwen25`", MULTI_TURN),
    Row(keys_of("aorr.rollout.val_kwargs: n temperature top_p top_k do_sample"),
        keys_of("evaluation: samples temperature top_p"), _evaluation,
        "greedy without `do_sample`"),
    Row(("trainer.test_freq", "trainer.val_before_train"), ("evaluation.every",), _every, "before training too"),
    Row(("trainer.total_training_steps", "trainer.total_epochs"), ("job.iterations",), _iterations,
        "epochs follow from it"),
    Row(("trainer.default_local_dir",), ("job.output",),
        lambda job: {"job.output": _folder(str(job["trainer.default_local_dir"]))}),
    Row(("trainer.save_freq", "trainer.max_actor_ckpt_to_keep", "aorr.actor.checkpoint.save_contents"),
        ("checkpoint.every", "checkpoint.keep", "checkpoint.export_every"), _checkpoints,
        "null keeps all; `hf_model` is `export_every`"),
    Row(("trainer.resume_mode",), (), _resume, "the same command resumes"),
    Row(("trainer.logger",), ("tracking.services",), _services, "files, TensorBoard and console are always there"),
    same("trainer.project_name", "tracking.project"),
    same("trainer.experiment_name", "tracking.name"),
    Row(("trainer.nnodes", "trainer.n_gpus_per_node"), (), lambda job: {},
        "torchrun's `--nnodes`, `--nproc-per-node`"),
)  # fmt: skip
