"""Configurations of the section `rollout` that are refused: one case at least for each row of the tables of checks."""

import importlib.util
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.random_models import config
from verl_mg import device
from verl_mg.config import Config, RecipeConfig, load_config
from verl_mg.config.checks import REFUSALS, JobCase, Refusal
from verl_mg.config.effects import NEEDS, check_effects, without_effect
from verl_mg.engines.engine_options import EngineCase
from verl_mg.engines.kinds import ENGINES, PROCESSES
from verl_mg.errors import UserError
from verl_mg.job.engine_checks import MODEL_REFUSALS, ModelCase, check_engines
from verl_mg.layout import EngineLayout, EnginePlacement
from verl_mg.models.hf_config import parse_config
from verl_mg.recipes.common.kl import KLConfig
from verl_mg.recipes.gkd import Config as GkdConfig
from verl_mg.reshard.encode import check_engine_blocks
from verl_mg.reshard.encoding import encoding_of
from verl_mg.sharding.traced_table import TracedTable
from verl_mg.sharding.weight_table import weight_table

SIZES = {"model_type": "qwen3", "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4}
SIZES |= {"head_dim": 64, "hidden_size": 256, "vocab_size": 100, "intermediate_size": 512}
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MIXED = EXPERTS | {"num_hidden_layers": 2, "mlp_only_layers": [0], "decoder_sparse_step": 1}
LATENT = {"model_type": "deepseek_v3", "q_lora_rank": None, "kv_lora_rank": 32, "qk_rope_head_dim": 16}
LATENT |= {"qk_nope_head_dim": 32, "v_head_dim": 32, "first_k_dense_replace": 1, "n_routed_experts": 4}
LATENT |= {"n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_group": 1, "topk_group": 1}
STACKED, INDEXED, LINEAR = "gpt_oss", "glm_moe_dsa", "qwen3_next"
"""Sizes of models with experts, with experts in one of two layers, with latent, sparse and linear attention."""
BF16 = {"dtype": "bfloat16"}
URLS = {"urls": ["http://a:1"]}
KEYS = {"replay_selections": True}
DRAFT = {"sglang": {"speculative_algorithm": "EAGLE"}, "sleep": False}
CENTRED = {"algorithm": SimpleNamespace(support="full", off_policy=SimpleNamespace(score_centering=8))}

WITHOUT_MODEL = [
    ({"num_ranks": 2}, {}, "rollout.num_ranks=2: none of the job's 2 ranks is left to train. Start at least 3."),
    ({"num_ranks": 1, "engine": "hf"}, {}, "rollout.num_ranks=1: the engine hf works on the ranks of the actor."),
    ({"engine": "hf"}, {"actor": {"offload": True}}, "actor.offload=true: the engine hf works on the actor's own mem"),
    ({"engine": "hf", "max_running_requests": "auto"}, {}, "rollout.max_running_requests=auto: the engine hf has no"),
    ({"mode": "one_step_off"}, {}, "rollout.mode=one_step_off: only engines on separate ranks generate while training"),
    ({"mode": "async", "weight_transfer": "disk", **URLS}, {}, "rollout.mode=async: servers read a folder only betw"),
    ({"mode": "async", "num_ranks": 1, "extra_prompts": 1}, {}, "rollout.mode=async: engines never wait for the last"),
    ({"mode": "async", "num_ranks": 1}, {"job": {"deterministic": True}}, "job.deterministic=true: which samples of"),
    ({"extra_prompts": 2}, {"job": {"deterministic": True}}, "job.deterministic=true: which prompts are complete fi"),
    ({"urls_file": "f"}, {"job": {"deterministic": True}}, "job.deterministic=true: servers that come and go make"),
    ({"sglang": {"dtype": "float16"}}, {}, "rollout.sglang.dtype=float16: engines compute in the dtype of the actor,"
     " bfloat16. Leave it out"),
    ({"engine": "vllm", "vllm": {"dtype": "auto"}}, {}, "rollout.vllm.dtype=auto: engines compute in the dtype of the"),
    ({"sharding_table": "t", "engine": "hf"}, {}, "rollout.sharding_table: only engines inside the job that are separ"),
    ({"sharding_table": "t", **URLS}, {}, "rollout.sharding_table: only engines inside the job that are separate"),
    ({"engine": "hf", "wire": "fp8_block"}, {}, "rollout.wire=fp8_block: only SGLang has such weights. Write rollout."),
    ({"wire": "fp8_block", **URLS}, {}, "rollout.wire=fp8_block: servers receive quantized weights only as shards,"),
    ({"wire": "fp8_channel"}, {"gpus": False}, "rollout.wire=fp8_channel: SGLang computes with quantized weights on"),
    ({"wire": "int4", "delta": True, "sleep": False}, {}, "rollout.wire=int4: SGLang stores INT4 weights in another"),
    ({"wire": "int4", "weight_transfer": "shards", **URLS}, {}, "rollout.wire=int4: SGLang stores INT4 weights in ano"),
    ({"wire": "fp8_block"}, {"model": {"dtype": "float32"}}, "rollout.wire=fp8_block: SGLang multiplies quantized"),
    ({"engine": "hf", "delta": True}, {}, "rollout.delta=true: only SGLang can receive changes instead of all weights"),
    ({"delta": True, **URLS}, {}, "rollout.delta=true: servers receive only shards or files so, and rollout.weight_tr"),
    ({"delta": True}, {}, "rollout.delta=true: engines that sleep lose the weights that changes refer to."),
    *(({"top_p": 0.9}, {"algorithm": RecipeConfig(), "teachers": {"a": teacher}}, "algorithm.support=sampled: teach"
       f"ers.a.{key} scores tokens of the whole vocabulary. Write algorithm.support=policy or full.")
      for key, teacher in (("url", {"url": "http://a:1"}), ("tokenizer", {"path": "a", "tokenizer": "b"}))),
    ({"top_k": 9}, {"algorithm": GkdConfig(support="policy")}, "algorithm.support=policy: algorithm.divergence comp"),
    (DRAFT | {"top_p": 0.9}, {"algorithm": RecipeConfig()}, "algorithm.support=sampled: with rollout.sglang."
     "speculative_algorithm engines do not report the candidates of drafted tokens. Leave that out, or write"),
    ({"top_k": 1}, {"algorithm": RecipeConfig()}, "algorithm.support=sampled: with rollout.top_k=1 a token is its onl"),
    ({**KEYS, "engine": "vllm"}, {}, "rollout.replay_selections=true: the engine vllm does not report the keys that"),
    (KEYS | URLS, {}, "rollout.replay_selections=true: what the numbers mean that a server reports depends on its"),
    (KEYS, {"actor": {"backend": "fsdp"}}, "rollout.replay_selections=true: fsdp does not replay selections. Write "
     "actor.backend=megatron"),
    (KEYS, {"reference": {"backend": "fsdp"}}, "rollout.replay_selections=true: fsdp does not replay selections. Write "
     "reference.backend=megatron"),
    (KEYS | {"layout": "pp2"}, {}, "rollout.replay_selections=true: SGLang reports layers of one stage only."),
    (KEYS | {"layout": "tp4-adp2"}, {}, "rollout.replay_selections=true: SGLang reports selections only where each rank"
     " attends to whole requests. Write adp4 in"),
    *((KEYS | {"sglang": {name: value}}, {}, f"rollout.replay_selections=true: with rollout.sglang.{name} SGLang does")
      for name, value in (("speculative_algorithm", "EAGLE"), ("enable_hisparse", True), ("attn_cp_size", 2))),
    (KEYS | {"sglang": {"chunked_prefill_size": -1}}, {}, "rollout.replay_selections=true: SGLang records as many"),
    ({"adapters": True}, {}, "rollout.adapters=true: the actor has none. Set actor.lora, or leave it out."),
    ({"adapters": True, "engine": "hf"}, {"lora": {}}, "rollout.adapters=true: the engine hf has merged weights. Wri"),
    ({"adapters": True, **URLS}, {"lora": {}}, "rollout.adapters=true: servers outside the job receive merged weights"),
    ({"adapters": True, "delta": True, "sleep": False}, {"lora": {}}, "rollout.adapters=true: rollout.delta is for"),
    ({"adapters": True, "wire": "fp8_block"}, {"lora": {}}, "rollout.adapters=true: rollout.wire=fp8_block is for wei"),
    ({"adapters": True, "mode": "async", "num_ranks": 1}, {"lora": {}}, "rollout.adapters=true: requests in flight"),
    ({"adapters": True}, {"lora": {}}, "rollout.adapters=true: engines that sleep lose the weights under the adapters"),
    ({"adapters": True, "sleep": False}, {"lora": {"experts": True}}, "rollout.adapters=true: engines receive no"),
    ({"adapters": True, "sleep": False, "layout": "tp2-ep2-adp2"}, {"lora": {}}, "rollout.adapters=true: SGLang pins"),
    ({"adapters": True, "sleep": False, "layout": "tp2"}, {"lora": {}, "node": 1}, "rollout.adapters=true: adapters"),
    ({"adapters": True, "engine": "vllm", "sleep": False}, {"lora": {"rank": 600}}, "actor.lora.rank=600: vLLM's"),
    ({"engine": "hf", **URLS}, {}, "rollout.urls: these are SGLang servers, but rollout.engine is hf. Write sglang."),
    ({"weight_transfer": "disk", **URLS}, {}, "rollout.shared_folder: it is missing, for"),
    ({"num_ranks": 1, "layout": "tp2"}, {}, "rollout.layout=tp2: an engine needs 2 ranks, but the rollout has 1 of the "
     "job's 2. Write rollout.num_ranks as a multiple of 2."),
    ({"layout": "tp4"}, {}, "rollout.layout=tp4: an engine needs 4 ranks, but the rollout has 2 of the job's 2. Start"),
    (DRAFT | {"sharding_table": "t"}, {}, "rollout.sglang.speculative_algorithm: a file with a table has no draft"),
    (DRAFT | {"delta": True}, {}, "rollout.sglang.speculative_algorithm: a draft model does not receive changes, only"),
    (DRAFT | {"wire": "fp8_block"}, {}, "rollout.sglang.speculative_algorithm: SGLang has no quantized projection"),
    ({"temperature": 0}, CENTRED, "algorithm.off_policy.score_centering: a greedy rollout draws from no distribution."),
    ({"top_p": 0.9}, CENTRED, "algorithm.off_policy.score_centering: the distribution that samples are drawn from is"),
    ({"agent": "a:run", "tools": ["t:f"]}, {}, "rollout.tools: agents call tools themselves. Leave it out, or leave"),
    ({"agent": "a:run", "partial_rollout": True}, {}, "rollout.partial_rollout=true: an agent that was stopped cannot"),
    ({"agent": "a:run", "agent_names": ["b", "b"]}, {}, "rollout.agent_names: it has a name twice. Leave one out."),
    ({"agent": "a:run", "agent_names": ["b", "c d"]}, {}, "rollout.agent_names: ['b', 'c d'] has a name with other"),
    ({"agent": "a:run", "agent_names": ["b"], "agent_trained": ["c"]}, {}, "rollout.agent_trained=['c']: these are ag"),
]  # fmt: skip
"""Keys of `rollout`, what else there is, and how the error begins."""
WITH_MODEL = [
    (STACKED, {"wire": "fp8_block"}, {}, "rollout.wire=fp8_block: quantized experts of gpt_oss are not supported."),
    (STACKED, URLS, {}, "rollout.weight_transfer=process_group: servers of gpt_oss, whose experts are in stacked"),
    (LATENT, {"replay_selections": True}, {}, "rollout.replay_selections=true: deepseek_v3 has no sparse attention."),
    (LATENT, {"sleep": False, "adapters": True}, {"lora": {}}, "rollout.adapters=true: engines compute latent"),
    (MIXED, {"sleep": False, "adapters": True}, {"lora": {}}, "rollout.adapters=true: in a model with experts engines "
     "take adapters of down_proj, gate_proj, up_proj for adapters of experts."),
    (EXPERTS, {"adapters": True, "engine": "vllm"}, {"lora": {"targets": ["q_proj"]}, "gpus": False},
     "rollout.adapters=true: vLLM then computes experts with kernels for GPUs only."),
]  # fmt: skip
OF_ENGINES = [
    ("sglang", "cpu", STACKED, "tp1", {}, "rollout.engine=sglang: on the CPU SGLang has attention sinks only in"),
    ("sglang", "cpu", INDEXED, "tp1", {}, "rollout.engine=sglang: SGLang has no sparse attention on the CPU."),
    ("sglang", "cpu", EXPERTS, "tp2-ep2", {}, "rollout.layout=tp2-ep2: SGLang does not support ep and adp on the CPU."),
    ("sglang", "cpu", LINEAR, "tp1", {}, "rollout.engine=sglang: on the CPU linear attention needs compiled kernels"),
    ("sglang", "cpu", {"intermediate_size": 96}, "tp2", {}, "rollout.layout=tp2: on the CPU SGLang pads the 96 columns"
     " of the feed-forward layer to a multiple of 32 * tp. Set rollout.engine=hf, or use a model with a multiple of"),
    ("sglang", "cpu", EXPERTS | {"moe_intermediate_size": 32}, "tp2", {}, "rollout.layout=tp2: on the CPU SGLang pads "
     "the 32 columns of an expert to a multiple of 32 * tp. Set rollout.engine=hf, or use a model with a multiple of"),
    ("sglang", "cpu", {"num_key_value_heads": 1}, "tp2", {}, "rollout.layout=tp2: on the CPU SGLang pads 1 key-value"),
    ("sglang", "gpu", {}, "tp1", {"attention_backend": "fa3"}, "rollout.sglang.attention_backend=fa3: it has no"),
    ("sglang", "gpu", {}, "tp1", {"decode_attention_backend": "fi"}, "rollout.sglang.decode_attention_backend=fi: it "),
    *(("sglang", "gpu", sizes, "tp1", {}, "rollout.engine=sglang: on GPUs its engines in float32, the dtype of the"
       f" actor, do not serve a model with {what}. Set actor.dtype=bfloat16, or roll") for sizes, what in (
          (EXPERTS, "experts"), (LATENT, "latent attention"), ({"head_dim": 256}, "heads of 256"))),
    *(("sglang", "gpu", EXPERTS, "tp1", {name: runner}, BF16, f"rollout.sglang.{name}={runner}: it does not read the"
       " weights of experts in the order in which they are written, or") for name, runner in (
          ("moe_runner_backend", "flashinfer_trtllm"), ("moe_runner_backend", "auto"),
          ("speculative_moe_runner_backend", "triton_kernel"))),
    *(("sglang", "gpu", EXPERTS, "tp1", {name: "deep_gemm"}, BF16 | {"wire": "fp8_block", "blackwell": True},
       f"rollout.sglang.{name}=deep_gemm: on Blackwell it keeps scales of rollout.wire=fp8_block in a form into which")
      for name in ("moe_runner_backend", "fp8_gemm_runner_backend")),
    ("sglang", "gpu", {}, "tp1", {}, BF16 | {"wire": "mxfp8"}, "rollout.wire=mxfp8: SGLang has MXFP8 on Blackwell and"),
    ("sglang", "gpu", {}, "tp1", {"fp8_gemm_runner_backend": "flashinfer_trtllm"}, BF16 | {"wire": "mxfp8", "blackwell":
     True}, "rollout.wire=mxfp8: rollout.sglang.fp8_gemm_runner_backend=flashinfer_trtllm does not read weights in"),
    ("vllm", "gpu", {}, "tp1", {"attention_backend": "FLASH_ATTN"}, "rollout.vllm.attention_backend=FLASH_ATTN: it"),
    *(("vllm", "gpu", sizes, "tp1", {}, "rollout.engine=vllm: on GPUs its engines in float32, the dtype of the actor,")
      for sizes in (LATENT, LINEAR)),
    ("vllm", "gpu", EXPERTS, "tp1", {"moe_backend": "flashinfer_trtllm"}, BF16, "rollout.vllm.moe_backend=flashinfer_"
     "trtllm: it does not read the weights of experts in the order in which they are written."),
    ("vllm", "cpu", EXPERTS, "tp2-ep2", {}, "rollout.layout=tp2-ep2: vLLM does not support ep on the CPU. Leave it"),
    ("vllm", "cpu", INDEXED, "tp1", {}, "rollout.engine=vllm: vLLM has no sparse attention on the CPU."),
    ("vllm", "cpu", LATENT, "tp1", {}, "rollout.engine=vllm: on the CPU vLLM's latent attention has kv_lora_rank 512"
     " and qk_rope_head_dim 64, but this model 32 and 16."),
    ("vllm", "cpu", {"head_dim": 16}, "tp1", {}, "rollout.engine=vllm: on the CPU vLLM has no attention with heads of"
     " size 16. Use a model with one of 32, 64,"),
    ("vllm", "cpu", EXPERTS | {"hidden_size": 48}, "tp1", {}, "rollout.layout=tp1: on the CPU vLLM needs multiples of"
     " 32 as sizes of experts, but the hidden size is 48."),
    ("vllm", "cpu", EXPERTS, "tp4", {}, "rollout.layout=tp4: on the CPU vLLM needs multiples of 32 as sizes of"
     " experts, but the columns of an expert on each rank is 16."),
    ("vllm", "gpu", {}, "tp1", {"gpu_memory_utilization": 0.9}, "rollout.vllm.gpu_memory_utilization: engines of a job"
     " take a share of the memory that is free, not of all. Set rollout.memory_fraction."),
]  # fmt: skip


def table_of(sizes=()):
    return weight_table(config(sizes) if isinstance(sizes, str) else parse_config(SIZES | dict(sizes)))


def config_of(rollout, lora=None, **sections):
    sections = {"model": {"dtype": "bfloat16"}, "actor": {}, **sections}
    sections["model"] = {"path": "m"} | sections["model"]
    sections["actor"] = {"lora": lora} | sections["actor"]
    return Config.model_validate(sections | {"data": {"train": "d"}, "rollout": {"engine": "sglang", **rollout}})


def case_of(rollout, gpus=True, node=2, **sections):
    whole = config_of(rollout, **sections)
    return JobCase(whole, ENGINES[whole.rollout.engine].abilities, 2, node, gpus)


def first_row(rows, case):
    """The row of a table that refuses a case, and its error."""
    row: Refusal = next(row for row in rows if row.when(case))
    return row, row.message.format(c=case, value=row.when(case))


def without_model(rollout, others, _=""):
    return first_row(REFUSALS, case_of(rollout, **others))


def with_model(sizes, rollout, others, _=""):
    return first_row(MODEL_REFUSALS, ModelCase(case_of(rollout, **others), table_of(sizes)))


def of_engine(engine, place, sizes, layout, extra, *rest):
    table = table_of(sizes).for_engine(engine)
    case = EngineCase(table, EngineLayout.parse(layout), **{"dtype": "float32", "extra": extra} | dict(*rest[:-1]))
    return first_row(getattr(PROCESSES[engine], f"{place}_refusals"), case)


CASES = [(refusal, case) for refusal, cases in (
    (without_model, WITHOUT_MODEL), (with_model, WITH_MODEL), (of_engine, OF_ENGINES)) for case in cases]  # fmt: skip


@pytest.mark.parametrize(("refusal", "case"), CASES, ids=[case[-1][:50] for _, case in CASES])
def test_configuration_that_no_job_can_have_is_refused_with_a_remedy(refusal, case):
    error = refusal(*case)[1]
    assert error.startswith(case[-1]) and error.endswith(".") and "{" not in error


def test_tables_of_checks_have_a_refused_case_for_each_row():
    seen = {id(refusal(*case)[0]) for refusal, case in CASES}
    of_engines = [row for kind in PROCESSES.values() for row in (*kind.cpu_refusals, *kind.gpu_refusals)]
    assert [row.message for row in (*REFUSALS, *MODEL_REFUSALS, *of_engines) if id(row) not in seen] == []


@pytest.fixture
def on_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=name))


def check(sizes=(), dtype="bfloat16", lora=None, **rollout):
    check_engines(config_of(rollout, lora, model={"dtype": dtype}), table_of(sizes), 2)


def test_check_engines_possible_configurations_are_accepted(on_gpus, monkeypatch):
    check(layout="tp2", wire="fp8_block", delta=True, sleep=False)
    check({"intermediate_size": 320}, layout="tp2", wire="fp8_channel")
    check(layout="tp2", wire="int4")
    check(dtype="float32")
    check(dtype="float32", sglang={"attention_backend": "torch_native"})
    check(sglang={"attention_backend": "fa3"})
    check(EXPERTS, dtype="float32", engine="hf")
    check({"head_dim": 256}, dtype="float32", engine="vllm")
    check(adapters=True, lora={"targets": ["q_proj"]}, num_ranks=1, mode="one_step_off")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))
    check({"intermediate_size": 320}, layout="tp2", wire="mxfp8", delta=True, sleep=False)


@pytest.mark.parametrize(
    ("rollout", "ffn", "message"),
    [
        ({"layout": "tp2", "wire": "fp8_block"}, 320, r"gate_up_proj.weight: the box .* whole blocks of \(128"),
        ({"layout": "tp2", "wire": "int4"}, 640, r"down_proj.weight: the box .* whole blocks of \(1, 128\)"),
        ({"layout": "tp1", "wire": "int4"}, 544, "down_proj.weight: a rank of the engine has 256 x 544 of it"),
        ({"layout": "tp2", "wire": "mxfp8"}, 544, r"down_proj.weight: the box .* whole blocks of \(1, 32\)"),
        ({"layout": "tp1", "wire": "mxfp8"}, 528, "rank of the engine has .* x 528 .*mxfp8 needs .* of 32 x 32"),
    ],
)
def test_check_engines_parts_of_quantized_blocks_are_refused(on_gpus, monkeypatch, rollout, ffn, message):
    monkeypatch.setattr(device, "is_blackwell", lambda: rollout["wire"] == "mxfp8")
    with pytest.raises(UserError, match=message):
        check({"intermediate_size": ffn}, **rollout)


def test_check_engines_quantized_weights_that_the_engine_transposes_are_refused(on_gpus):
    table, layout = table_of({"intermediate_size": 512}), EngineLayout()
    shards = table.for_engine("sglang").engine_shards(layout, 0)
    name = "model.layers.0.mlp.down_proj.weight"
    shards |= {name: replace(shards[name], order=(1, 0))}
    traced = TracedTable("Qwen3ForCausalLM", "sglang", "", layout, (shards,))
    target = (
        table.for_engine("sglang")
        .with_traced(traced, Path("table.json"))
        .shard_map_engine(EnginePlacement(layout, (0,)))
    )
    with pytest.raises(UserError, match=f"{name}: the engine has {name} transposed, .* Write rollout.wire=cast."):
        check_engine_blocks(table, target, encoding_of("fp8_block"), [0])


def test_check_engines_reports_what_the_configuration_alone_forbids_first(on_gpus, monkeypatch):
    monkeypatch.setattr(device, "ranks_of_a_node", lambda ranks: 1)
    with pytest.raises(UserError, match=r"^rollout\.adapters=true: adapters are in the memory of one node"):
        check(LATENT, adapters=True, lora={}, layout="tp2", sleep=False)


class WithPenalty(RecipeConfig):
    kl: KLConfig = KLConfig(placement="reward")  # the placement of the recipe is no value that somebody has set


AGENT_OPTIONS = ("options={c: 1}", "timeout_s=9", "concurrency=2", "retries=2", "failure_reward=-1", "trained=[a]")
AGENT_OPTIONS += ("names=[a]", "host=h")
EVALUATION = ("every=3", "prompts=2", "samples=4", "temperature=1", "top_p=0.5", "max_new_tokens=9", "stop=[a]")
EVALUATION += ("k=[2]", "pass_threshold=0.5")
CURRICULUM = ("revisit=1", "pass_threshold=0.7", "decay=0.7")
PENALTY = ("placement=loss", "estimator=k2", "target=0.2", "horizon=9", "min_coefficient=0.1", "max_coefficient=2")
WITHOUT_EFFECT = [
    (
        ["rollout.max_turns=3", "rollout.tool_timeout_s=9"],
        ["rollout.tools=[a:b]"],
        "rollout.max_turns: it has no effect, since there are no",
    ),
    (["rollout.tool_call_parser=hermes"], ["rollout.agent=a:b"], "neither tools nor agents read replies."),
    (["rollout.reasoning_parser=qwen3"], ["rollout.agent=a:b"], "neither tools nor agents read replies."),
    (
        [f"rollout.agent_{option}" for option in AGENT_OPTIONS],
        ["rollout.agent=a:b"],
        "no agent makes the samples. Set rollout.agent, or leave",
    ),
    (
        ["rollout.stale=drop", "rollout.max_staleness=3", "rollout.keep_kv_cache=true"],
        ["rollout.mode=async"],
        "weights never reach requests in flight.",
    ),
    (["rollout.vllm={a: 1}"], ["rollout.engine=vllm"], "these are arguments of another engine."),
    (["rollout.sglang={a: 1}"], ["rollout.engine=sglang"], "these are arguments of another engine."),
    (["rollout.python=p"], ["rollout.engine=vllm"], "the job starts no process of an engine."),
    (["rollout.layout=tp2"], ["rollout.engine=vllm"], "the engine hf has the layout of the actor."),
    (["rollout.memory_fraction=0.5"], ["rollout.engine=sglang"], "the job starts no engine that reserves memory."),
    (["rollout.sleep=false"], ["rollout.engine=sglang"], "no engine shares the memory of training."),
    (
        ["rollout.api_key_env=A", "rollout.admin_key_env=B", "rollout.weight_transfer=disk"],
        ["rollout.urls=[http://a:1]"],
        "the job starts its engines itself.",
    ),
    (
        ["rollout.shared_folder=f"],
        ["rollout.urls=[http://a:1]", "rollout.weight_transfer=disk"],
        "weights do not travel through files.",
    ),
    (
        [f"evaluation.{option}" for option in EVALUATION],
        ["data.test=t"],
        "there is nothing to evaluate on. Set data.test",
    ),
    ([f"data.curriculum.{option}" for option in CURRICULUM], ["data.curriculum.low=0.1"], "no prompt is left out."),
    (
        ["reward.from_model=true", "reward.workers=3", "reward.mixture={a: {function: a:b}}", "reward.weights_file=f"],
        ["reward.from_model=false"],
        "runs no reward functions.",
    ),
    (
        ["reward.from_model=true", "reward.function=a:b", "reward.options={c: 1}"],
        ["reward.from_model=false"],
        "runs no reward functions.",
    ),
    (
        ["reward.mixture={a: {function: a:b}}", "reward.function=c:d"],
        ["reward.mixture={}"],
        "reward.mixture replace it",
    ),
    (["actor.guard.action=rollback"], ["actor.guard.max_kl=0.1"], "no divergence is too large."),
    (["fsdp.replicas=2"], ["actor.backend=fsdp"], "no role has this backend. Set actor.backend=fsdp"),
    (["actor.backend=fsdp", "megatron.ddp={a: 1}"], ["actor.backend=megatron"], "no role has this backend."),
    (["algorithm.support=full"], ["rollout.top_k=3"], "every token can be drawn. Set rollout.top_p, top_k or min_p"),
    (["rollout.top_p=0.5", "algorithm.support=policy"], None, "no other model scores the tokens of the policy."),
    (
        [f"algorithm.kl.{option}" for option in PENALTY],
        ["algorithm.kl.coefficient=1"],
        "there is no penalty.",
    ),
    (
        ["algorithm.kl.coefficient=1", "algorithm.kl.horizon=2"],
        ["algorithm.kl.target=1"],
        "nothing is adapted. Set algorithm.kl.target",
    ),
    *(
        ([f"{role}.dynamic_context=true"], [f"{role}.layout=cp2"], "its layout divides no rows.")
        for role in ("actor", "critic", "reward_model", "process_reward", "reference")
    ),
    *(
        (
            [f"{role}.optimizer.{key}" for key in ("min_lr=1e-9", "decay_steps=9")],
            [f"{role}.optimizer.schedule=cosine"],
            f"{role}.optimizer.min_lr: it has no effect, since the rate is constant. Set schedule",
        )
        for role in ("actor", "critic", "reward_model", "process_reward")
    ),
    (["tracking.samples=2", "tracking.project=p"], ["tracking.services=[wandb]"], "no service receives it."),
    (["tracking.prometheus_host=h"], ["tracking.prometheus_port=0"], "no port is open."),
    (["profile.memory=true", "profile.ranks='1'"], ["profile.iterations=[1]"], "no iteration is traced."),
    (["critic.offload=true"], None, "critic: it has no effect, since the recipe builds no such role."),
]


def loaded(overrides: list[str]) -> Config:
    return load_config(None, ["model.path=m", "data.train=d", *overrides], WithPenalty)


@pytest.mark.parametrize(("overrides", "needed", "message"), WITHOUT_EFFECT)
def test_check_effects_key_without_effect_is_refused_unless_it_has_one(overrides, needed, message):
    roles = {"actor", "rollout", "reward"}
    with pytest.raises(UserError, match=re.escape(message)):
        check_effects(loaded(overrides), roles)
    check_effects(loaded([*overrides, *(needed or ())]), {*roles, "critic", "reward_model", "process_reward"})


def test_check_effects_cases_cover_each_key_of_the_table():
    found = {pair for overrides, *_ in WITHOUT_EFFECT for pair in without_effect(loaded(overrides), {"actor"})}
    keys = [(f"{row.section}.{key}", row.missing) for row in NEEDS for key in row.keys.split()]
    assert [pair for pair in keys if pair not in found] == []
    check_effects(loaded([]), {"actor"})
