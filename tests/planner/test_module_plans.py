"""Command `verl-mg plan` for roles with the FSDP backend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.tiny_models import tiny_model
from verl_mg.cli import main
from verl_mg.config import FsdpConfig
from verl_mg.layout import EngineLayout, Layout
from verl_mg.planner.cost import train_seconds
from verl_mg.planner.inputs import PlanInputs
from verl_mg.planner.iteration_time import weight_sync
from verl_mg.planner.memory import train_memory
from verl_mg.planner.training_options import fsdp_options
from verl_mg.sharding.module_table import module_table

CONFIG = """
model: {path: MODEL, dtype: bfloat16}
data: {train: prompts.jsonl}
actor: {backend: fsdp, layout: tp2, recompute: true}
critic: {backend: fsdp, dtype: float32, layout: cp2}
rollout: {engine: sglang, layout: tp2}
fsdp: {replicas: 2}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_model(tmp_path_factory.mktemp("m") / "model", "qwen3_moe", 2, 64)
    for file in folder.glob("*.safetensors"):  # a plan needs config.json alone
        file.unlink()
    return folder


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    main(["plan", *arguments, "--json"])
    numbers: dict[str, Any] = json.loads(capsys.readouterr().out)
    return numbers


def inputs(model: Path, **options: Any) -> PlanInputs:
    return PlanInputs(module_table(model), 8, options=fsdp_options(FsdpConfig(**options), "bfloat16"))


def test_plan_of_a_job_reads_backend_replicas_and_roles(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    file = model.parent / "job.yaml"
    file.write_text(CONFIG.replace("MODEL", str(model)))
    arguments = ("recipes/ppo.py", "--config", str(file), "--ranks", "8")
    numbers = planned(capsys, *arguments)
    assert numbers["problem"] is None and numbers["train"]["layout"] == "tp2" and numbers["train"]["dp"] == 4
    assert numbers["train"]["collectives"].keys() == {"gathered", "reduced", "replicated"}
    assert numbers["assumptions"][0].startswith("backend fsdp: float32 weights") and "in 2 copies" in str(numbers)
    assert [role["role"] for role in numbers["auxiliary_roles"]] == ["critic"]
    assert numbers["sync"]["gib"]["received by a rank"] == numbers["sync"]["gib"]["lower bound of received"]
    main(["plan", *arguments])
    assert "GiB of collectives in an optimizer step" in capsys.readouterr().out


def test_search_finds_layouts_of_the_backend_alone(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    found = planned(capsys, "--model", str(model), "--ranks", "8", "--backend", "fsdp", "--rollout", "tp2", "--search")
    layouts = {row["train"] for row in found["layouts"]}
    assert "tp2" in layouts and not any("pp" in layout or "ep" in layout for layout in layouts)
    assert {row["recompute"] for row in found["layouts"]} <= {"nothing", "whole layers"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--train", "pp2"], "layout pp2-dp4: pp2 is not possible with backend: fsdp. Leave out pp2. Nearest valid"),
        (["--train", "tp8"], "tp8 * cp1 does not divide the 4 attention heads"),
        (["--train", "tp2", "--critic", "ep2"], "critic: layout ep2-dp8: ep2 is not possible with backend: fsdp"),
    ],
)
def test_plan_layout_that_a_job_would_refuse_is_one_line(
    capsys: pytest.CaptureFixture[str], model: Path, arguments: list[str], words: str
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["plan", "--model", str(model), "--ranks", "8", "--backend", "fsdp", "--rollout", "tp2", *arguments])
    err = capsys.readouterr().err
    assert left.value.code == 2 and words in err and err.count("\n") == 1


def test_plan_of_a_role_with_an_optimizer_of_megatron_is_refused(
    capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    file = model.parent / "muon.yaml"
    file.write_text(CONFIG.replace("MODEL", str(model)))
    with pytest.raises(SystemExit):
        main(["plan", "recipes/ppo.py", "--config", str(file), "--ranks", "8", "actor.optimizer.kind=muon"])
    assert "actor.optimizer.kind: muon is not possible with backend: fsdp" in capsys.readouterr().err


def test_memory_of_options_moves_where_they_say(model: Path) -> None:
    layout = Layout().fit(8)
    plain, host, copies, kept = (
        {part: size for part, (size,) in train_memory(inputs(model, **options), layout).parts.items()}
        for options in ({}, {"cpu_offload": True}, {"replicas": 4}, {"reshard_after_forward": False})
    )
    assert host["gradients"] == host["optimizer states"] == 0 and host["gathered weights"] == plain["gathered weights"]
    assert 3 < copies["gradients"] / plain["gradients"] <= 4  # less padding
    assert kept["gradients"] == plain["gradients"] and kept["gathered weights"] >= plain["gathered weights"]
    assert copies["activations"] == plain["activations"] > 0


def test_sync_receives_lower_bound_and_slower_links_cost_seconds(model: Path) -> None:
    layout = Layout.parse("tp2").fit(8)
    sync = weight_sync(inputs(model), layout, EngineLayout.parse("tp2"))
    assert sync.received == sync.lower_bound and min(sync.received) > 0
    table, options = module_table(model), fsdp_options(FsdpConfig(), "bfloat16")
    slow, fast = (PlanInputs(table, 8, intra_node=rate, options=options) for rate in (1e-3, 1e3))
    assert train_seconds(slow, layout) > train_seconds(fast, layout)
    host = fsdp_options(FsdpConfig(cpu_offload=True), "bfloat16")
    assert train_seconds(PlanInputs(table, 8, options=host), layout) > train_seconds(
        PlanInputs(table, 8, options=options), layout
    )
