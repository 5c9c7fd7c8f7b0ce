"""The table of a job's start: rows of real models on the fake GPU and on ranks, and each warning."""

import io
import json
import re
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.fsdp import fake_cuda_cases as fsdp_cases
from tests.helpers.tiny_jobs import metrics_of
from tests.helpers.tiny_models import tiny_model
from tests.megatron import fake_cuda_cases as cases
from tests.run.jobs import job, make_inputs
from verl_mg import device
from verl_mg.choice import Choice
from verl_mg.config import load_config
from verl_mg.job.job import RunningJob
from verl_mg.job.recipe import load_recipe
from verl_mg.megatron import transformer_config
from verl_mg.megatron.transformer_config import chosen_kernels
from verl_mg.models.hf_config import read_config
from verl_mg.phase_timer import PhaseTimer
from verl_mg.planner.job_memory import job_memory
from verl_mg.run import loop, start_table
from verl_mg.run.start_table import RAN_WITH, START, StartTable
from verl_mg.training.model_spec import ModelSpec

ROOT = Path(__file__).parents[2]
FLASH, FLEX = "torch's FlashAttention 2", "torch's FlexAttention"
GRADIENTS, UNFUSED = {"weight gradients": ["added to their buffers by torch"]}, "Install flash-linear-attention."
ROWS = {
    "qwen3_moe": {"attention, full": [FLASH], "experts": ["torch's grouped product"]},
    "gemma2": {f"attention, {keys}, softcapped": [FLEX] for keys in ("full", "window of 5 tokens")},
    "gpt_oss": {f"attention, {keys}, with sinks": [FLEX] for keys in ("full", "window of 5 tokens")},
    "deepseek_v3": {"latent attention, full": [FLASH]},
    "deepseek_v32": {"sparse attention, full": [f"{FLEX} under the selected keys; short rows by {FLASH}"]},
    "qwen3_next": {"attention, full": [FLASH]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("family", ROWS)
def test_megatron_model_on_cuda_says_what_its_layers_compute_with(fake_cuda, folder, family):
    rows = fake_cuda.run(cases.chosen, tiny_model(folder / family, family, 2, 64))
    assert {part: rows[part] for part in ROWS[family]} == ROWS[family]
    assert rows["weight gradients"] == GRADIENTS["weight gradients"] and rows["precision"] == ["bfloat16"]
    can_use_others = family not in ("gpt_oss", "deepseek_v32")
    assert rows["kernels"][0] == "torch" and (len(rows["kernels"]) == 2) == can_use_others
    if family == "qwen3_next":
        how, warning = rows["linear attention"]
        assert how == "torch, chunk by chunk" and UNFUSED in warning


def test_experts_whose_widths_do_not_fit_the_grouped_product_are_a_warning(fake_cuda, folder):
    how, warning = fake_cuda.run(cases.chosen, tiny_model(folder / "narrow", "qwen3_moe", 2, 56))["experts"]
    assert how == "one after another" and "multiples of 16 bytes" in warning


def test_fsdp_module_on_cuda_says_what_its_layers_compute_with(fake_cuda, folder):
    rows = fake_cuda.run(fsdp_cases.chosen, tiny_model(folder / "softcapped", "gemma2", 2, 64))
    assert {part: how for part, how in rows.items() if part.startswith("attention")} == ROWS["gemma2"]
    slow = fake_cuda.run(fsdp_cases.chosen, tiny_model(folder / "slow", "qwen3_moe", 2, 52))
    assert slow["attention, full"] == [FLASH] and slow["experts"][0] == "transformers' eager" and slow["experts"][1:]


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H100")


@pytest.mark.parametrize(
    ("has_engine", "experts", "dtype", "words"),
    [
        (False, 4, torch.bfloat16, "Transformer Engine cannot be imported. Install"),
        (True, 128, torch.bfloat16, "128 experts"),
        (True, 4, torch.bfloat16, ""),
        (False, 128, torch.float32, ""),
    ],
)
def test_torch_kernels_on_a_gpu_are_a_warning_where_others_are_faster(
    on_gpu, monkeypatch, folder, has_engine, experts, dtype, words
):
    monkeypatch.setattr(transformer_config, "HAVE_TE", has_engine)
    config = read_config(tiny_model(folder / "mixture", "qwen3_moe", 2, 64))
    assert config.experts
    config = replace(config, experts=replace(config.experts, count=experts))
    warning = chosen_kernels(config, ModelSpec(folder, dtype)).warning
    assert words in warning and bool(warning) == bool(words)
    assert not chosen_kernels(config, ModelSpec(folder, dtype, kernels="transformer_engine")).warning


@pytest.mark.parametrize(
    ("name", "value", "part", "words"),
    [
        ("get_device_capability", (10, 0), "kind", "this project has run on H100 and H200 only"),
        ("get_device_capability", (9, 0), None, ""),
        (
            "installed_versions",
            {"torch": "2.15.0+cu140", "sglang": "none"},
            "torch",
            "it has run with 2.11.0 and 2.14.1",
        ),
    ],
)
def test_device_or_version_that_nothing_has_run_with_is_a_warning(on_gpu, monkeypatch, name, value, part, words):
    monkeypatch.setattr(start_table, "installed_versions", lambda: {"torch": "2.14.1+cu130", "sglang": "none"})
    monkeypatch.setattr(start_table if name == "installed_versions" else torch.cuda, name, lambda *_: value)
    slow = {row.part: row.warning for row in start_table._devices(count=1) if row.warning}
    assert list(slow) == ([part] if part else []) and words in slow.get(part, "")
    assert "several GPUs" in {row.part: row.warning for row in start_table._devices(count=8)}["number"]


def test_precision_on_a_gpu_says_what_float32_is_there(on_gpu, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    assert device.precision(torch.float32) == "float32, with TF32"
    device.compute_in_float32()
    assert device.precision(torch.float32) == "float32, without TF32"
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert device.precision(torch.bfloat16) == "bfloat16, deterministic"


def test_versions_that_have_run_are_those_of_the_reports_and_the_pinned_ones_among_them():
    reports = "".join(path.read_text() for path in (ROOT / "benchmarks").glob("h*/*.md"))
    assert all(version in reports for versions in RAN_WITH.values() for version in versions)
    pins = dict(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "launch/requirements-gpu.txt").read_text(), re.MULTILINE))
    pins["NCCL"] = pins["nvidia-nccl-cu13"]
    assert all(pins[package] in versions for package, versions in RAN_WITH.items())


UNTRIED = {
    "rollout.engine=vllm": ["rollout.engine=vllm"],
    "rollout.engine=sglang job.deterministic=true": ["rollout.engine=sglang", "job.deterministic=true"],
    "rollout.wire=int4": ["rollout.engine=sglang", "rollout.wire=int4"],
    "rollout.wire=mxfp8": ["rollout.engine=sglang", "rollout.wire=mxfp8"],
    "rollout.urls": ["rollout.engine=sglang", "rollout.urls=[http://localhost:1]"],
    "rollout.num_ranks": ["rollout.engine=sglang", "rollout.num_ranks=1"],
    "rollout.sglang.speculative_algorithm": ["rollout.engine=sglang", "rollout.sglang.speculative_algorithm=EAGLE"],
    "megatron.transformer.fp8": ["megatron.transformer={fp8: e4m3}"],
    "actor.optimizer.kind=muon": ["actor.optimizer.kind=muon"],
    "actor.optimizer.cpu_offload=true": ["actor.optimizer.cpu_offload=true"],
}
RAN = {
    "test_jobs.py::test_job_on_fsdp_agrees_with_its_engines": ["actor.backend=fsdp", "fsdp.cpu_offload=true"],
    "test_engine_jobs.py::test_engine_serves_trained_adapters[alone]": [
        *("rollout.engine=sglang", "rollout.adapters=true", "actor.lora={rank: 4, alpha: 8}"),
    ],
    "test_engine_jobs.py::test_engine_with_quantized_weights_serves_the_saved_checkpoint[fp8_block]": [
        *("rollout.engine=sglang", "rollout.wire=fp8_block"),
    ],
}
"""Tests that reports name as passed on a GPU, with options of their jobs."""


def configured(*overrides):
    recipe = load_recipe("grpo")
    return load_config(None, ["model.path=m", "data.train=t", "reward.function=exact", *overrides], recipe.config)


@pytest.mark.parametrize("key", UNTRIED)
def test_option_that_has_not_run_on_a_gpu_is_a_warning(on_gpu, key):
    assert tuple(UNTRIED) == start_table.NEVER_RAN
    for overrides, expected in ((UNTRIED[key], [key]), ([], [])):
        described = SimpleNamespace(config=configured(*overrides), requested={"actor", "rollout"})
        rows = list(start_table._untried(described))
        assert [row.chosen for row in rows] == expected and all(row.warning for row in rows)


@pytest.mark.parametrize("test", RAN)
def test_option_of_a_test_that_has_passed_on_a_gpu_is_no_warning(on_gpu, test):
    reports = "".join(path.read_text() for path in (ROOT / "benchmarks").glob("h*/*.md"))
    assert re.search(rf"^\| `{re.escape(test)}`.*\| passed", reports, re.MULTILINE)
    described = SimpleNamespace(config=configured(*RAN[test]), requested={"actor", "rollout"})
    assert list(start_table._untried(described)) == []


def test_planned_memory_above_that_of_the_device_is_a_warning(monkeypatch):
    model = ROOT / "tools" / "model_configs" / "qwen2_5_7b.json"
    config = configured("rollout.engine=sglang", "model.dtype=bfloat16", "actor.layout=tp1", f"model.path={model}")
    described = SimpleNamespace(config=config, requested={"actor", "rollout"})
    monkeypatch.setattr(start_table.dist, "get_world_size", lambda: 1)
    for gib, fits in ((80, False), (288, True)):
        monkeypatch.setattr(start_table.device, "total_memory", lambda gib=gib: gib * 2**30)
        memory, rows = start_table._memory(described)
        assert memory and rows[:4] == [
            Choice(phase, f"{size / 2**30:,.1f} of {gib}.0 GiB planned") for phase, size in memory.phases.items()
        ]
        assert [row.warning.startswith("training: it needs ") for row in rows[4:]] == [True] * (not fits)
    assert list(job_memory(config, {"actor", "rollout"}, 1, 1, None).phases) == [
        *("build", "training", "generation", "weight sync"),
    ]


def shown_on_cuda(inputs, output, overrides):
    """What a job prints whose start takes its rank for one with a GPU."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as printed:
        patch.setattr(loop, "torch", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True)))
        job("grpo", inputs, output, overrides)
    return printed.getvalue()


def test_job_on_cuda_prints_and_writes_its_table_once(ranks, tmp_path):
    inputs = make_inputs(tmp_path / "inputs")
    first, second = ranks.run(2, shown_on_cuda, inputs, tmp_path / "run", ["job.console=true", "job.iterations=2"])
    assert second == "" and first.count("attention, full") == first.count("sdpa of transformers") == 1
    written = json.loads((tmp_path / "run" / START).read_text())
    assert written["warnings"] == [] and written["rows"]["devices"][0]["chosen"] == "CPU"
    for name, rows in written["rows"].items():
        assert name in first and all(row["chosen"] in first for row in rows)


def started_where_a_rank_cannot_describe_it(inputs, output):
    def chosen(of):
        if torch.distributed.get_rank() == 1:
            raise RuntimeError("no kernel\nfound")
        return whole(of)

    whole = RunningJob.chosen
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunningJob, "chosen", chosen)
        return shown_on_cuda(inputs, output, ["job.console=true", "job.iterations=1"])


def test_job_whose_kernels_cannot_be_described_on_a_rank_says_it_and_trains(ranks, tmp_path):
    inputs = make_inputs(tmp_path / "inputs")
    first, _ = ranks.run(2, started_where_a_rank_cannot_describe_it, inputs, tmp_path / "run")
    assert "none: RuntimeError: no kernel found" in first and "attention, full" in first
    assert len(metrics_of(tmp_path / "run")) == 1


@pytest.mark.parametrize("has_gpu", [False, True])
def test_memory_of_the_first_iteration_is_printed_with_the_plan(capsys, monkeypatch, tmp_path, has_gpu):
    gib = 2**30
    bytes_of = ({"models": (2 * gib, gib), "update": (gib, gib)}, {"models": (gib, gib), "update": (3 * gib, 2 * gib)})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 0)
    monkeypatch.setattr(start_table, "all_gather_json", lambda own: [own, 3 * gib] if own == 0 else list(bytes_of))
    monkeypatch.setattr(start_table.dist, "get_rank", lambda: 0)
    config = SimpleNamespace(job=SimpleNamespace(console=True, folder=tmp_path))
    described = SimpleNamespace(config=config, timer=PhaseTimer())
    memory = start_table.JobMemory({"build": 1.0 * gib, "training": 2.0 * gib}, None)
    StartTable({}, memory).compare_memory(described)
    build, training, *tensors = capsys.readouterr().out.splitlines()
    plans = ("", "") if has_gpu else (", 1.00 of tensors planned", ", 2.00 of tensors planned")
    assert build == f"fullest rank  build     2.00 GiB at most, 1.00 kept{plans[0]}"
    assert training == f"              training  3.00 GiB at most, 2.00 kept{plans[1]}"
    assert tensors == ["              tensors   3.0 GiB at most, 2.0 planned (training)"] * has_gpu
    assert list(json.loads((tmp_path / START).read_text())["rows"]) == ["fullest rank"]


def test_job_on_the_cpu_writes_the_seconds_of_its_start_and_its_memory_by_phase(ranks, tmp_path):
    inputs = make_inputs(tmp_path / "inputs")
    ranks.run(2, job, "grpo", inputs, tmp_path / "run", ["job.iterations=1"])
    rows = json.loads((tmp_path / "run" / START).read_text())["rows"]
    seconds = {row["part"]: float(row["chosen"].removesuffix(" s")) for row in rows["start"]}
    assert {"models", "together"} <= set(seconds) and max(seconds.values()) == seconds["together"]
    parts = {row["part"]: row["chosen"] for row in rows["fullest rank"]}
    assert {"build", "generation", "training", "weight sync"} <= set(parts)
