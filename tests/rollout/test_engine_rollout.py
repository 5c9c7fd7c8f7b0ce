"""GRPO over Megatron and the real SGLang and vLLM: after every sync the engine is the exported checkpoint, whatever the
layouts."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.helpers.engines import SGLANG, VLLM
from tests.helpers.traces import needs_sglang, needs_vllm
from tests.rollout.engine_jobs import checked_steps, engine_job, inputs, train, trained_once
from verl_mg.config import LoraConfig
from verl_mg.errors import UserError
from verl_mg.job.build_models import ModelRoleBuilder
from verl_mg.layout import Layout
from verl_mg.models.hf_config import read_config

LAYOUTS = ("tp2", "pp2", "tp1")
UPDATES = 2
"""Of the first actor; each other one has one, before which its weights were sent once already."""


def train_by_each(folder: Path, overrides: list[str], engine: str, layouts: Sequence[str]) -> list[dict[str, object]]:
    """Under each layout, then of adapters: iterations, after each a checkpoint and the engine's greedy answers."""
    reported = []
    job, recipe = engine_job(folder, f"actor.layout={LAYOUTS[0]}", "rollout.layout=tp2", *overrides, engine=engine)
    actor = job.config.actor
    sections = {layout: actor.model_copy(update={"layout": layout}) for layout in layouts}
    sections["tp2-lora"] = actor.model_copy(update={"layout": "tp2", "lora": LoraConfig(rank=4, alpha=8)})
    for name, section in sections.items():
        if name != LAYOUTS[0]:
            # The same engine, fed by another actor.
            other = ModelRoleBuilder(job.config.model_copy(update={"actor": section}), 2, job.context)
            job.roles = {**job.roles, "actor": other.build("actor")}
            job.rollout.update_weights(job.actor)
            assert (str(job.actor.runner.layout), bool(job.actor.runner.computed_parameters)) == (
                str(Layout.parse(section.layout).fit(2)),
                name == "tp2-lora",
            )
        for update in range(UPDATES if name == LAYOUTS[0] else 1):
            reported.append(trained_once(job, recipe, folder, f"{name}-{update}"))
    return reported


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("qwen3_moe", ["rollout.replay_routing=true", "actor.offload=true", "rollout.max_mismatch=0.001"]),
        pytest.param("qwen3", ["rollout.sleep=false"], marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("engine", [SGLANG, VLLM])
def test_engine_after_update_weights_serves_the_exported_checkpoint(ranks, tmp_path, engine, architecture, overrides):
    folder = inputs(tmp_path, architecture)
    # What is sent depends on the engine's layout, not on its kind: another layout of the actor is once enough.
    layouts = LAYOUTS[:1] if (engine, architecture) == ("vllm", "qwen3_moe") else LAYOUTS
    results = ranks.run(2, train_by_each, folder, overrides, engine, layouts)
    for step, reported in enumerate(checked_steps(folder, results)):
        received, bound = reported[0]["sync"]
        assert received == bound and (received > 0 or reported[0]["checkpoint"].startswith("tp1"))
        assert {v for rank in reported for v in rank["versions"]} == {step if step < UPDATES else 0}
        ids = sorted(i for rank in reported for i in rank["ids"])
        assert ids == list(range(step * 24, (step + 1) * 24))


SERVED = [
    # A mixture, whose routers' choice on the engine is the trainer's.
    pytest.param("sglang", "granitemoe", marks=needs_sglang),
    *(pytest.param("sglang", name, marks=[needs_sglang, pytest.mark.nightly]) for name in ("olmo2", "phi3", "granite")),
    # SGLang's activation of gpt2 has no form for the CPU.
    *(
        pytest.param("vllm", name, marks=[needs_vllm, pytest.mark.nightly])
        for name in ("olmo2", "gpt2", "phi3", "granite")
    ),
]


@pytest.mark.parametrize(("engine", "architecture"), SERVED)
def test_engine_of_a_model_without_a_table_serves_the_exported_checkpoint(ranks, tmp_path, engine, architecture):
    folder = inputs(tmp_path, architecture, hidden=128, tie_embeddings=architecture == "gpt2")
    with pytest.raises(UserError, match=f"model_type '{architecture}' is not supported"):
        read_config(folder / "model")
    # gpt2 has an embedding of positions, so its rows are no longer than these.
    overrides = ["actor.backend=fsdp", "rollout.layout=tp2", "data.max_prompt_tokens=32"]
    overrides += ["rollout.replay_routing=true"] if architecture == "granitemoe" else []
    results = ranks.run(2, partial(train, engine=engine), folder, *overrides)
    for step, reported in enumerate(checked_steps(folder, results)):
        received, bound = reported[0]["sync"]
        assert received == bound > 0
        assert {v for rank in reported for v in rank["versions"]} == {step}
    (table,) = (folder / "run" / "sharding_tables").iterdir()
    assert table.name.startswith(engine)


@pytest.mark.nightly
def test_engine_that_receives_changes_alone_serves_the_exported_checkpoint(ranks, tmp_path):
    """Updates are so small that many elements stay as they are."""
    folder = inputs(tmp_path, "qwen3")
    changes = ["rollout.delta=true", "rollout.sleep=false", "actor.optimizer.lr=1e-9"]
    results = ranks.run(2, train, folder, "actor.layout=pp2", "rollout.layout=tp2", *changes)
    for step, reported in enumerate(checked_steps(folder, results)):
        received, bound = reported[0]["sync"]
        assert 0 < received < 0.9 * bound, step
